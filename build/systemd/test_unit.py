"""``just test-unit``: the unit under a real systemd. Each line is one thing that was tried, and how it went.

    python build/systemd/test_unit.py [FILE] [--root FOLDER] [--suite bullseye] [--model M.gguf] [--only NAME,NAME]
                                        [--json FILE]

Needs root, debootstrap (once) and systemd-nspawn. FILE is the executable; it lies in the home folder of the machine's
root, which installs it from there. Exit code 1 if anything failed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1]
ROOT = BUILD.parent
sys.path[:0] = [str(BUILD), str(Path(__file__).parent)]

from nspawn import Machine, make_root  # noqa: E402
from rig import CONFIG, DROPIN, Trial, load  # noqa: E402
from smoke import Failed, Stream, answers, check, free_port, wait_for  # noqa: E402

EXPOSURE_MAX = 1.5


# --- what is tried ----------------------------------------------------------------------------------------------------


def installed(t: Trial) -> str:
    m = t.machine
    done = m.run("/root/kvstream", "service", "install", check=False)
    check(done.returncode == 0 and "/usr/local/bin/kvstream: copied from /root/kvstream" in done.stdout, done)
    check("systemctl enable --now kvstream.service" in done.stdout, done)
    check("is there already" in m.run("/usr/local/bin/kvstream", "service", "install").stdout, "again")
    m.run("sh", "-c", "echo '# mine' >> /etc/systemd/system/kvstream.service")
    done = m.run("/root/kvstream", "service", "install", check=False)
    check(done.returncode == 1 and "there already, with other contents" in done.stderr, done)
    m.run("/root/kvstream", "service", "install", "--force")
    done = m.run("systemd-analyze", "verify", "kvstream.service", check=False)
    check(done.returncode == 0 and not done.stderr.strip(), done)
    return "from a home folder to /usr/local/bin; what was changed by hand is not replaced; systemd-analyze verify"


def exposure(t: Trial) -> str:
    found = {}
    for name in ("", "gpu", "lan"):
        if name:
            text = (BUILD / "systemd" / f"{name}.conf").read_text("utf-8")
            t.machine.write(f"/etc/systemd/system/kvstream.service.d/{name}.conf", text)
        t.machine.systemctl("daemon-reload")
        out = t.machine.run("systemd-analyze", "security", "--no-pager", "kvstream.service").stdout
        found[name or "alone"] = float(re.findall(r"exposure level for \S+: ([0-9.]+)", out)[0])
        if name:
            t.machine.run("rm", f"/etc/systemd/system/kvstream.service.d/{name}.conf")
    check(found["alone"] <= EXPOSURE_MAX, found)
    return ", ".join(f"{name} {level}" for name, level in found.items())


def started(t: Trial) -> str:
    t.configure()
    seconds = t.start()
    check(answers(t.port, "/health"), "not listening when systemctl returned")
    t.serves()
    wait_for(lambda: "0 running" in t.show("StatusText")["StatusText"], 5)
    pid = t.pid
    status = t.machine.run("cat", f"/proc/{pid}/status").stdout
    facts = dict(re.findall(r"(?m)^(\w+):\t(\S+)", status))
    check(facts["Uid"] != "0" and facts["CapBnd"].strip("0") == "" and facts["NoNewPrivs"] == "1"
          and facts["Seccomp"] == "2", facts)
    exe = t.machine.run("readlink", f"/proc/{pid}/exe").stdout.strip()
    check(exe.startswith("/var/cache/private/kvstream/"), exe)
    owner = t.machine.run("stat", "-c", "%u %a", "/var/cache/private/kvstream").stdout.strip()
    check(owner == f"{facts['Uid']} 700", owner)
    limits = t.machine.run("grep", "locked memory", f"/proc/{pid}/limits").stdout.split()
    t.machine.systemctl("stop", "kvstream")
    again = t.start()
    return (f"{seconds:.2f} s with the first unpacking, {again:.2f} s later; uid {facts['Uid']}, no capability, "
            f"seccomp; runs from {Path(exe).parents[1]}; memlock {limits[3]}")


def stopped_with_a_stream(t: Trial) -> str:
    t.configure()
    t.start()
    t.serves()
    stream = Stream(t.port, canned={"chunks": 40, "gap_ms": 100})
    time.sleep(1.1)
    check("1 running" in t.show("StatusText")["StatusText"], t.show("StatusText"))
    began = time.monotonic()
    stopping = threading.Thread(target=t.machine.systemctl, args=("stop", "kvstream"))
    stopping.start()
    time.sleep(1.5)
    seen = t.show("StatusText", "ActiveState")
    check(seen["StatusText"].startswith("draining: 1 running") and seen["ActiveState"] == "deactivating", seen)
    text = stream.rest()
    stopping.join()
    seconds = time.monotonic() - began
    check(text.rstrip().endswith("data: [DONE]") and text.count(" token") == 40, text)
    found = t.show("Result", "ExecMainStatus", "ActiveState")
    check(found == {"Result": "success", "ExecMainStatus": "0", "ActiveState": "inactive"}, found)
    return f"{seconds:.1f} s, the stream came to its end, Result=success"


def drained_longer_than_the_timeout(t: Trial) -> str:
    t.configure(service="TimeoutStopSec=2\nWatchdogSec=3\n")
    t.start()
    t.serves()
    stream = Stream(t.port, canned={"chunks": 80, "gap_ms": 100})
    began = time.monotonic()
    t.machine.systemctl("stop", "kvstream")
    seconds = time.monotonic() - began
    text = stream.rest()
    check(text.count(" token") == 80 and seconds > 4, (seconds, text))
    check(t.show("Result")["Result"] == "success", t.show("Result"))
    return f"{seconds:.1f} s under TimeoutStopSec=2 and WatchdogSec=3, Result=success"


def watched_when_stopped(t: Trial) -> str:
    t.configure(service="WatchdogSec=3\n")
    t.start()
    t.serves()
    time.sleep(7)
    check(t.show("NRestarts")["NRestarts"] == "0", "restarted without need")
    pid = t.pid
    t.kill("STOP", pid)
    seconds = t.restarted(pid)
    check("watchdog" in t.machine.journal("kvstream").lower(), t.machine.journal("kvstream"))
    return f"7 s of WatchdogSec=3 without a restart; after kill -STOP another serves within {seconds:.1f} s"


SOURCES = "Environment=LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/site"


def watched_when_stuck(t: Trial) -> str:
    """With the sources in a Python of this machine: into the executable nobody can reach to make it stuck."""
    done = t.machine.run("env", "LD_LIBRARY_PATH=/opt/python/lib", "/opt/python/bin/python3", "--version", check=False)
    if done.returncode:
        return f"not tried: this machine's Python does not start there: {done.stderr.splitlines()[0]}"
    command = f"/opt/python/bin/python3 /opt/stuck.py serve --config {CONFIG}"
    t.configure(service=f"WatchdogSec=3\n{SOURCES}\nExecStart=\nExecStart={command}\n")
    seen = []
    for number, how in (("USR1", "its step never returns"), ("USR2", "it is gone while all else goes on")):
        t.start()
        t.serves()
        pid = t.pid
        t.kill(number, pid)
        seen.append(f"{how}: another serves within {t.restarted(pid):.1f} s")
        journal = t.machine.journal("kvstream", 120)
        said = "in step" if number == "USR1" else "does not come round"
        check("Fatal Python error: Aborted" in journal and said in journal, journal)
        t.machine.systemctl("stop", "kvstream")
    return "; ".join(seen) + "; the journal says where it stood"


def killed(t: Trial) -> str:
    t.configure()
    t.start()
    pid = t.pid
    t.kill("KILL", pid)
    seconds = t.restarted(pid)
    return f"another serves within {seconds:.1f} s (RestartSec=0.5)"


def reloaded(t: Trial) -> str:
    t.configure(t.toml('reload = "sighup"'))
    t.start()
    t.serves()
    pid = t.pid
    t.machine.write(CONFIG, t.toml('reload = "sighup"') + 'aliases = ["other=m"]\nname = "renamed"\n')
    began = time.monotonic()
    t.machine.systemctl("reload", "kvstream")
    seconds = time.monotonic() - began
    names = [lane["name"] for lane in t.get("/status")["lanes"]]  # type: ignore[attr-defined]
    check(names == ["renamed"], names)
    t.machine.write(CONFIG, "[server]\nprot = 1\n")
    done = t.machine.systemctl("reload", "kvstream", check=False)
    journal = t.machine.journal("kvstream")
    check(done.returncode != 0 and "prot" in journal and "nothing was reloaded" in journal, journal)
    check(t.show("ActiveState", "MainPID") == {"ActiveState": "active", "MainPID": str(pid)}, t.show("ActiveState"))
    t.kill("HUP", pid)
    wait_for(lambda: "refused" in t.show("StatusText")["StatusText"], 5)
    check(t.show("ActiveState")["ActiveState"] == "active" and answers(t.port, "/ready"), "not active")
    t.machine.write(CONFIG, t.toml('reload = "sighup"'))
    out = t.machine.run("/usr/local/bin/kvstream", "reload", "--config", CONFIG).stdout  # found by its port
    check(out.startswith(f"in force: {CONFIG}"), out)
    check(t.get("/status")["lanes"][0]["name"] != "renamed", "not read")  # type: ignore[index]
    return f"in force after {seconds:.1f} s; a wrong file: systemctl reload fails, what served serves on and says so"


def not_restarted_when_wrong(t: Trial) -> str:
    t.configure("[server]\nprot = 1\n")
    done = t.machine.systemctl("start", "kvstream", check=False)
    time.sleep(2)
    found = t.show("ExecMainStatus", "NRestarts", "ActiveState")
    check(done.returncode and found == {"ExecMainStatus": "2", "NRestarts": "0", "ActiveState": "failed"}, found)
    t.configure()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", t.port))
        taken.listen()
        t.machine.systemctl("start", "--no-block", "kvstream")
        wait_for(lambda: t.show("NRestarts")["NRestarts"] not in ("0", "1"), 20)
        check(t.show("ExecMainStatus")["ExecMainStatus"] in ("3", "0"), t.show("ExecMainStatus"))
    t.serves()
    return "exit code 2: no restart; port taken (3): restarted until it was free"


def activated(t: Trial) -> str:
    m = t.machine
    t.configure()
    m.run("/usr/local/bin/kvstream", "service", "install", "--socket")
    m.write("/etc/systemd/system/kvstream.socket.d/test.conf",
            f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{t.port}\n")
    m.systemctl("daemon-reload")
    m.systemctl("start", "kvstream.socket")
    check(t.show("ActiveState")["ActiveState"] == "inactive", "started too early")
    began = time.monotonic()
    check(answers(t.port, "/health"), "the first client")
    first = time.monotonic() - began
    t.serves()
    inherited = [fd for fd in m.run("ls", "-l", f"/proc/{t.pid}/fd").stdout.splitlines() if "socket:" in fd]
    with load(t) as counts:
        time.sleep(1)
        for _ in range(3):
            m.systemctl("restart", "kvstream")
            time.sleep(1)
    refused = {name: count for name, count in counts.items() if name != "whole" and not name.startswith("status 503")}
    check(not refused and counts["whole"] > 20, counts)
    m.systemctl("stop", "kvstream.socket", "kvstream.service")
    unix = "/run/kvstream.sock"
    m.write("/etc/systemd/system/kvstream.socket.d/test.conf",
            f"[Socket]\nListenStream=\nListenStream={unix}\nNoDelay=no\n")
    m.systemctl("daemon-reload")
    m.systemctl("start", "kvstream.socket")
    m.systemctl("start", "kvstream.service", check=False)
    journal = m.journal("kvstream")
    check(f"the Unix socket {unix}; KVStream serves TCP only" in journal, journal)
    m.systemctl("stop", "kvstream.socket")
    m.run("rm", "-r", "/etc/systemd/system/kvstream.socket.d", "/etc/systemd/system/kvstream.socket")
    return (f"first byte {first:.2f} s with the start; three restarts under load: {counts}; {len(inherited)} sockets "
            "open; a Unix socket is refused in a sentence")


def embedded(t: Trial) -> str:
    if not t.has_model:
        return "not tried: no --model"
    model = '[embedded]\nmodel = "/srv/model.gguf"\ncontext_tokens = 512\n'
    t.configure(f"[server]\nport = {t.port}\n{model}", service="TimeoutStartSec=8\n")
    began = time.monotonic()
    t.machine.systemctl("start", "--no-block", "kvstream")
    wait_for(lambda: "loading" in t.show("StatusText")["StatusText"] and len(t.pids()) == 2, 20)
    child = t.pids()[1]
    t.kill("STOP", child)  # a model that takes its time
    wait_for(lambda: time.monotonic() > began + 12, 20)
    loading = t.show("ActiveState", "StatusText")
    check(loading["ActiveState"] == "activating" and "loading" in loading["StatusText"], loading)
    t.kill("CONT", child)
    wait_for(lambda: t.show("ActiveState")["ActiveState"] == "active", 30)
    seconds = time.monotonic() - began
    text = Stream(t.port, max_tokens=8).rest()
    check('"content"' in text and text.rstrip().endswith("data: [DONE]"), text)
    pids = t.pids()
    both = [pid for pid in pids for line in t.machine.run("cat", f"/proc/{pid}/maps").stdout.splitlines()
            if "rwx" in line.split()[1]]
    check(len(pids) == 2 and not both, (pids, both))
    t.machine.systemctl("stop", "kvstream")
    check(t.show("Result")["Result"] == "success", t.show("Result"))
    state = t.machine.run("find", "/var/lib/private/kvstream", "-maxdepth", "1").stdout.split()
    check("/var/lib/private/kvstream/slots" in state, state)
    t.configure(f"[server]\nport = {t.port}\n{model.replace('model.gguf', 'none.gguf')}", unit="StartLimitBurst=2\n")
    check(t.machine.systemctl("start", "kvstream", check=False).returncode, "started without a model")
    found = t.show("ExecMainStatus", "NRestarts")
    check(found == {"ExecMainStatus": "2", "NRestarts": "0"}, found)
    return (f"ready after {seconds:.1f} s, when the model was there (TimeoutStartSec=8); an answer; no page that can "
            "be written and executed; without the model systemctl start fails")


def parts(t: Trial) -> str:
    # A oneshot unit may not be restarted by force: systemd refuses it.
    t.configure(service="Type=oneshot\nRestart=no\nRestartForceExitStatus=\nWatchdogSec=0\nExecStart=\n"
                        "ExecStart=/usr/local/bin/kvstream doctor --parts --json\n")
    t.start()
    said = t.machine.journal("kvstream", 200)
    rows = json.loads(said[said.rindex("\n{\n"):said.rindex("\n}") + 2])["parts"]
    wrong = {row["name"]: row["problem"] for row in rows if row["problem"]}
    check(set(wrong) <= {"matplotlib", "pycuda"} and "NVIDIA driver" in wrong.get("pycuda", "NVIDIA driver"), wrong)
    return f"under the unit's own rules: {', '.join(row['name'] for row in rows if not row['problem'])} load"


def of_a_user(t: Trial) -> str:
    m = t.machine
    t.configure()
    m.run("useradd", "--create-home", "--uid", "1000", "someone")
    m.systemctl("start", "user@1000.service")
    m.run("cp", "/root/kvstream", "/home/someone/kvstream")
    port, home = free_port(), "/home/someone"
    done = m.run(f"{home}/kvstream", "service", "install", "--user", user="someone")
    check(f"{home}/.config/kvstream/kvstream.toml: written" in done.stdout, done)
    m.write(f"{home}/.config/kvstream/kvstream.toml", t.toml().replace(str(t.port), str(port)))
    done = m.run(f"{home}/kvstream", "service", "install", "--user", "--start", user="someone")
    wait_for(lambda: answers(port, "/ready"), 30)
    found = m.run("systemctl", "--user", "show", "kvstream", "--property=StatusText,MainPID", user="someone").stdout
    check("0 running" in found, found)
    m.run("systemctl", "--user", "reload", "kvstream", user="someone")
    m.run("systemctl", "--user", "stop", "kvstream", user="someone")
    found = m.run("systemctl", "--user", "show", "kvstream", "--property=Result", user="someone").stdout.strip()
    check(found == "Result=success", found)
    return "installed with --start, ready, reload, stop: Result=success"


def uninstalled(t: Trial) -> str:
    m = t.machine
    t.configure()
    m.run("/root/kvstream", "service", "install", "--socket", "--lan", "--start", "--force")
    done = m.run("/usr/local/bin/kvstream", "service", "uninstall")
    check(not t.pids() and done.stdout.count(": removed") == 5, done)  # two are links
    check(f"{DROPIN}: is not from" in done.stdout, done)
    places = ("/etc", "/var/lib", "/var/cache", "/usr/local")
    m.run("rm", "-r", str(Path(DROPIN).parent))
    m.run("sh", "-ec", done.stdout.splitlines()[-1])
    left = m.run("find", *places, "-name", "*kvstream*").stdout
    check(not left, left)
    return "socket and service stopped, links and units gone; with the command that it prints, all else"


TRIED = (installed, exposure, started, stopped_with_a_stream, drained_longer_than_the_timeout, watched_when_stopped,
         watched_when_stuck, killed, reloaded, not_restarted_when_wrong, activated, embedded, parts, of_a_user,
         uninstalled)


def tried(trial: Callable[[Trial], str], t: Trial) -> tuple[str, str]:
    try:
        seen = trial(t)
        return ("-" if seen.startswith("not tried") else "ok"), seen
    except (Failed, OSError, ValueError, KeyError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        return "FAILED", f"{type(error).__name__} {error}; journal: {t.machine.journal('kvstream', 15)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="The unit under a real systemd.")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "dist" / "kvstream")
    parser.add_argument("--root", type=Path, default=ROOT / "dist" / "unit-root", help="made where it is not there")
    parser.add_argument("--suite", default="bookworm", help="of Debian, when it is made")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", default="", help="names, divided by commas; `installed` always runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.geteuid():
        sys.exit("this needs root")
    make_root(args.root, args.suite)
    binds = {args.file.resolve(): "/root/kvstream", Path(sys.base_prefix): "/opt/python",
             Path(sysconfig.get_path("platlib")): "/opt/site", ROOT / "kvstream": "/opt/source/kvstream",
             Path(__file__).with_name("stuck.py"): "/opt/stuck.py"}
    binds |= {args.model.resolve(): "/srv/model.gguf"} if args.model else {}
    port, rows = free_port(), []
    backend = subprocess.Popen([sys.executable, ROOT / "tests" / "measure" / "canned_backend.py", str(port)],
                               stdin=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory(prefix="kvstream-unit-") as folder:
            with Machine(args.root, Path(folder) / "boot.log", binds) as machine:
                t = Trial(machine, f"http://127.0.0.1:{port}", args.model is not None)
                for trial in TRIED:
                    if trial is installed or not args.only or trial.__name__ in args.only.split(","):
                        how, seen = tried(trial, t)
                        rows.append({"tried": trial.__name__.replace("_", " "), "how": how, "seen": seen})
                        print(f"{how:<7} {rows[-1]['tried']}: {seen}", flush=True)
    finally:
        backend.send_signal(signal.SIGTERM)
        backend.wait()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    sys.exit(any(row["how"] == "FAILED" for row in rows))


if __name__ == "__main__":
    main()

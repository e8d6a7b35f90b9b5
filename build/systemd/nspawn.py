"""A Debian with a systemd of its own beside this one, to try units in: a debootstrap root, booted by systemd-nspawn.

The root is made once and never written: each boot lays a tmpfs over it. It shares this machine's network, so that the
backend and the clients are ordinary processes here, and there is no Python in it.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = "systemd,systemd-sysv,dbus,libpam-systemd"
BOOT_S_MAX = 90.0


def mirror() -> str:
    """Where this machine's apt fetches Debian from."""
    done = subprocess.run(["apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages"],
                          capture_output=True, text=True, check=True)
    found = [line.removeprefix("Debian|") for line in done.stdout.splitlines() if line.startswith("Debian|")]
    return found[0] if found else sys.exit("no Debian mirror is in this machine's apt configuration")


def make_root(root: Path, suite: str = "bookworm") -> None:
    if (root / "etc" / "debian_version").is_file() and not (root / "debootstrap").exists():
        return
    shutil.rmtree(root, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    print(f"{root}: debootstrap, some minutes ...", flush=True)
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, root, mirror()], check=True,
                   stdout=subprocess.DEVNULL)


class Machine:
    """A running one. Use as a context manager. ``binds``: files of this machine, read-only, at other paths there."""

    def __init__(self, root: Path, log: Path, binds: dict[Path, str]) -> None:
        self._root, self._log, self._binds = root, log, binds

    def __enter__(self) -> Machine:
        binds = [f"--bind-ro={path}:{there}" for path, there in self._binds.items()]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["systemd-nspawn", "--quiet", "--directory", self._root, "--volatile=overlay",
                 "--machine=kvstream-unit", "--register=no", "--keep-unit", "--console=pipe", *binds, "--boot"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + BOOT_S_MAX
        try:
            while (state := self._state()) not in ("running", "degraded"):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{self._log.read_text('utf-8', 'replace')[-3000:]}\nit does not boot: {state}")
                time.sleep(0.2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # powers off
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _state(self) -> str:
        return self.run("systemctl", "is-system-running", check=False).stdout.strip() if self.leader else "starting"

    @property
    def leader(self) -> int:
        """Its process 1, as numbered here; 0 if there is none yet."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text("utf-8").split()
        return int(children[0]) if children else 0

    def run(self, *command: str, check: bool = True, timeout: float = 120, stdin: str = "",
            user: str = "") -> subprocess.CompletedProcess[str]:
        """A command inside, with a bare environment. *Errors*: ``CalledProcessError`` with what it printed."""
        env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
               "HOME": "/root"}
        if user:
            env |= {"HOME": f"/home/{user}", "XDG_RUNTIME_DIR": "/run/user/1000"}
            command = ("setpriv", "--reuid=1000", "--regid=1000", "--init-groups", *command)
        done = subprocess.run(["nsenter", "-a", "-t", str(self.leader), *command], env=env, input=stdin, text=True,
                              capture_output=True, timeout=timeout, check=False)
        if check and done.returncode:
            raise OSError(f"{' '.join(command)}: {done.returncode}: {done.stdout}{done.stderr}")
        return done

    def write(self, path: str, text: str) -> None:
        self.run("sh", "-c", 'mkdir -p "$(dirname "$1")" && cat > "$1"', "sh", path, stdin=text)

    def systemctl(self, *words: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return self.run("systemctl", *words, check=check, timeout=timeout)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.systemctl("show", unit, f"--property={','.join(names)}").stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str, lines: int = 40) -> str:
        return self.run("journalctl", "-u", unit, "-n", str(lines), "--no-pager", "-o", "cat", check=False).stdout

    def here(self, pid: int) -> int:
        """The number on this machine of a process in there."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and self._same_namespace(entry):
                status = (entry / "status").read_text("utf-8")
                if re.search(rf"(?m)^NSpid:.*\t{pid}$", status):
                    return int(entry.name)
        raise OSError(f"no process {pid} in there")

    def _same_namespace(self, entry: Path) -> bool:
        try:
            return (entry / "ns" / "pid").readlink() == Path(f"/proc/{self.leader}/ns/pid").readlink()
        except OSError:
            return False

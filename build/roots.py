"""Shows that one file works on bare systems: ``just show-roots``. What smoke.py tries is tried in each, and more.

    python build/roots.py FILE [--roots FOLDER] [--suites bookworm,bullseye] [--model M.gguf] [--libcuda FILE]
                          [--too-new FILE] [--only NAME,NAME] [--json FILE] [--mirror URL]

The systems are Debian's smallest, made by debootstrap in FOLDER/SUITE once: no Python, no certificates of authorities.
Each is laid under a file system in memory, so nothing in it is changed. The file runs there in a chroot, as user 1000,
with the network of this machine; backends and clients are outside. --too-new is a file made for a newer glibc than the
oldest system has, --libcuda a driver (tests/cuda/driver simulates one).

As root. Every mount and process lies in namespaces that end with this program. Exit code 1 if anything fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import smoke
from smoke import Failed, NotTried, Place, Stream, check

PROJECT = Path(__file__).resolve().parents[1]
USER = 1000
ACT_S_MAX = 400
CHROOT = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin") or "chroot"
WITHIN = "KVSTREAM_ROOTS_WITHIN"
APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


class Root(Place):
    """A system: ``top`` is where it is mounted, and where it is entered."""

    def __init__(self, suite: str, lower: Path, work: Path, given: argparse.Namespace) -> None:
        self.suite, self.top = suite, work / "top"
        work.mkdir()
        mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", work)
        for name in ("upper", "overlay", "top", "other"):
            (work / name).mkdir()
        mount("-t", "overlay", "-o", f"lowerdir={lower},upperdir={work}/upper,workdir={work}/overlay", suite, self.top)
        mount("-t", "proc", "proc", self.top / "proc")
        (self.top / "dev" / "shm").mkdir(exist_ok=True)
        mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", self.top / "dev" / "shm")
        super().__init__(self._brought(given.file, "kvstream"), self.top / "home" / "user")
        self.folder.mkdir(mode=0o755)
        os.chown(self.folder, USER, USER)
        self.model = self._brought(given.model, "model.gguf") if given.model else None
        self.too_new = self._brought(given.too_new, "too-new") if given.too_new else None
        self.libcuda = self._brought(given.libcuda, "driver/libcuda.so.1") if given.libcuda else None
        self.enter(self.top)

    def _brought(self, file: Path, name: str) -> Path:
        there = self.top / "opt" / name
        there.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, there)
        there.chmod(0o755)
        return there

    def enter(self, at: Path) -> None:
        self.prefix = (CHROOT, f"--userspec={USER}:{USER}", str(at), "env", f"--chdir={self.inside(self.folder)}")

    def inside(self, path: Path) -> str:
        return f"/{path.relative_to(self.top)}" if path.is_relative_to(self.top) else str(path)

    def has(self, *names: str) -> list[str]:
        return [name for name in names if list(self.top.glob(name))]

    def glibc(self) -> tuple[int, ...]:
        done = subprocess.run([CHROOT, self.top, "ldd", "--version"], capture_output=True, text=True, timeout=60)
        return tuple(map(int, done.stdout.splitlines()[0].split()[-1].split(".")))

    def run_on_a_mount(self, options: str) -> subprocess.CompletedProcess[str]:
        place = self.folder / "mount"
        place.mkdir(exist_ok=True)
        mount("-t", "tmpfs", "-o", f"{options},mode=0700,uid={USER}", "tmpfs", place)
        try:
            return self.run("--version", KVSTREAM_CACHE_DIR=self.inside(place / "c"))
        finally:
            subprocess.run(["umount", place], check=True)

    @contextlib.contextmanager
    def seen_as(self, *options: str) -> Iterator[Root]:
        """The same system through another mount, without what is mounted in it: no /proc, no /dev/shm."""
        other, place = self.top.parent / "other", copy.copy(self)
        mount("--bind", self.top, other)
        try:
            if options:
                mount("-o", ",".join(("remount", "bind", *options)), other)
            place.enter(other)
            yield place
        finally:
            subprocess.run(["umount", "--recursive", other], check=True)


Row = dict[str, str | float]
Act = Callable[[Root, str, argparse.Namespace], str]


# --- what is tried, beside smoke.py's ---------------------------------------------------------------------------------


def bare(root: Root, _backend: str, _given: argparse.Namespace) -> str:
    there = root.has("usr/bin/python*", "usr/local/bin/python*", "etc/ssl/certs/*", "usr/share/ca-certificates")
    check(not there, there)
    return f"no Python, no certificates, glibc {'.'.join(map(str, root.glibc()))}"


def doctor(root: Root, _backend: str, _given: argparse.Namespace) -> str:
    done = root.run("doctor")
    check(done.returncode in (0, 1) and "Traceback" not in done.stdout + done.stderr, done)
    return f"exit code {done.returncode}, {len(done.stdout.splitlines())} lines: {done.stdout.splitlines()[-1].strip()}"


def read_only(root: Root, backend: str, _given: argparse.Namespace) -> str:
    """Nowhere to write: a sentence. With a cache that was filled before: it serves."""
    with root.seen_as("ro") as place:
        mount("-t", "proc", "proc", place.top.parent / "other" / "proc")
        done = place.run("--version", KVSTREAM_CACHE_DIR="", XDG_CACHE_HOME="/opt/cache")
        check(done.returncode == 126 and done.stderr.count("Read-only file system") >= 3, done)
        smoke.streamed(place, backend, _given)
    return f"empty: exit code 126, {len(done.stderr.splitlines()) - 2} places named; filled before: a stream to its end"


def without_proc(root: Root, backend: str, given: argparse.Namespace) -> str:
    with root.seen_as() as place:
        cache = place.folder / "without-proc"
        done = place.run("--version", KVSTREAM_CACHE_DIR=place.inside(cache))
        check(done.returncode == 0 and done.stdout.startswith("kvstream, version"), done)
        shutil.rmtree(cache)
        with place.serving("--backend", "openai", "--backend-url", backend) as (process, port, _):
            check(Stream(port).rest().rstrip().endswith("data: [DONE]"), "no end")
            process.terminate()
            check(process.wait(smoke.STOP_S_MAX) == 0, process.returncode)
    return "a first start, a stream, a stop"


def no_home(root: Root, _backend: str, _given: argparse.Namespace) -> str:
    """As Debian makes the accounts of services: it unpacks to /var/tmp."""
    done = root.run("--version", KVSTREAM_CACHE_DIR="", HOME="/nonexistent")
    check(done.returncode == 0, done)
    place = root.top / "var" / "tmp" / f"kvstream-{USER}"
    check(place.is_dir() and not (root.top / "nonexistent").exists(), sorted((root.top / "var" / "tmp").iterdir()))
    shutil.rmtree(place)
    return f"unpacked to {root.inside(place)}"


def https(root: Root, backend: str, _given: argparse.Namespace) -> str:
    """A backend behind TLS: refused while nobody vouches for its certificate, served once it is among those that the
    file brings (nothing else is asked for certificates). The launcher would make the changed folder anew, so what was
    unpacked is started without it."""
    cache = root.folder / "https"
    with behind_tls(root.folder, int(backend.rpartition(":")[2])) as (port, certificate):
        words = ("--backend", "openai", "--backend-url", f"https://127.0.0.1:{port}")
        with root.serving(*words, until="/health", KVSTREAM_CACHE_DIR=root.inside(cache)) as (_, at, log):
            smoke.wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in log.read_text("utf-8"), smoke.START_S_MAX, log)
        with next(cache.glob("*/_internal/certifi/cacert.pem")).open("a", encoding="utf-8") as known:
            known.write(certificate.read_text("utf-8"))
        unpacked = copy.copy(root)
        unpacked.file = next(cache.glob("*/kvstream"))
        with unpacked.serving(*words) as (_, at, log):
            check(" token" in Stream(at).rest(), "no token")
    shutil.rmtree(cache)
    return "an unknown certificate is refused and said; a known one: a stream to its end"


def driver(root: Root, _backend: str, _given: argparse.Namespace) -> str:
    if root.libcuda is None:
        raise NotTried("no --libcuda")
    folder = root.inside(root.libcuda.parent)
    rows = json.loads(root.run("doctor", "--parts", "--json", LD_LIBRARY_PATH=folder).stdout)["parts"]
    row = next(row for row in rows if row["name"] == "pycuda")
    if "GLIBC" in row["problem"]:
        raise NotTried(f"this libcuda is too new for it: {row['problem']}")
    check(not row["problem"], row)
    return f"PyCUDA {row['version']} found {root.inside(root.libcuda)}"


def too_new(root: Root, _backend: str, _given: argparse.Namespace) -> str:
    if root.too_new is None:
        raise NotTried("no --too-new")
    cache = root.folder / "too-new"
    done = root.run("--version", file=root.too_new, KVSTREAM_CACHE_DIR=root.inside(cache))
    if done.returncode == 0:
        raise NotTried(f"it is not too new for glibc {'.'.join(map(str, root.glibc()))}")
    check(done.returncode == 126 and "needs glibc 2." in done.stderr and not cache.exists(), done)
    return done.stderr.strip()


ACTS: tuple[Act, ...] = (
    bare, smoke.first_start, smoke.parts, smoke.small_commands, doctor, smoke.embedded, smoke.streamed,
    smoke.terminated, smoke.terminated_as_a_group, smoke.killed, smoke.twenty_times, smoke.odd_places, read_only,
    no_home, smoke.six_first_starts, smoke.truncated, smoke.bench, https, without_proc, driver, too_new)


# --- around it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def behind_tls(folder: Path, backend: int) -> Iterator[tuple[int, Path]]:
    """A port that takes TLS off, and the certificate to trust: that address's, for bare systems know no names."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate,
                    "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"],
                   check=True, capture_output=True, timeout=60)
    certificate.chmod(0o644)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])

    def carry(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                front = context.wrap_socket(connection, server_side=True)
            except OSError:  # who does not trust us goes away
                continue
            back = socket.create_connection(("127.0.0.1", backend))
            for ends in ((front, back), (back, front)):
                threading.Thread(target=carry, args=ends, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1], certificate
        listener.shutdown(socket.SHUT_RDWR)


def made(folder: Path, suite: str, mirror: str) -> Path:
    """The system, by debootstrap if it is not there yet. Marked when it is whole."""
    lower, whole = folder / suite, folder / f"{suite}.made"
    if not whole.exists():
        shutil.rmtree(lower, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        words: list[str | Path] = ["debootstrap", "--variant=minbase", suite, lower, *([mirror] if mirror else [])]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            sys.exit(f"debootstrap {suite}: {done.stdout[-2000:]}{done.stderr}")
        whole.touch()
    return lower


def apt_mirror() -> str:
    """Of this machine's apt; debootstrap knows one itself."""
    done = subprocess.run(["apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages"],
                          capture_output=True, text=True, check=False)
    found = [line.partition("|")[2] for line in done.stdout.splitlines() if line.startswith("Debian|")]
    return found[0] if found else ""


def took_too_long(_signal: int, _frame: FrameType | None) -> None:
    raise Failed(f"not over after {ACT_S_MAX} s")


def tried(root: Root, backend: str, given: argparse.Namespace) -> Iterator[Row]:
    seen_by_acts = argparse.Namespace(model=root.model and Path(root.inside(root.model)), libcuda_absent=True)
    for act in ACTS:
        if given.only and act.__name__ not in given.only.split(","):
            continue
        began, result = time.monotonic(), "ok"
        signal.alarm(ACT_S_MAX)
        try:
            seen = act(root, backend, seen_by_acts)
        except NotTried as error:
            result, seen = "not tried", str(error)
        except Exception as error:  # whatever it is, the rest is tried too
            result, seen = "FAILED", f"{type(error).__name__} {error}"
        finally:
            signal.alarm(0)
        row: Row = {"root": root.suite, "act": act.__name__.replace("_", " "), "result": result, "seen": seen,
               "seconds": round(time.monotonic() - began, 1)}
        print(f"{row['root']:9}{row['act']:23}{result:10}{row['seconds']:6.1f} s  {seen}", flush=True)
        yield row


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Shows that one file works on bare systems.")
    parser.add_argument("file", type=Path, nargs="?", default=PROJECT / "dist" / "kvstream")
    parser.add_argument("--roots", type=Path, default=PROJECT / "dist" / "roots", help="where the systems lie")
    parser.add_argument("--suites", default="bookworm,bullseye")
    parser.add_argument("--mirror", default="", help="for debootstrap; default: that of this machine's apt")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--libcuda", type=Path)
    parser.add_argument("--too-new", type=Path)
    parser.add_argument("--only", default="", help="names of acts, divided by commas")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if WITHIN not in os.environ:
        if os.geteuid():
            sys.exit("mounting and chroot need root")
        os.execvpe(APART[0], [*APART, sys.executable, *sys.argv], {**os.environ, WITHIN: "1"})
    signal.signal(signal.SIGALRM, took_too_long)
    lowers = {suite: made(given.roots.resolve(), suite, given.mirror or apt_mirror())
              for suite in given.suites.split(",")}
    port, rows = smoke.free_port(), list[Row]()
    canned = PROJECT / "tests" / "measure" / "canned_backend.py"
    backend = subprocess.Popen([sys.executable, canned, str(port), "--chunks", "8"], stdin=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(prefix="kvstream-roots-") as folder:
        try:
            smoke.wait_for(lambda: smoke.answers(port, "/health"), smoke.START_S_MAX)
            for suite, lower in lowers.items():
                rows += tried(Root(suite, lower, Path(folder) / suite, given), f"http://127.0.0.1:{port}", given)
        finally:
            backend.kill()
            backend.wait()
            for suite in lowers:
                subprocess.run(["umount", "--recursive", "--lazy", Path(folder) / suite], check=False)
    body = given.file.read_bytes()
    report = {"file": str(given.file), "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), "acts": rows}
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    failed = [row for row in rows if row["result"] == "FAILED"]
    print(f"{len(rows)} tried in {sum(float(row['seconds']) for row in rows):.0f} s, {len(failed)} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

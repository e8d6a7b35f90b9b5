"""The launcher: where it unpacks, what it refuses, what it leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.build.conftest import UMASK, WAIT_S, Launchers, Make
from tests.build.recipes import recipe

REFUSED = 126
FOOTER = recipe("pack").FOOTER.size


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {path.relative_to(folder).as_posix(): (path.lstat().st_mode,
            b"" if path.is_dir() else os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes())
            for path in folder.rglob("*")}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_the_first_start_unpacks_and_becomes_the_program(make: Make, tmp_path: Path) -> None:
    file, cache = make(), tmp_path / "a" / "cache"
    with file.start("wait", "7", "with space", KVSTREAM_CACHE_DIR=cache) as process:
        out, err = process.communicate("\n", timeout=WAIT_S)
    assert (process.returncode, err) == (7, "")
    assert out.splitlines() == [f"pid={process.pid} argv0={file.path} file={file.path} umask={UMASK:o} argc=4",
                                "arg=wait", "arg=7", "arg=with space"]
    assert names(cache) == {file.digest} and cache.stat().st_mode & 0o777 == 0o700
    (file.folder / "_internal").chmod(0o755)
    assert {name: data for name, (_, data) in contents(cache / file.digest).items()} == {
        name: data for name, (_, data) in contents(file.folder).items()}
    modes = {name: mode & 0o777 for name, (mode, _) in contents(cache / file.digest).items()}
    assert modes["kvstream"] == 0o755 and modes["_internal/deep/data"] == 0o644


def test_a_later_start_touches_nothing(make: Make, tmp_path: Path) -> None:
    file = make()
    assert file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache").returncode == 0
    before = {path: path.stat().st_ctime_ns for path in (tmp_path / "cache").rglob("*")}
    assert file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache").returncode == 0
    assert {path: path.stat().st_ctime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_a_relative_cache_folder_is_below_the_working_folder(make: Make, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    file = make()
    monkeypatch.chdir(tmp_path)
    assert file.run(KVSTREAM_CACHE_DIR="here/cache").returncode == 0
    assert names(tmp_path / "here" / "cache") == {file.digest}


def test_six_first_starts_at_once(make: Make, tmp_path: Path) -> None:
    file = make(extra=os.urandom(1 << 22))
    started = [file.start("x", KVSTREAM_CACHE_DIR=tmp_path / "cache") for _ in range(6)]
    for process in started:
        out, err = process.communicate(timeout=WAIT_S)
        assert (process.returncode, err) == (0, "") and f"pid={process.pid} " in out
    assert names(tmp_path / "cache") == {file.digest}


def test_one_who_waits_in_vain_for_another_unpacks_too(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    import fcntl

    file = make(launchers.compiled("impatient", "PATIENCE_MS=60"))
    (tmp_path / "cache").mkdir(mode=0o700)
    descriptor = os.open(tmp_path / "cache", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache").returncode == 0
    finally:
        os.close(descriptor)
    assert names(tmp_path / "cache") == {file.digest}


def test_a_truncated_file_says_so_and_leaves_nothing(make: Make, tmp_path: Path) -> None:
    file = make(extra=os.urandom(1 << 20))
    whole = file.path.read_bytes()
    for size in (len(whole) - 1, len(whole) - FOOTER, len(whole) - 200, len(whole) - (1 << 19)):
        file.path.write_bytes(whole[:size])
        done = file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache")
        assert done.returncode == REFUSED and "is not whole" in done.stderr and "Download it again" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_says_so_and_leaves_nothing(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    if launchers.plain:
        pytest.skip("the checksum is zstd's")
    file = make(extra=os.urandom(1 << 16))
    whole = file.path.read_bytes()
    launcher = launchers.compiled().stat().st_size
    for at in (launcher + 2, launcher + 5000, len(whole) - FOOTER - 3):
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1:])
        done = file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache")
        assert done.returncode == REFUSED and "is damaged" in done.stderr, at
        assert names(tmp_path / "cache") == set()


def test_without_proc(launchers: Launchers, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel cannot say where the program is; what was typed can, also when PATH found it."""
    file = make(launchers.compiled("no-proc", 'SELF_EXE="/nonexistent/exe"'))
    cache = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    env = {"PATH": f"{tmp_path}:/bin", "KVSTREAM_CACHE_DIR": str(cache)}
    for words in ("./kvstream", "kvstream"):
        done = subprocess.run(["/bin/sh", "-c", f"exec {words}"], env=env, capture_output=True, text=True,
                              timeout=WAIT_S)
        assert done.returncode == 0, done.stderr
        found = re.search(r"argv0=(\S+) file=(\S+)", done.stdout)
        assert found is not None and found[1] == f"{cache}/{file.digest}/kvstream"
        assert Path(found[2]).samefile(file.path)


def test_an_older_glibc_is_refused_before_anything_is_written(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """By the names of its symbols' versions, else by what it says of itself; where none is found the loader decides."""
    libc, other = launchers.folder / "libc.so.6", launchers.folder / "other.so.6"
    launcher = launchers.compiled("other-glibc", f'GLIBC_PLACES="{libc}","{other}"')
    file, cache = make(launcher, glibc=31), tmp_path / "cache"
    line = b"\0GNU C Library (GLIBC 2.%d-9) stable release version 2.%d.\nCopyright"
    libc.write_bytes(b"\x7fELF\0GLIBC_2.3\0GLIBC_2.30\0GLIBC_2.311\0" + bytes(9000) + line % (30, 30))
    done = file.run(KVSTREAM_CACHE_DIR=cache)
    assert done.returncode == REFUSED and not cache.exists()
    assert f"needs glibc 2.31 or newer, and this system has 2.30 ({libc})" in done.stderr
    for new in (b"\0GLIBC_2.31\0" + line % (30, 30), b"\0GLIBC_2.30\0" + line % (31, 31), line % (40, 40), b"x", b""):
        libc.write_bytes(new)
        assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0, new
    libc.write_bytes(line % (30, 30))
    other.write_bytes(line % (36, 36))
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    other.unlink()
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == REFUSED
    libc.unlink()
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0


# --- which folder -----------------------------------------------------------------------------------------------------


def test_the_folder_that_was_named_is_the_only_one(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("", "utf-8")
    for place in (launchers.shared / "first", launchers.shared / "second", tmp_path / "home"):
        place.mkdir()
    done = make(launchers.at_home()).run(KVSTREAM_CACHE_DIR=tmp_path / "in the way" / "cache", HOME=tmp_path / "home")
    assert done.returncode == REFUSED
    assert f"{tmp_path}/in the way/cache: Not a directory" in done.stderr and "KVSTREAM_CACHE_DIR=" in done.stderr
    assert len(done.stderr.splitlines()) == 3


def test_the_folders_are_tried_in_order(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    file = make(launchers.at_home())
    for place in (launchers.shared / "first", launchers.shared / "second", tmp_path / "home"):
        place.mkdir()
    uid = os.geteuid()
    given = {"CACHE_DIRECTORY": f"{tmp_path}/service:{tmp_path}/other", "XDG_CACHE_HOME": str(tmp_path / "xdg"),
             "HOME": str(tmp_path / "home")}
    places = [tmp_path / "service", tmp_path / "xdg" / "kvstream", tmp_path / "home" / ".cache" / "kvstream",
              launchers.shared / "first" / f"kvstream-{uid}", launchers.shared / "second" / f"kvstream-{uid}"]
    for place, forget in zip(places, [*given, "first", ""], strict=True):
        assert file.run(**given).returncode == 0
        assert names(place) == {file.digest}
        shutil.rmtree(place)
        given.pop(forget, None)
        if forget == "first":
            (launchers.shared / "first").rmdir()


def test_a_home_that_is_not_there_is_not_made(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    (launchers.shared / "second").mkdir()
    assert make(launchers.at_home()).run(HOME=tmp_path / "nobody").returncode == 0
    assert not (tmp_path / "nobody").exists()


def test_what_is_ready_further_down_is_used(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """A cache that was filled when the image was built, and a home that came later."""
    file = make(launchers.at_home())
    (launchers.shared / "second").mkdir()
    assert file.run().returncode == 0
    (tmp_path / "home").mkdir()
    assert file.run(HOME=tmp_path / "home").returncode == 0
    assert names(tmp_path / "home") == set()


def test_a_base_may_be_a_link_but_not_in_a_shared_folder(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    file = make(launchers.at_home())
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert file.run(KVSTREAM_CACHE_DIR=tmp_path / "link").returncode == 0
    assert names(tmp_path / "real") == {file.digest}
    for place in ("first", "second"):
        (launchers.shared / place).mkdir()
    (launchers.shared / "first" / f"kvstream-{os.geteuid()}").symlink_to(tmp_path / "real")
    assert file.run().returncode == 0
    assert names(launchers.shared / "second" / f"kvstream-{os.geteuid()}") == {file.digest}


def test_the_folder_of_another_user_is_refused(make: Make, tmp_path: Path) -> None:
    place = Path("/usr")
    if os.geteuid() == 0:
        place = tmp_path / "theirs"
        place.mkdir(mode=0o755)
        os.chown(place, 65534, 65534)
    done = make().run(KVSTREAM_CACHE_DIR=place)
    assert done.returncode == REFUSED and f"{place}: belongs to another user" in done.stderr


def test_a_folder_that_others_may_write_to_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = make().run(KVSTREAM_CACHE_DIR=tmp_path / "open")
    assert done.returncode == REFUSED and "others may write to it" in done.stderr
    assert names(tmp_path / "open") == set()


# --- mounts: in a mount namespace of their own ------------------------------------------------------------------------


def mounted(options: str, place: Path, command: str, **environment: Path) -> subprocess.CompletedProcess[str]:
    """``command`` where ``place`` is an empty tmpfs with these options."""
    place.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} none "{place}" && echo mounted && {command}'
    try:
        done = subprocess.run(["unshare", "--mount", "--map-root-user", "sh", "-c", script], capture_output=True,
                              text=True, timeout=WAIT_S, env={"PATH": os.environ["PATH"],
                                                              **{name: str(at) for name, at in environment.items()}})
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if not done.stdout.startswith("mounted"):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    return done


def test_a_mount_without_execution_is_refused(make: Make, tmp_path: Path) -> None:
    file, place = make(), tmp_path / "mount"
    done = mounted("noexec,mode=0700", place, f'"{file.path}"; echo $? $(ls -A "{place}")', KVSTREAM_CACHE_DIR=place)
    assert done.stdout.splitlines()[-1] == f"{REFUSED}"
    assert "mounted noexec" in done.stderr


def test_what_cannot_be_run_where_it_lies_is_said(make: Make, tmp_path: Path) -> None:
    """Unpacked, and then the mount forbade execution."""
    file, place = make(), tmp_path / "mount"
    again = f'"{file.path}" && mount -o remount,noexec "{place}" && "{file.path}"; echo $?'
    done = mounted("mode=0700", place, again, KVSTREAM_CACHE_DIR=place)
    assert done.stdout.splitlines()[-1] == f"{REFUSED}"
    assert "mounted noexec" in done.stderr


def test_a_small_place_is_refused_before_anything_is_written(make: Make, tmp_path: Path) -> None:
    file, place = make(), tmp_path / "mount"
    done = mounted("size=1m,mode=0700", place, f'"{file.path}"; echo $? $(ls -A "{place}")', KVSTREAM_CACHE_DIR=place)
    assert done.stdout.splitlines()[-1] == f"{REFUSED}"
    assert "too small: 1 MB are free" in done.stderr


def test_a_read_only_place(make: Make, tmp_path: Path) -> None:
    """Refused when it is empty, used when it was filled before."""
    file, place = make(), tmp_path / "mount"
    done = mounted("ro,mode=0700", place, f'"{file.path}"; echo $?', KVSTREAM_CACHE_DIR=place / "cache")
    assert done.stdout.splitlines()[-1] == f"{REFUSED}"
    assert f"{place}/cache: Read-only file system" in done.stderr
    again = f'"{file.path}" && mount -o remount,ro "{place}" && "{file.path}"; echo $?'
    done = mounted("mode=0700", place, again, KVSTREAM_CACHE_DIR=place / "cache")
    assert done.stdout.splitlines()[-1] == "0" and done.stdout.count("pid=") == 2, done.stderr


# --- what is left behind ----------------------------------------------------------------------------------------------


def test_other_releases_go_when_nobody_uses_them(make: Make, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, used, new = (make(extra=name.encode(), name=name) for name in ("old", "used", "new"))
    assert old.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    with used.start("wait", KVSTREAM_CACHE_DIR=cache) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline().startswith("pid=")
        assert names(cache) == {used.digest}
        leftover = f".{'0' * 32}.4711"
        (cache / leftover / "deep").mkdir(parents=True)
        (cache / "notes").mkdir()
        (cache / ("1" * 32)).write_text("a file", "utf-8")
        assert new.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
        assert names(cache) == {used.digest, new.digest, "notes", "1" * 32}
        assert (cache / used.digest / "_internal" / "deep" / "data").exists()
        running.communicate("\n", timeout=WAIT_S)
    assert old.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    assert names(cache) == {old.digest, "notes", "1" * 32}


def test_one_that_was_killed_while_unpacking(make: Make, tmp_path: Path) -> None:
    file, cache = make(extra=os.urandom(1 << 25)), tmp_path / "cache"
    process = file.start(KVSTREAM_CACHE_DIR=cache)
    deadline = time.monotonic() + WAIT_S
    while not any(name.startswith(".") for name in names(cache)) and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    assert names(cache) == {file.digest}


@pytest.mark.parametrize("hole", ["kvstream", "_internal/deep/data"])
def test_a_folder_with_holes_is_made_anew(hole: str, launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """A program that is missing is noticed everywhere, any file in the folders where others clean."""
    file = make(launchers.at_home())
    (launchers.shared / "second").mkdir()
    assert file.run().returncode == 0
    base = launchers.shared / "second" / f"kvstream-{os.geteuid()}"
    (base / file.digest / hole).unlink()
    assert file.run().returncode == 0
    assert (base / file.digest / hole).exists() and names(base) == {file.digest}

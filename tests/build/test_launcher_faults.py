"""The launcher where something is wrong: bits that fell over, closed descriptors, limits, other users' homes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.build.conftest import WAIT_S, Launchers, Make, OneFile
from tests.build.recipes import recipe
from tests.build.test_launcher import REFUSED, mounted, names

FOOTER = recipe("pack").FOOTER.size
STRANGER = 65533


def shell(file: OneFile, script: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    """``script`` in sh, where ``$K`` is the file."""
    env = {"PATH": os.environ["PATH"], "K": str(file.path), **{name: str(at) for name, at in environment.items()}}
    return subprocess.run(["/bin/sh", "-c", script], env=env, capture_output=True, text=True, timeout=WAIT_S)


def test_no_bit_of_the_footer_may_fall_over(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """It names the folder, and says what has to be in it; nothing else would notice."""
    file = make()
    whole = file.path.read_bytes()
    for back in range(3, FOOTER + 1, 7):
        at = len(whole) - back
        file.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        done = file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache")
        assert done.returncode == REFUSED and done.stderr.rstrip().endswith("Download it again."), back
    assert not (tmp_path / "cache").exists()


def test_a_damaged_header_writes_nothing_where_it_leads(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """The archive's checksum comes last; the names in it are believed earlier."""
    if not launchers.plain:
        pytest.skip("headers are found in an archive that is not compressed")
    file = make()
    whole = file.path.read_bytes()
    file.path.write_bytes(whole.replace(b"_internal/deep/data\0", b"../../../evil/data\0\0", 1))
    (tmp_path / "evil").mkdir()
    done = file.run(KVSTREAM_CACHE_DIR=tmp_path / "cache")
    assert done.returncode == REFUSED and "is damaged" in done.stderr
    assert names(tmp_path / "evil") == names(tmp_path / "cache") == set()


def test_closed_descriptors_are_no_places_for_our_locks(make: Make, tmp_path: Path) -> None:
    """A program whose standard error is the lock on its folder would write there, and Python does not even start."""
    file = make()
    for _ in range(2):
        with subprocess.Popen(["/bin/sh", "-c", f'exec "{file.path}" wait 2>&-'], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env={"KVSTREAM_CACHE_DIR": str(tmp_path / "cache")}) as process:
            assert process.stdout is not None and b"pid=" in process.stdout.readline()
            error = Path(f"/proc/{process.pid}/fd/2").readlink()
            process.communicate(b"\n", timeout=WAIT_S)
        assert error == Path("/dev/null")


def test_a_limit_on_files_is_said(make: Make, tmp_path: Path) -> None:
    file, cache = make(), tmp_path / "cache"
    done = shell(file, 'ulimit -f 8; exec "$K"', KVSTREAM_CACHE_DIR=cache)
    assert done.returncode == REFUSED and f"{cache}: File too large" in done.stderr
    assert names(cache) == set()


def test_the_home_of_another_user_is_left_alone(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """sudo -E: what root makes there is in the user's way, and what the user puts there root would run."""
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's home")
    file, home = make(launchers.at_home()), tmp_path / "home"
    ours = launchers.shared / "second" / "kvstream-0"
    ours.parent.mkdir()
    home.mkdir()
    os.chown(home, STRANGER, STRANGER)
    for given in ({"HOME": home}, {"HOME": tmp_path, "XDG_CACHE_HOME": home}):
        assert file.run(**given).returncode == 0
        assert names(home) == set() and names(ours) == {file.digest}
        shutil.rmtree(ours)
    ours.parent.chmod(0o777)
    done = file.run(HOME=home)
    assert done.returncode == REFUSED and names(ours.parent) == set()
    assert f"{home} belongs to another user" in done.stderr and "anybody may rename" in done.stderr


def test_a_relative_folder_of_a_place_that_is_gone(make: Make, tmp_path: Path) -> None:
    """It is not one of the root folder."""
    (tmp_path / "gone").mkdir()
    done = shell(make(), f'cd "{tmp_path}/gone" && rmdir ../gone && exec "$K"', KVSTREAM_CACHE_DIR="kvstream-test")
    assert done.returncode == REFUSED and "kvstream-test: this path is relative" in done.stderr
    assert not Path("/kvstream-test").exists()


def test_a_path_that_is_too_long_is_said(make: Make, tmp_path: Path) -> None:
    done = make().run(KVSTREAM_CACHE_DIR=f"{tmp_path}/" + "deep/" * 500)
    assert done.returncode == REFUSED and "this path is too long" in done.stderr


def test_what_killed_starts_left_makes_room(make: Make, tmp_path: Path) -> None:
    """A small place, full of a start that was killed half-way, is not too small for ever."""
    file, place = make(), tmp_path / "mount"
    left = f"{place}/.{file.digest}.4711"
    fill = f'mkdir "{left}" && head -c 3300000 /dev/zero > "{left}/x" && "{file.path}"; echo $? $(ls -A "{place}")'
    done = mounted("size=4m,mode=0700", place, fill, KVSTREAM_CACHE_DIR=place)
    assert done.stdout.splitlines()[-1] == f"0 {file.digest}", done.stderr


def test_another_start_with_our_number_is_left_alone(launchers: Launchers, make: Make, tmp_path: Path) -> None:
    """In containers that share a cache every launcher is process 1: no name may be made of the number alone."""
    file, cache = make(launchers.compiled("impatient", "PATIENCE_MS=60")), tmp_path / "cache"
    cache.mkdir(mode=0o700)
    script = (f'mkdir "{cache}/.{file.digest}.$$" && touch "{cache}/.{file.digest}.$$/unfinished" && '
              f'exec 9<"{cache}" 8<"{cache}/.{file.digest}.$$" && flock 9 && flock 8 && exec "$K"')
    done = shell(file, script, KVSTREAM_CACHE_DIR=cache)
    assert done.returncode == 0, done.stderr
    assert [name for name in names(cache) if name.startswith(".")], "the other's was deleted under its hands"


def test_holes_in_a_home_are_noticed(make: Make, launchers: Launchers, tmp_path: Path) -> None:
    """Tools that tidy ~/.cache take single files away, too."""
    file, cache = make(), tmp_path / "cache"
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    (cache / file.digest / "_internal" / "empty").unlink()
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    assert (cache / file.digest / "_internal" / "empty").exists() and names(cache) == {file.digest}


def test_what_stands_in_the_way_goes(make: Make, tmp_path: Path) -> None:
    file, cache = make(), tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    (cache / file.digest).symlink_to(tmp_path / "elsewhere")
    assert file.run(KVSTREAM_CACHE_DIR=cache).returncode == 0
    assert names(cache) == {file.digest} and not (cache / file.digest).is_symlink()
    assert (tmp_path / "elsewhere").is_dir()

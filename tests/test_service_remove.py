"""``kvstream service uninstall``. That systemd stops what runs is shown by ``just test-unit``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvstream import cli_service, service, service_remove
from tests.test_service import downloaded, run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="systemd's paths")


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = downloaded(tmp_path / "download" / "kvstream", monkeypatch)
    for name in ("CONFIG", "STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    return file


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def test_what_install_wrote_for_systemd_goes_and_the_rest_is_named(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    units = root / "etc/systemd/system"
    assert run("install", "--root", str(root), "--socket", "--gpu", "--lan").exit_code == 0
    for name in ("multi-user.target.wants/kvstream.service", "sockets.target.wants/kvstream.socket"):
        (units / name).parent.mkdir()
        (units / name).symlink_to(f"/etc/systemd/system/{Path(name).name}")
    (units / "other.service").touch()
    (root / "var/lib/private/kvstream").mkdir(parents=True)
    (root / "var/lib/kvstream").symlink_to("private/kvstream")
    done = run("uninstall", "--root", str(root))
    assert done.exit_code == 0, done.output
    assert files(root) == {"etc/systemd/system/other.service", "etc/kvstream/kvstream.toml", "usr/local/bin/kvstream",
                           "var/lib/kvstream"}
    assert not (units / "kvstream.service.d").exists() and done.output.count(": removed") == 6
    assert done.output.splitlines()[-1].split() == ["rm", "-r", *(f"{root}/{name}" for name in (
        "etc/kvstream", "var/lib/kvstream", "var/lib/private/kvstream", "usr/local/bin/kvstream"))]
    done = run("uninstall", "--root", str(root))
    assert done.exit_code == 0 and f"no service of KVStream is in {units}" in done.output


def test_what_others_wrote_stays(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    units = root / "etc/systemd/system"
    assert run("install", "--root", str(root), "--lan").exit_code == 0
    (units / "kvstream.socket").symlink_to("/dev/null")  # masked
    (units / "kvstream.service.d/gpu.conf").write_text("[Service]\n", "utf-8")
    (units / "kvstream.service.d/override.conf").write_text("[Service]\n", "utf-8")
    (units / "kvstream.service").write_text(service.unit(["/opt/old"], Path("/srv/k.toml")) + "# mine\n", "utf-8")
    done = run("uninstall", "--root", str(root))
    kept = {"kvstream.socket", "kvstream.service.d/gpu.conf", "kvstream.service.d/override.conf"}
    assert done.exit_code == 0 and files(units) == kept
    assert all(f"{units / name}: is not from" in done.output for name in kept)


def test_what_runs_is_stopped_first(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = tmp_path / "config/systemd/user/kvstream.service"
    asked: list[str] = []

    def systemctl(commands: list[list[str]], so_far: str) -> None:
        asked.append(f"{' '.join(commands[0])}: {so_far} {unit.exists()}")

    monkeypatch.setattr(cli_service, "_run_all", systemctl)
    assert run("install", "--user").exit_code == 0
    (tmp_path / "run/systemd").mkdir(parents=True)
    (tmp_path / "cache/kvstream").mkdir(parents=True)
    done = run("uninstall", "--user")
    assert asked == ["systemctl --user disable --now kvstream.service: nothing was removed True",
                     "systemctl --user daemon-reload: the files are removed False"]
    assert f"rm -r {tmp_path}/config/kvstream {tmp_path}/cache/kvstream" in done.output
    (tmp_path / "run/systemd").rmdir()
    assert run("install", "--user").exit_code == 0 and run("uninstall", "--user").exit_code == 0
    assert len(asked) == 2 and not unit.exists()  # there was nobody to ask
    assert run("uninstall", "--user", "--root", str(tmp_path)).exit_code == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_who_may_not_is_told(file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run("install", "--root", str(root)).exit_code == 0
    (root / "etc/systemd/system").chmod(0o500)
    done = run("uninstall", "--root", str(root))
    (root / "etc/systemd/system").chmod(0o700)
    assert done.exit_code == 1 and "sudo" in done.output


@pytest.mark.parametrize("name", (*service_remove.UNITS, *service_remove.DROP_INS))
def test_each_file_begins_as_no_other_would(name: str) -> None:
    assert service_remove._first_line(name).startswith(b"# ") and len(service_remove._first_line(name)) > 30

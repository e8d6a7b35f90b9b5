"""The unit and what is beside it: facts about the files, and what ``kvstream service`` writes. That they work is shown
by ``just test-unit``, which needs root and nspawn."""

from __future__ import annotations

import errno
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvstream import cli, service
from kvstream.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
FILES = ("kvstream.service", "kvstream.socket", "gpu.conf", "lan.conf")
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
posix = pytest.mark.skipif(sys.platform == "win32", reason="systemd's paths")


def values(text: str, name: str) -> list[str]:
    return re.findall(rf"(?m)^{name}=(.*)$", text)


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.main, ["service", *words])


def downloaded(file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if the one-file executable had been downloaded there, into a folder of homes."""
    file.parent.mkdir()
    file.write_bytes(b"\x7fELF")
    monkeypatch.setattr(service, "form", lambda: "executable")
    monkeypatch.setattr(service, "own_file", lambda: str(file))
    monkeypatch.setattr(service, "HIDDEN", (f"{file.parent}/",))
    return file


@pytest.fixture
def executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    file = downloaded(tmp_path / "home" / "kvstream linux", monkeypatch)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return file


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_there_is_one_of_each(name: str) -> None:
    """Packages and build/systemd have the same file, not two that were the same once."""
    link = ROOT / "build" / "systemd" / name
    if link.is_symlink():  # a checkout without links has their names in them
        assert link.resolve() == ROOT / "kvstream" / "systemd" / name
    assert service.text_of(name).startswith("# ")


def test_what_another_start_cannot_help_is_not_restarted() -> None:
    wrong = {cli.ConfigFailure.exit_code, click.UsageError.exit_code}
    launcher = re.findall(r"#define EXIT_HERE (\d+)", (ROOT / "build/launcher/launcher.c").read_text("utf-8"))
    found, = values(service.text_of("kvstream.service"), "RestartPreventExitStatus")
    assert {int(word) for word in found.split()} == {*wrong, *map(int, launcher)}
    assert not {cli.PortInUseFailure.exit_code, cli.Failure.exit_code, 0} & {int(word) for word in found.split()}
    assert values(service.text_of("kvstream.service"), "Restart") == ["on-failure"]
    assert values(service.text_of("kvstream.service"), "RestartForceExitStatus") == ["SIGHUP"]


def test_the_variables_of_the_unit_are_known() -> None:
    for name in FILES:
        for line in values(service.text_of(name), "Environment"):
            assert line.startswith("XDG_STATE_HOME=")  # gateway.statedir


def test_a_user_s_unit_has_nothing_that_only_root_may() -> None:
    text = service.unit(["/home/u/kvstream"], Path("/home/u/c.toml"), user=True)
    whole = service.text_of("kvstream.service")
    only = re.findall(r"(?m)^(\w+)=", whole.partition(service.ONLY_SYSTEM)[2].partition("[Install]")[0])
    assert {"DynamicUser", "StateDirectory", "ProtectHome", "CapabilityBoundingSet", "IPAddressDeny"} <= set(only)
    assert not set(only) & set(re.findall(r"(?m)^(\w+)=", text))
    assert values(text, "WantedBy") == ["default.target"] and not values(text, "After")
    for name in ("Type", "WatchdogSec", "NoNewPrivileges", "SystemCallFilter", "TimeoutStopSec"):
        assert values(text, name) == values(whole, name) != []


def test_paths_are_written_so_that_systemd_reads_them() -> None:
    config = Path("/srv/a b/50%.toml")
    text = service.unit(["/opt/my files/kvstream", "x$y"], config)
    command = values(text, "ExecStart")[0]
    assert command == '"/opt/my files/kvstream" x$$y serve --config "/srv/a b/50%%.toml"'
    assert values(text, "ExecReload")[0].startswith('"/opt/my files/kvstream" x$$y reload --pid $MAINPID --config ')
    assert values(text, "EnvironmentFile") == ["-/srv/a b/kvstream.env"]


@analyze
@pytest.mark.parametrize("user", [False, True])
def test_systemd_understands_the_unit(tmp_path: Path, user: bool) -> None:
    (tmp_path / "kvstream.service").write_text(service.unit(["/bin/true"], Path("/etc/c.toml"), user=user), "utf-8")
    shutil.copy(ROOT / "kvstream/systemd/kvstream.socket", tmp_path)
    for name in ("gpu.conf", "lan.conf"):
        (tmp_path / "kvstream.service.d").mkdir(exist_ok=True)
        (tmp_path / "kvstream.service.d" / name).write_text(service.text_of(name), "utf-8")
    done = subprocess.run(["systemd-analyze", "verify", *(["--user"] if user else []), "kvstream.service",
                           *([] if user else ["kvstream.socket"])], cwd=tmp_path, capture_output=True, text=True,
                          check=False, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "kvstream" in line or "conf" in line]
    assert ours == [] and (user or done.returncode == 0), done.stderr


@analyze
def test_how_exposed_the_service_is(tmp_path: Path) -> None:
    unit = tmp_path / "kvstream.service"
    unit.write_text(service.text_of("kvstream.service"), "utf-8")
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)],
                          capture_output=True, text=True, check=False, timeout=60)
    found = re.findall(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    if not found:
        pytest.skip(f"systemd-analyze security does not say: {done.stderr.strip()[:200]}")
    assert float(found[0]) <= 1.5


# --- writing them -----------------------------------------------------------------------------------------------------


@posix
def test_install_writes_a_service_that_can_be_started(executable: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    done = run("install", "--root", str(root), "--socket", "--gpu", "--lan")
    assert done.exit_code == 0, done.output
    copy = root / "usr/local/bin/kvstream"  # where ProtectHome hides nothing
    assert copy.read_bytes() == executable.read_bytes() and stat.S_IMODE(copy.stat().st_mode) == 0o755
    units = root / "etc/systemd/system"
    text = (units / "kvstream.service").read_text("utf-8")
    assert text == service.text_of("kvstream.service")  # the usual places are those in it
    assert (units / "kvstream.socket").is_file()
    assert sorted(path.name for path in (units / "kvstream.service.d").iterdir()) == ["gpu.conf", "lan.conf"]
    config = root / "etc/kvstream/kvstream.toml"
    assert config.read_text("utf-8") == (ROOT / "kvstream.toml").read_text("utf-8")
    assert f"systemctl --root {root} enable kvstream.socket kvstream.service" in done.output
    assert done.output.count("systemctl") == 1  # none that means this machine
    config.write_text("# mine\n", "utf-8")
    again = run("install", "--root", str(root), "--socket", "--gpu", "--lan")
    assert again.exit_code == 0 and again.output.count("is there already") == 5
    assert config.read_text("utf-8") == "# mine\n"


@posix
def test_nothing_is_replaced_in_silence(executable: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    unit, copy = root / "etc/systemd/system/kvstream.service", root / "usr/local/bin/kvstream"
    for path in (unit, copy):
        path.parent.mkdir(parents=True)
        path.write_text("another", "utf-8")
    done = run("install", "--root", str(root))
    assert done.exit_code == 1 and f"{copy}, {unit}: there already, with other contents" in done.output
    assert unit.read_text("utf-8") == copy.read_text("utf-8") == "another"
    assert not (root / "etc/kvstream").exists()
    assert run("install", "--root", str(root), "--force").exit_code == 0
    assert unit.read_text("utf-8") == service.text_of("kvstream.service")


@posix
def test_a_link_into_a_home_folder_is_no_copy(executable: Path, tmp_path: Path) -> None:
    copy = tmp_path / "root/usr/local/bin/kvstream"
    copy.parent.mkdir(parents=True)
    copy.symlink_to(executable)
    assert run("install", "--root", str(tmp_path / "root")).exit_code == 1
    assert run("install", "--root", str(tmp_path / "root"), "--force").exit_code == 0
    assert not copy.is_symlink() and copy.read_bytes() == executable.read_bytes()


@posix
def test_a_users_service_starts_the_file_where_it_is(executable: Path, tmp_path: Path) -> None:
    done = run("install", "--user")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "config/systemd/user/kvstream.service").read_text("utf-8")
    config = tmp_path / "config/kvstream/kvstream.toml"
    assert values(text, "ExecStart") == [f'"{executable}" serve --config {config}'] and config.is_file()
    assert "daemon-reload\n  systemctl --user enable --now kvstream.service" in done.output
    executable.write_bytes(b"newer")  # an upgrade in place: nothing is to be written, but what runs is the old one
    done = run("install", "--user")
    assert "daemon-reload\n  systemctl --user try-restart kvstream.service\n" in done.output
    done = run("install", "--user", "--socket")
    assert ("daemon-reload\n  systemctl --user stop kvstream.service\n  systemctl --user enable --now kvstream.socket"
            in done.output)
    for words in (["--gpu"], ["--lan"], ["--root", str(tmp_path)]):
        assert run("install", "--user", *words).exit_code == 2


@posix
def test_a_configuration_of_ones_own(executable: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "srv").mkdir(parents=True)
    (root / "srv/my.toml").write_text("", "utf-8")
    assert run("install", "--root", str(root), "--config", "/srv/my.toml").exit_code == 0
    text = (root / "etc/systemd/system/kvstream.service").read_text("utf-8")
    assert values(text, "ExecStart") == ["/usr/local/bin/kvstream serve --config /srv/my.toml"]
    assert not (root / "etc/kvstream").exists()
    done = run("install", "--root", str(root), "--config", "/srv/none.toml")
    assert done.exit_code == 2 and f"there is no file {root}/srv/none.toml" in done.output
    hidden = executable.parent / "my.toml"
    (root / str(hidden)[1:]).parent.mkdir(parents=True)
    (root / str(hidden)[1:]).write_text("", "utf-8")
    done = run("install", "--root", str(root), "--config", str(hidden))
    assert done.exit_code == 2 and "does not see it" in done.output


@posix
def test_a_configuration_that_would_not_do_is_said(executable: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    config = root / "etc/kvstream/kvstream.toml"
    config.parent.mkdir(parents=True)
    config.write_text("[server]\nprot = 1\n", "utf-8")
    done = run("install", "--root", str(root))
    assert done.exit_code == 0 and "warning: the service will not start with this: " in done.stderr
    assert "prot" in done.stderr
    config.write_text("", "utf-8")
    config.with_name("kvstream.env").write_text("# x\nKVSTREAM_SERVER__PORT='x'\n", "utf-8")
    assert "KVSTREAM_SERVER__PORT" in run("install", "--root", str(root)).stderr
    config.with_name("kvstream.env").unlink()
    monkeypatch.setenv("KVSTREAM_SERVER__PORT", "x")  # this shell's, and not the service's
    assert run("install", "--root", str(root)).stderr == ""
    config.chmod(0o600)
    assert "may not read it" in run("install", "--root", str(root)).stderr
    mine = tmp_path / "k.toml"
    mine.write_text("[server]\nprot = 1\n", "utf-8")
    done = run("install", "--user", "--config", str(mine), "--start")
    assert done.exit_code == cli.ConfigFailure.exit_code and "nothing was written" in done.output
    mine.write_text(f'[embedded]\nmodel = "{executable}"\n', "utf-8")
    assert "does not see it" in str(service.faults_of_config(service.Places(False), mine))


@posix
def test_other_forms(monkeypatch: pytest.MonkeyPatch, executable: Path) -> None:
    monkeypatch.setattr(service, "form", lambda: "zipapp")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    assert service.program(user=True).command == ("/usr/bin/python3", str(executable))
    assert service.program(user=False).command == ("/usr/bin/python3", "/usr/local/bin/kvstream.pyz")
    monkeypatch.setattr(service, "form", lambda: "source")
    assert service.program(user=False).command == ("/usr/bin/python3", "-m", "kvstream")
    monkeypatch.setattr(sys, "prefix", str(executable.parent))
    with pytest.raises(Exception, match="use --user, install it elsewhere"):
        service.plan(service.Places(False), None, template="")


@posix
@pytest.mark.parametrize("name", ["prefix", "base_prefix", "executable"])
def test_a_python_in_a_home_folder_runs_no_system_service(
        monkeypatch: pytest.MonkeyPatch, executable: Path, tmp_path: Path, name: str) -> None:
    """Nor by a link that leads out of it: the link itself is not seen."""
    for each, usual in (("executable", "/usr/bin/env"), ("prefix", "/usr"), ("base_prefix", "/usr")):
        monkeypatch.setattr(sys, each, usual)
    monkeypatch.setattr(service, "form", lambda: "zipapp")
    service.check_environment()
    link = executable.parent / "python3"
    link.symlink_to("/usr/bin/env")
    monkeypatch.setattr(sys, name, str(link if name == "executable" else link.parent))
    done = run("install", "--root", str(tmp_path / "root"))
    assert done.exit_code == 1 and "where the Python of this KVStream is" in done.output and "--user" in done.output
    assert not (tmp_path / "root").exists() and "does not see" in run("print").stderr
    assert run("install", "--user").exit_code == 0
    monkeypatch.setattr(service, "form", lambda: "executable")
    service.check_environment()


@posix
def test_a_file_that_others_may_not_read_is_copied(monkeypatch: pytest.MonkeyPatch, executable: Path) -> None:
    monkeypatch.setattr(service, "HIDDEN", ())
    for path in executable.parents:
        if not path.stat().st_mode & stat.S_IXOTH:
            break
    else:
        executable.parent.chmod(0o700)  # pytest's own folders are closed already, as a rule
    executable.chmod(0o755)
    assert service.program(user=False).copied_from == executable


def test_print_prints_what_install_writes(executable: Path) -> None:
    assert run("print").output == service.text_of("kvstream.service")
    assert run("print", "socket").output == service.text_of("kvstream.socket")
    assert run("print", "gpu").output == service.text_of("gpu.conf")
    assert "DynamicUser" not in run("print", "--user").output


def test_reload_of_a_wrong_file_asks_nobody(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text("[server]\nprot = 1\n", "utf-8")
    done = CliRunner().invoke(cli.main, ["reload", "--pid", "2", "--config", str(file)])
    assert done.exit_code == cli.ConfigFailure.exit_code and "nothing was reloaded" in done.output


def test_a_warning_where_less_may_be_locked_than_is_pinned() -> None:
    from kvstream.cuda.memlock import too_low

    assert too_low(10, None) == too_low(10, 10) == ""
    said = too_low(8_000_001, 8_000_000)
    assert "8000001 bytes" in said and "ulimit -l 7813" in said and "LimitMEMLOCK=infinity" in said


def test_a_missing_configuration_is_a_configuration_error(executable: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        service.plan(service.Places(False, tmp_path), Path("/none"), template="")


@posix
@pytest.mark.parametrize("name", ['q"uote', "ap'os", "back\\slash", "new\nExecStartPre=x", "jos\udce9"])
def test_a_program_that_systemd_could_not_start_is_refused(executable: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="rename it"):
        service.unit((f"/opt/{name}",), Path("/k.toml"))
    if name.isprintable():
        assert service.unit(("/opt/python3", f"/opt/{name}"), Path("/k.toml"))
    else:
        with pytest.raises(ConfigError, match="rename it"):
            service.unit(("/opt/k",), Path(f"/{name}"))


@analyze
def test_a_dollar_in_the_name_of_the_program(tmp_path: Path) -> None:
    file = tmp_path / "a$b ${HOME} 5%n"
    file.write_bytes(Path("/bin/true").read_bytes())
    file.chmod(0o755)
    (tmp_path / "kvstream.service").write_text(service.unit((str(file),), tmp_path / "$x.toml"), "utf-8")
    done = subprocess.run(["systemd-analyze", "--man=no", "verify", tmp_path / "kvstream.service"], capture_output=True,
                          text=True, check=False)
    assert "not executable" not in done.stderr
    assert "$$x.toml" in (tmp_path / "kvstream.service").read_text("utf-8")


def test_what_is_in_the_way_of_the_unit_is_said(executable: Path, tmp_path: Path) -> None:
    (tmp_path / "image" / "etc" / "systemd" / "system" / "kvstream.service").mkdir(parents=True)
    done = run("install", "--root", str(tmp_path / "image"))
    assert done.exit_code == 1 and "kvstream.service: Is a directory" in done.output
    assert "internal error" not in done.output


@posix
def test_nobodys_home_and_a_folder_that_is_gone(executable: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = run("install", "--user", "--config", "k.toml")
    assert done.exit_code == cli.ConfigFailure.exit_code and "k.toml: the folder that this is meant from" in done.output
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for words in (["service", "print", "--user"], ["cache", "ls"]):
        done = CliRunner().invoke(cli.main, words)
        assert done.exit_code == cli.ConfigFailure.exit_code and "has no home folder" in done.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_said_without_a_traceback() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run([sys.executable, "-m", "kvstream", "--help"], stdout=full, stderr=subprocess.PIPE,
                              text=True, check=False)
    assert done.returncode and done.stderr.startswith("kvstream: cannot write: No space") and "File" not in done.stderr


def test_what_could_not_be_written_leaves_nothing(executable: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    def fills_up(source: Path, into: Path) -> None:
        into.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(service.shutil, "copyfile", fills_up)
    done = run("install", "--root", str(tmp_path / "image"))
    assert done.exit_code == 1 and f"{tmp_path}/image/usr/local/bin/kvstream: No space left on device" in done.output
    assert "sudo" not in done.output
    assert not [path for path in (tmp_path / "image").rglob("*") if path.is_file()]

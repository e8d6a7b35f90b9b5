"""``kvstream service`` and ``kvstream reload``: KVStream under systemd.

As in ``cli``, everything heavy is imported inside the functions.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import click

from .cli_words import config_option, folders
from .errors import ConfigError, KVStreamError

PRINTED = ("unit", "socket", "gpu", "lan")


@click.group(short_help="Install KVStream as a systemd service.")
def service() -> None:
    """Install KVStream as a systemd service, of the system or of one user."""


_user_option = click.option("--user", is_flag=True, help="A service of yours instead of the system's: no rights "
                            "needed, runs while you are logged in (or for good: loginctl enable-linger).")
_config_option = click.option("--config", metavar="PATH", type=click.Path(path_type=Path),
                              help="The TOML file that it reads, instead of kvstream/kvstream.toml in /etc, or with "
                              "--user in ~/.config.")


@service.command("print", short_help="Print the unit, or a file beside it.")
@click.argument("what", type=click.Choice(PRINTED), default="unit")
@_user_option
@_config_option
def print_(what: str, user: bool, config: Path | None) -> None:
    """Print the unit as `install` would write it; `socket`, `gpu` and `lan` are the files that its options add."""
    from . import service as made

    if what == "unit":
        places = made.Places(user)
        config = places.config if config is None else made.from_here(config)
        click.echo(made.unit(made.program(user=user).command, config, user=user), nl=False)
        if not user:
            try:
                made.check_environment()
            except KVStreamError as error:
                click.echo(f"kvstream: warning: {error}", err=True)
    else:
        click.echo(made.text_of("kvstream.socket" if what == "socket" else f"{what}.conf"), nl=False)


@service.command(short_help="Write the unit, and say how to start it.")
@_user_option
@_config_option
@click.option("--socket", is_flag=True, help="Also kvstream.socket: systemd listens, and nobody is refused while "
              "KVStream restarts.")
@click.option("--gpu", is_flag=True, help="Let it use an NVIDIA GPU (system service).")
@click.option("--lan", is_flag=True, help="Let it talk to the local network (system service).")
@click.option("--start", is_flag=True, help="Also enable and start it.")
@click.option("--force", is_flag=True, help="Replace files that are there and differ.")
@click.option("--root", metavar="DIR", type=click.Path(path_type=Path), shell_complete=folders, default=Path("/"),
              help="Write below DIR, for an image.")
def install(user: bool, config: Path | None, socket: bool, gpu: bool, lan: bool, start: bool, force: bool,
            root: Path) -> None:
    """Write the unit, and say how to start it.

    What is there already and differs is not replaced without --force, and a configuration never. So a service is
    upgraded by `install --force` of the new file and the commands that are printed then, which restart it. An
    executable that lies where a system service cannot see it (a home folder) is copied to /usr/local/bin/kvstream; a
    missing configuration is written with all of its defaults as comments.
    """
    from . import config_show
    from . import service as made

    if user and (gpu or lan or root != Path("/")):
        raise ConfigError("--gpu, --lan and --root are for a system service; a user's has none of what they open")
    if start and root != Path("/"):
        raise ConfigError("--start: what is in an image cannot be started here")
    places = made.Places(user, made.from_here(root))
    unit = places.units / "kvstream.service"
    try:
        again = unit.exists()
        installer = made.plan(places, config, template=config_show.commented_toml(), socket=socket, gpu=gpu, lan=lan,
                              force=force)
        installer.check()
        faults = made.faults_of_config(places, config or places.config)
    except OSError as error:
        raise made.cannot(places, error) from error
    if faults and start:
        raise ConfigError([*faults, "nothing was written: it would not start"])
    installer.write()
    for line in installer.done:
        click.echo(line)
    for line in faults:
        click.echo(f"kvstream: warning: the service will not start with this: {line}", err=True)
    units = ["kvstream.socket", "kvstream.service"] if socket else ["kvstream.service"]
    if root != Path("/"):
        click.echo(f"Next, so that it starts when the image does:\n  systemctl --root {places.root} enable "
                   + " ".join(units))
        return
    systemctl = ["systemctl", *(["--user"] if user else [])]
    commands = [[*systemctl, "daemon-reload"]]
    if socket:  # a KVStream that runs already has the port that systemd is to listen on
        commands.append([*systemctl, "stop", units[-1]])
    elif again:  # one that runs is the old file, with the old unit
        commands.append([*systemctl, "try-restart", units[-1]])
    commands.append([*systemctl, "enable", "--now", *units])
    if start:
        _run_all(commands, "the files are written")
        click.echo(f"started; `{' '.join(systemctl)} status kvstream` shows how it is")
    else:
        journal = f"journalctl {'--user ' if user else ''}-u kvstream -f"
        click.echo("\n".join(["Next:", *(f"  {' '.join(command)}" for command in commands), f"  {journal}"]))


@service.command(short_help="Stop the service and remove its unit.")
@_user_option
@click.option("--root", metavar="DIR", type=click.Path(path_type=Path), default=Path("/"),
              help="Remove below DIR, from an image.")
def uninstall(user: bool, root: Path) -> None:
    """Stop the service, remove the files that `install` wrote for systemd, and say what is left.

    That is the configuration, keys, saved KV, what was unpacked, a copy of the program, and drop-ins of your own.
    """
    from . import service as made
    from . import service_remove

    if user and root != Path("/"):
        raise ConfigError("--root is for a system service")
    places = made.Places(user, made.from_here(root))
    try:
        found = service_remove.find(places)
    except OSError as error:
        raise KVStreamError(f"cannot look at {error.filename}: {error.strerror}") from error
    systemctl = ["systemctl", *(["--user"] if user else [])]
    running = service_remove.systemd_runs(places)
    if running and found.units:
        _run_all([[*systemctl, "disable", "--now", *found.units]], "nothing was removed")
    for line in service_remove.remove(found):
        click.echo(line)
    if not found.ours:
        click.echo(f"no service of KVStream is in {places.units}" + ("" if user else "; --user looks for yours"))
    elif running:
        _run_all([[*systemctl, "daemon-reload"]], "the files are removed")
    for line in service_remove.left(places, found):
        click.echo(line)


def _run_all(commands: list[list[str]], so_far: str) -> None:
    from .gateway.embedded_child import clean_environment

    for command in commands:
        try:
            code = subprocess.run(command, env=clean_environment(os.environ), check=False).returncode
        except OSError as error:
            raise KVStreamError(f"cannot run {command[0]}: {error.strerror}; does systemd run this machine?") from error
        if code:
            raise KVStreamError(f"`{' '.join(command)}` ended with {code}; {so_far}")


@click.command("reload", short_help="Let a running KVStream read its configuration again.")
@click.option("--pid", type=click.IntRange(min=2), help="Its process; otherwise that of the KVStream found by --url or "
              "the configuration.")
@click.option("--url", metavar="URL", help="A KVStream of this machine, instead of the one that the configuration "
              "(server.host, server.port) would start.")
@config_option
@click.pass_context
def reload(ctx: click.Context, pid: int | None, url: str | None, config: str | None) -> None:
    """Let a running KVStream read its configuration again, and say what came of it.

    Exit code 0: in force, with what needs a restart named; 2: the file is wrong, and what was in force still is; 1: it
    could not be asked, or did not say.
    """
    from .cli import target_of
    from .gateway.reloading import reload_running

    try:
        url, key = target_of(url, config)
    except ConfigError as error:
        raise ConfigError([*error.problems, "nothing was reloaded: a running KVStream goes on as it is"]) from error
    for line in reload_running(url, key, pid):
        click.echo(line)

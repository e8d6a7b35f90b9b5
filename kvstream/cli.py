"""The command line: one function per subcommand.

Everything heavy is imported inside the functions, so that ``kvstream --version`` and completion stay fast. Options are
handed to the configuration as text, because it knows the types and bounds: a wrong flag is then reported together with
everything else that is wrong, and only flags that were really given override the environment and the file.

Exit codes: 0 done; 2 the configuration or the command line is wrong; 3 the port is in use; 130 the demo was stopped by
Ctrl-C before its chat was over, or the bench; 4 see bench; 1 anything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from . import __version__
from .cli_bench import bench_options, kv, refuse_group_flags
from .cli_cache import cache
from .cli_completion import VARIABLE as COMPLETE_VARIABLE
from .cli_completion import completion
from .cli_doctor import doctor, models
from .cli_licenses import licenses
from .cli_man import man
from .cli_model import model_key
from .cli_output import is_write_error, let_go, sentence, told
from .cli_service import reload, service
from .cli_words import config_option, files, words, words_of
from .errors import ConfigError, KVStreamError, PortInUseError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from .config import Loaded

# Set to see where an unexpected error came from; without it the user gets one sentence.
TRACEBACK_VARIABLE = "KVSTREAM_TRACEBACK"

# Parameter of `serve` -> the key it sets. --model and --no-prefix-cache need a decision and are not here.
SERVE_KEYS = MappingProxyType({
    "backend": "backend.type",
    "backend_url": "backend.base_url",
    "llama_server": "embedded.llama_server",
    "host": "server.host",
    "port": "server.port",
    "gpu_blocks": "memory.num_gpu_blocks",
    "cpu_blocks": "memory.num_cpu_blocks",
    "block_size": "memory.block_size",
    "max_batch": "scheduler.max_batch_size",
    "log_level": "logging.level",
})
# What these two set, for --help.
OTHER_KEYS = MappingProxyType({
    "model": ("embedded.model", "backend.model"),
    "no_prefix_cache": ("prefix_cache.enabled",),
})


class Failure(click.ClickException):
    """An error that ends the process with an exit code and its sentences on stderr."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        with contextlib.suppress(OSError):  # a full disk behind stderr changes no exit code
            for line in self.message.splitlines():
                click.echo(f"kvstream: {line}", err=True)


class ConfigFailure(Failure):
    exit_code = 2


class PortInUseFailure(Failure):
    exit_code = 3


class Commands(click.Group):
    """The command group; the one place where errors become exit codes."""

    def main(self, *args: Any, **options: Any) -> Any:
        with told():  # click writes help, and its own messages, outside of invoke
            return super().main(*args, **{"complete_var": COMPLETE_VARIABLE, **options})

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            _fail(error)


def _fail(error: Exception) -> NoReturn:
    """Raise what click should show for ``error``. Nurseries wrap errors in groups; the first expected one inside
    speaks for the group unless something unexpected is in there too."""
    leaves = _leaves(error)
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    unexpected = [leaf for leaf in leaves if not isinstance(leaf, KVStreamError)]
    if unexpected:
        first = unexpected[0]
        if isinstance(first, OSError) and is_write_error(first):
            let_go()
            raise Failure(sentence(first)) from error
        hint = f"set {TRACEBACK_VARIABLE}=1 to see where"
        raise Failure(f"internal error: {type(first).__name__}: {first} ({hint})") from error
    expected = leaves[0]
    kind = (ConfigFailure if isinstance(expected, ConfigError)
            else PortInUseFailure if isinstance(expected, PortInUseError) else Failure)
    raise kind(str(expected)) from error


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


class KeyOption(click.Option):
    """An option that sets a key of the configuration; its help ends with that key and the default. Looked up when the
    help is printed: a help text made beforehand would import the configuration for every command."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from .config import KEYS_BY_PATH

        record, name = super().get_help_record(ctx), self.name or ""
        if record is None:
            return None
        paths = (SERVE_KEYS[name],) if name in SERVE_KEYS else OTHER_KEYS[name]
        about = KEYS_BY_PATH[paths[0]]
        default = "" if about.default == "" else f"; default {about.show(about.default)}"
        return record[0], f"{record[1]} [{' or '.join(paths)}{default}]"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The words that the key may be, or files where that is what is named."""
        from .config import KEYS_BY_PATH

        if self.name in ("model", "llama_server"):
            return files(ctx, self, incomplete)
        kind = KEYS_BY_PATH[SERVE_KEYS[self.name]].type if self.name in SERVE_KEYS else str
        return words(*words_of(kind))(ctx, self, incomplete)


F = TypeVar("F", bound=Callable[..., Any])


key_option = partial(click.option, cls=KeyOption)


def url_option(command: F) -> F:
    return click.option("--url", metavar="URL", help="A running KVStream, instead of the one that the configuration "
                        "(server.host, server.port) would start on this machine.")(command)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvstream")
def main() -> None:
    """A proxy in front of your model runtime that hands out its KV memory page by page."""


for _command in (doctor, models, cache, completion, licenses, man, service, reload):
    main.add_command(_command)


@main.command(short_help="Serve an OpenAI-compatible API in front of a runtime.",
              context_settings={"allow_extra_args": True})
@key_option("--backend", metavar="KIND", help="Kind of runtime: llamacpp, ollama or openai.")
@key_option("--backend-url", metavar="URL",
              help="Where the runtime listens; http://127.0.0.1:8081 unless told otherwise, for llamacpp.")
@key_option("--model", metavar="NAME|PATH",
              help="A GGUF file: start a llama.cpp server with it. Otherwise the model to ask the runtime for.")
@key_option("--llama-server", metavar="PATH", help="The llama-server to start, instead of the one on PATH.")
@key_option("--host", metavar="ADDRESS", help="Address to listen on.")
@key_option("--port", metavar="N", help="Port to listen on.")
@key_option("--gpu-blocks", metavar="N|auto", help="Device pages of KV memory.")
@key_option("--cpu-blocks", metavar="N", help="Host pages of KV memory; no effect yet.")
@key_option("--block-size", metavar="N", help="Tokens per page.")
@key_option("--max-batch", metavar="N", help="Most requests running at once.")
@key_option("--no-prefix-cache", is_flag=True, help="Do not keep prompt prefixes for reuse.")
@key_option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")
@config_option
@click.pass_context
def serve(ctx: click.Context, /, config: str | None, model: str | None, no_prefix_cache: bool,
          **given: str | None) -> None:
    """Serve an OpenAI-compatible API in front of a runtime.

    In brackets: the key of kvstream.toml that an option sets (see check-config --template), and its default. With a
    GGUF file as --model no other server is needed.
    """
    if ctx.args:
        raise click.UsageError(f"{ctx.args[0]!r} belongs to no option; a model is given as --model {ctx.args[0]}", ctx)
    with _importing():
        loaded = _load(config, *serve_flags(model, no_prefix_cache, given))
        from .gateway.serve import run

    ctx.exit(run(loaded))


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Without the garbage collector, which would look through a growing heap again and again for garbage that imports
    do not make: a sixth of the time. What was imported stays: no later collection looks at it, while streams wait."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.freeze()
            gc.enable()


def serve_flags(model: str | None, no_prefix_cache: bool,
                given: dict[str, str | None]) -> tuple[dict[str, object], dict[str, str]]:
    """The flags that were given, as ``section.key -> value``, and how each is spelt."""
    flags: dict[str, object] = {}
    names: dict[str, str] = {}
    for parameter, path in SERVE_KEYS.items():
        value = given.get(parameter)
        if value is not None:
            flags[path] = value.upper() if parameter == "log_level" else value
            names[path] = "--" + parameter.replace("_", "-")
    if model is not None:
        # Runtimes name models by file too: with a backend named on the same line it is a name, not a file to start.
        elsewhere = bool(given.get("backend_url")) or given.get("backend") not in (None, "llamacpp")
        path = model_key(model, elsewhere=elsewhere)
        flags[path], names[path] = model, "--model"
    if no_prefix_cache:
        flags["prefix_cache.enabled"], names["prefix_cache.enabled"] = False, "--no-prefix-cache"
    return flags, names


def _load(config: str | None, flags: dict[str, object], names: dict[str, str], *, together: bool = True) -> Loaded:
    from .config import load_config
    from .config_load import doubtful_variables

    for line in doubtful_variables(os.environ):
        click.echo(f"kvstream: warning: {line}", err=True)
    return load_config(config, os.environ, flags, names, together=together)


def _url(url: str | None, config: str | None) -> str:
    """Which KVStream to look at: the one named, else the one that this configuration would start here."""
    return target_of(url, config)[0]


def target_of(url: str | None, config: str | None) -> tuple[str, str]:
    """The same, and the key to show it: KVSTREAM_KEY, else the token of the configuration, for its own KVStream only.
    """
    from .gateway import statusview
    from .gateway.alive import url_of

    key = os.environ.get("KVSTREAM_KEY", "")
    if url is None:
        try:
            ours = _load(config, {}, {}, together=False).config
        except ConfigError as error:  # one that runs goes on with what it read before
            raise ConfigError([*error.problems, "a KVStream that runs is seen with --url nevertheless"]) from error
        return url_of(ours.server), key or ours.auth.metrics_token
    statusview.check_url(url)
    return url, key


@main.command(short_help="Start a small real model and chat with it.")
@click.option("--once", is_flag=True, help="Exit after the first chat instead of serving on.")
@click.option("--port", metavar="N",
              help="Port to listen on [server.port; default 8080]; a free one where it is taken.")
@config_option
@click.pass_context
def demo(ctx: click.Context, once: bool, port: str | None, config: str | None) -> None:
    """Start a small real model on a real llama.cpp server and chat with it.

    Then serves on until Ctrl-C. Ctrl-C before the chat is over stops at once, with exit code 130.
    """
    loaded = _load(config, {} if port is None else {"server.port": port}, {"server.port": "--port"})
    from .gateway.demo import run_demo

    ctx.exit(run_demo(loaded, once))


@main.command(short_help="Show queue, seats and pages of a running KVStream.")
@url_option
@config_option
@click.option("--watch", is_flag=True, help="Keep looking, once per second.")
@click.option("--json", "as_json", is_flag=True, help="The snapshot as JSON (one line per look with --watch).")
@click.pass_context
def status(ctx: click.Context, url: str | None, config: str | None, watch: bool, as_json: bool) -> None:
    """Show queue, seats and pages of a running KVStream.

    One that wants a key for that is shown the one in KVSTREAM_KEY, else auth.metrics_token of the configuration.
    """
    from .gateway import statusview

    url, key = target_of(url, config)
    try:
        ctx.exit(statusview.watch(url, as_json, key) if watch else statusview.show_once(url, as_json, key))
    except KeyboardInterrupt:  # the ordinary way out of --watch
        ctx.exit(0)


@main.command(short_help="Say whether a KVStream is alive and ready.")
@url_option
@config_option
@click.option("--live", is_flag=True, help="Only whether it is alive, whatever its backend does: for a probe that "
              "restarts what fails it.")
def health(url: str | None, config: str | None, live: bool) -> None:
    """Say whether a KVStream is alive and ready; exit 0 only when it is ready (with --live, alive)."""
    if live:
        from .gateway.alive import live_line

        click.echo(live_line(url if url is not None else _live_url(config)))
        return
    from .gateway import statusview

    click.echo(statusview.health_line(_url(url, config)))


def _live_url(config: str | None) -> str:
    """Where the KVStream of this configuration is. A file that is wrong by now does not make one that runs any less
    alive: then the environment says, or the default."""
    from .config import load_config
    from .gateway.alive import url_of

    try:
        ours = _load(config, {}, {}, together=False)
    except ConfigError as error:
        ours = load_config(os.devnull, os.environ, {}, {}, together=False)
        click.echo(f"kvstream: warning: looking where the environment says: {error.problems[0]}", err=True)
    return url_of(ours.config.server)


@main.group(invoke_without_command=True, short_help="Measure a server, alone or beside others, under load.")
@bench_options
@config_option
@click.pass_context
def bench(ctx: click.Context, /, url: str | None, config: str | None, **given: Any) -> None:
    """Measure a server, alone or beside others, under load.

    The target is any OpenAI-compatible server: with --url, else the KVStream of the configuration. Prompts are new
    ones, of the wanted length where the target can count tokens. Exit codes: 0 measured; 1 a target is not there or
    served nothing; 2 wrong options; 4 an open loop (--rate) offered more than was served; 130 stopped by Ctrl-C, which
    prints what there is.
    """
    if ctx.invoked_subcommand is not None:
        refuse_group_flags(ctx)
        return
    from .cli_bench import run

    ctx.exit(run(_url(url, config), given))


bench.add_command(kv)


@main.command("_llama-child", hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def llama_child(ctx: click.Context, argv: tuple[str, ...]) -> None:
    """How a frozen executable starts its llama.cpp child: as itself, since it has no other Python."""
    from .gateway.embedded_child import main as child

    ctx.exit(child(sys.argv[2:]))  # not `argv`: click has taken the "--" out of it


@main.command("check-config", short_help="Show the effective configuration and its origins.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--template", is_flag=True, help="Print a commented kvstream.toml with every default instead.")
@config_option
def check_config(config: str | None, as_json: bool, template: bool) -> None:
    """Show the effective configuration and where each value came from."""
    from . import config_show

    if template:
        click.echo(config_show.commented_toml(), nl=False)
        return
    try:
        loaded = _load(config, {}, {})
    except ConfigError as error:
        if as_json:
            import json

            click.echo(json.dumps({"problems": error.problems}, indent=2))
        raise
    click.echo(config_show.effective_json(loaded) if as_json else config_show.effective_toml(loaded).rstrip("\n"))

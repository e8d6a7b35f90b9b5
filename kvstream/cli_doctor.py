"""``kvstream doctor`` and ``kvstream models``: looking around.

As in ``cli``, everything heavy is imported inside the functions.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from .cli_words import config_option

if TYPE_CHECKING:
    from .gateway.doctor import Question, Report



def _question(url: str | None, config: str | None) -> Question:
    """What to examine; a wrong configuration is a finding, not an end."""
    from .config import load_config
    from .config_load import doubtful_variables
    from .errors import ConfigError
    from .gateway import statusview
    from .gateway.doctor import Question

    if url is not None:
        statusview.check_url(url)
    warnings = tuple(doubtful_variables(os.environ))
    try:
        return Question(load_config(config, os.environ, together=False), warnings=warnings, url=url)
    except ConfigError as error:
        return Question(None, tuple(error.problems), warnings, url)


@click.command(short_help="Say what runs on this machine, what is wrong, and what to do.")
@click.option("--url", metavar="URL", help="Look at this server only, a runtime or a KVStream.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
@click.option("--isolation", is_flag=True,
              help="Also test with 36 model calls of some 540 tokens each whether sessions can see each other's text.")
@click.option("--parts", is_flag=True, help="Only try each optional part of KVStream itself: what it does, how long it "
              "takes to load, or why it is missing.")
@config_option
@click.pass_context
def doctor(ctx: click.Context, url: str | None, as_json: bool, isolation: bool, parts: bool,
           config: str | None) -> None:
    """Say what runs on this machine, what the runtime lacks for KVStream, and the flag or setting that helps.

    Changes nothing, and asks nothing that would load a model (--isolation does: some 20,000 tokens in all, with
    KVSTREAM_KEY as the key if it tests a KVStream or --url names the server).
    Exit code 0: no problem; 1: problems; 2: the configuration is wrong.
    """
    if parts:
        _show_parts(as_json)
        return
    from rich.console import Console

    from .gateway.doctor import run_examination
    from .gateway.doctorview import show

    question = _question(url, config)
    report = run_examination(question)
    if isolation:
        report = _with_isolation(report, question)
    if as_json:
        import json

        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console(highlight=False))
    ctx.exit(report.exit_code)


def _show_parts(as_json: bool) -> None:
    """What is missing is no problem: everything but these parts works without them."""
    from . import __version__
    from .parts import form, own_file, tried, unpacked_in

    found = list(tried())
    if as_json:
        import json

        rows = [{"name": one.part.package, "version": one.version, "ms": round(one.took_s * 1e3),
                 "problem": one.problem} for one in found]
        click.echo(json.dumps({"version": __version__, "form": form(), "file": own_file(),
                               "unpacked_in": unpacked_in(), "python": sys.version.split()[0], "parts": rows},
                              indent=2))
        return
    click.echo(f"KVStream {__version__} ({form()}), Python {sys.version.split()[0]}")
    if unpacked_in():
        click.echo(f"  {own_file()}, unpacked in {unpacked_in()}")
    for one in found:
        state = one.problem or f"{one.version} ({one.took_s * 1000:.0f} ms)".strip()
        click.echo(f"  {one.part.package}, for {one.part.gives}: {state}")


def _with_isolation(report: Report, question: Question) -> Report:
    """The report with what the isolation test found, beside the server that was tested."""
    import attrs

    from .adapters.advice import Advice
    from .gateway.doctor import isolation_target
    from .gateway.isolation import CALL_TOKENS, calls_total, judge, run_trial

    target = isolation_target(report, question)
    if target is None:
        none = Advice("problem", "Isolation: there is no server to test.", "start one, or name it with --url")
        return attrs.evolve(report, findings=(*report.findings, none))
    server, model, api_key = target
    if not api_key and (server.kind == "kvstream" or server.role == "given"):
        api_key = os.environ.get("KVSTREAM_KEY", "")
    click.echo(f"isolation: {calls_total()} calls of some {CALL_TOKENS} tokens to {server.url}; on a CPU that takes "
               "minutes", err=True)
    trial = run_trial(server.url, model=model, api_key=api_key, progress=_show_progress)
    tested = attrs.evolve(server, findings=(*server.findings, *judge(trial)))
    return attrs.evolve(report, servers=tuple(tested if one is server else one for one in report.servers))


def _show_progress(done: int, total: int) -> None:
    """On stderr: one line that counts, or where nobody watches, now and then a line."""
    if sys.stderr.isatty():
        click.echo(f"\risolation: {done} of {total} calls", err=True, nl=done == total)
    elif done % 10 == 0 or done == total:
        click.echo(f"isolation: {done} of {total} calls", err=True)


@click.command(short_help="List the models that clients can name.")
@click.option("--url", metavar="URL", help="Ask this server, a KVStream or a runtime.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@config_option
def models(url: str | None, as_json: bool, config: str | None) -> None:
    """List the models that clients can name: of a running KVStream, or where none runs, of the runtimes found here.

    A KVStream that wants a key for that is shown the one in KVSTREAM_KEY.
    """
    from rich.console import Console

    from .errors import ConfigError
    from .gateway.doctorview import show_models
    from .gateway.inventory import run_listing

    question = _question(url, config)
    if question.config_problems:
        raise ConfigError(list(question.config_problems))
    groups = run_listing(question, os.environ.get("KVSTREAM_KEY", ""))
    if as_json:
        import json

        import attrs

        click.echo(json.dumps([attrs.asdict(group) for group in groups], indent=2))
    else:
        show_models(groups, Console(highlight=False))

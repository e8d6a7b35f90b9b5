"""``kvstream bench``: its flags, and what they make of each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import ConfigError

if TYPE_CHECKING:
    from .bench.main import Options
    from .bench.plan import Load

CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS, ROUNDS = 16, 512, 128, 50, 5
ROUTES = ("chat", "completions")
OUT = click.Path(dir_okay=False, path_type=Path)


def bench_options(command: Any) -> Any:
    """All flags of the command but --config, which it shares with others."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS = (
    click.option("--url", metavar="URL", help="The server to measure, instead of the KVStream that the configuration "
                 "(server.host, server.port) would start on this machine."),
    click.option("--compare", "compare", metavar="URL", multiple=True,
                 help="Another target; they take turns, round by round, and ratios are printed. May be given again."),
    click.option("--label", metavar="NAME", help="What to call the target of --url."),
    click.option("--compare-label", metavar="NAME", multiple=True, help="What to call those of --compare, in order."),
    click.option("--model", metavar="NAME", default="", help="Model to ask for. Default: the first one offered."),
    click.option("--route", type=click.Choice(ROUTES), default="chat", show_default=True, help="API to call."),
    click.option("--api-key", metavar="KEY", default="", envvar="KVSTREAM_BENCH_API_KEY", show_envvar=True,
                 help="Bearer token for all targets."),
    click.option("--concurrency", metavar="N", type=click.IntRange(1, 100_000),
                 help=f"Clients at once [default: {CONCURRENCY}]; with --rate the most at once [default: no bound]."),
    click.option("--total-requests", metavar="N", type=click.IntRange(1),
                 help=f"Requests per target [default: {REQUESTS}, or as many as fit with --duration]."),
    click.option("--duration", metavar="S", type=click.FloatRange(0.1),
                 help="Begin no request after this many seconds per target; those that run are finished."),
    click.option("--prompt-len", metavar="N", type=click.IntRange(1),
                 help=f"Tokens per prompt [default: {PROMPT_TOKENS}]."),
    click.option("--output-len", metavar="N", type=click.IntRange(1),
                 help=f"Tokens per answer [default: {OUTPUT_TOKENS}]."),
    click.option("--mix", metavar="SPEC", help="Classes of requests instead, as name:weight:prompt:output, for example "
                 "short:0.8:64:32,long:0.2:1500:64."),
    click.option("--shared-prefix", metavar="SHARE", type=click.FloatRange(0, 1), default=0.0,
                 help="Share of every prompt that all of a target have in common, 0 to 1. Default: 0; every prompt is "
                      "new."),
    click.option("--turns", metavar="N", type=click.IntRange(1, 1000), default=1,
                 help="Turns of a conversation; its history is sent along. Default: 1."),
    click.option("--turn-len", metavar="N", type=click.IntRange(1),
                 help="Tokens of each later message [default: a quarter of the prompt]."),
    click.option("--rate", metavar="R", type=click.FloatRange(0.001),
                 help="Open loop: this many requests (conversations) begin per second, whatever became of the others; "
                      "latency counts from when each was due."),
    click.option("--arrivals", type=click.Choice(("poisson", "constant")), default="poisson", show_default=True,
                 help="How they come, with --rate."),
    click.option("--slo", metavar="BOUNDS", help="What makes a request good, for example ttft:2s,tpot:80ms; of ttfb, "
                 "ttft, ttfa, tpot, e2e. Goodput counts those that keep all."),
    click.option("--rounds", metavar="N", type=click.IntRange(1, 1000), default=ROUNDS, show_default=True,
                 help="Rounds of a comparison; fewer when a round would have fewer requests than clients."),
    click.option("--warmup", metavar="N", type=click.IntRange(0, 1000), default=1, show_default=True,
                 help="Requests per target that are not measured."),
    click.option("--seed", metavar="N", type=int, help="Same seed, same load [default: another one each time, so that "
                 "no cache knows the prompts]."),
    click.option("--timeout", metavar="S", type=click.FloatRange(0.1), default=300.0, show_default=True,
                 help="Give a request up after this many seconds."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
                 help="Ask the runtime to make answers as long as asked."),
    click.option("--json", "json_file", metavar="FILE", type=OUT, help="Everything, as JSON."),
    click.option("--csv", "csv_file", metavar="FILE", type=OUT, help="A row per request."),
    click.option("--plot", metavar="FILE.png", type=OUT, help="Distributions; needs the extra `plots`."),
)


def run(url: str, given: dict[str, Any]) -> int:
    """The exit code: 0 measured; 1 a target served nothing; 4 an open loop offered more than was served; 130 stopped by
    Ctrl-C. *Errors*: KVStreamError."""
    options = options_of(url, given)
    from .bench.main import run_bench

    return run_bench(options)


def options_of(url: str, given: dict[str, Any]) -> Options:
    """*Errors*: ConfigError for flags that do not go together."""
    from .bench.main import Options
    from .bench.slo import Slo, parse_slo

    labels = (given["label"], *given["compare_label"])
    if len(given["compare_label"]) > len(given["compare"]):
        raise ConfigError("there are more --compare-label than --compare")
    plot = given["plot"]
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot writes .png, .svg or .pdf, not {plot.name!r}")
    return Options(
        urls=(url, *given["compare"]), labels=labels, load=load_of(given), model=given["model"],
        slo=parse_slo(given["slo"]) if given["slo"] else Slo(), api_key=given["api_key"],
        json=given["json_file"], csv=given["csv_file"], plot=plot)


def load_of(given: dict[str, Any]) -> Load:
    """*Errors*: ConfigError."""
    import secrets

    from .bench.plan import Kind, Load, parse_mix
    from .bench.prompts import COMPLETIONS

    if given["mix"] and (given["prompt_len"] or given["output_len"]):
        raise ConfigError("--mix has the lengths of every class; leave --prompt-len and --output-len out")
    if given["route"] == "completions" and given["turns"] > 1:
        raise ConfigError("--turns needs chat; a completion has no turns")
    kinds = parse_mix(given["mix"]) if given["mix"] else (
        Kind("all", 1.0, given["prompt_len"] or PROMPT_TOKENS, given["output_len"] or OUTPUT_TOKENS),)
    total, duration, rate = given["total_requests"], given["duration"], given["rate"]
    concurrency = given["concurrency"] or (None if rate is not None else CONCURRENCY)
    return Load(
        kinds=kinds, concurrency=concurrency, duration_s=duration, rate=rate, arrivals=given["arrivals"],
        requests=total if total is not None or duration is not None else REQUESTS,
        shared_prefix=given["shared_prefix"], turns=given["turns"], turn_tokens=given["turn_len"],
        warmup=given["warmup"], rounds=given["rounds"], timeout_s=given["timeout"], ignore_eos=given["ignore_eos"],
        seed=secrets.randbelow(1_000_000) if given["seed"] is None else given["seed"],
        **({"route": COMPLETIONS} if given["route"] == "completions" else {}))

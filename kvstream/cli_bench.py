"""``kvstream bench``: its flags, and what they make of each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .cli_words import words
from .errors import ConfigError

if TYPE_CHECKING:
    from .bench.kv import Sweep
    from .bench.main import Options
    from .bench.plan import Load

CONCURRENCY, PROMPT_TOKENS, OUTPUT_TOKENS, REQUESTS, ROUNDS = 16, 512, 128, 50, 5
# For completion and help; the tables are in bench.kvmodel, which wants numpy.
CARDS = ("rtx-5070-ti", "rtx-5060-ti", "h200")
MODELS = ("qwen3.8-27b", "llama-3.1-8b", "smollm2-135m")
KV_TYPES = ("float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
BASELINES = ("all-resident", "host-only", "managed")
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
    click.option("--report", "report_file", metavar="FILE.html", type=OUT,
                 help="A page for a browser: verdict, pictures, tables. It fetches nothing."),
    click.option("--plot", metavar="FILE.svg", type=OUT,
                 help="The pictures alone; as .png or .pdf too, where matplotlib is (the extra `plots`)."),
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
    from .bench.plots import check_plot, check_report
    from .bench.slo import Slo, parse_slo

    labels = (given["label"], *given["compare_label"])
    if len(given["compare_label"]) > len(given["compare"]):
        raise ConfigError("there are more --compare-label than --compare")
    if given["plot"] is not None:
        check_plot(given["plot"])
    if given["report_file"] is not None:
        check_report(given["report_file"])
    return Options(
        urls=(url, *given["compare"]), labels=labels, load=load_of(given), model=given["model"],
        slo=parse_slo(given["slo"]) if given["slo"] else Slo(), api_key=given["api_key"],
        json=given["json_file"], csv=given["csv_file"], plot=given["plot"],
        report=given["report_file"])


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


# --- bench kv ---------------------------------------------------------------------------------------------------------


class Tokens(click.ParamType[int]):
    """A number of tokens, 1024-based with K or M."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([1-9][0-9]{0,9})([KkMm]?)", str(value))
        if found is None:
            self.fail(f"{value!r} is no number of tokens, such as 65536, 192K or 1M", param, ctx)
        return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


@click.command(short_help="KV streaming over growing contexts, measured or simulated.")
@click.option("--simulate", metavar="CARD|FILE", shell_complete=words(*CARDS, or_files=True),
              help=f"Instead of measuring on this machine's GPU: {', '.join(CARDS)}, or a JSON file of a card's "
                   "constants.")
@click.option("--model-geometry", metavar="MODEL|FILE", default=MODELS[0], show_default=True,
              shell_complete=words(*MODELS, or_files=True),
              help=f"{', '.join(MODELS)}, or a JSON file of a model's shape.")
@click.option("--max-context", metavar="N", type=Tokens(), required=True, help="Prompt and answer at most, e.g. 192K.")
@click.option("--min-context", metavar="N", type=Tokens(), default="8K", show_default=True, help="First prompt.")
@click.option("--step", metavar="N", type=Tokens(), default="8K", show_default=True, help="From prompt to prompt.")
@click.option("--decode-tokens", metavar="N", type=click.IntRange(1, 65536), default=256, show_default=True,
              help="Answer after each prompt.")
@click.option("--ubatch-size", metavar="N", type=click.IntRange(33, 65536), default=512, show_default=True,
              help="Tokens of the prompt per step.")
@click.option("--pool-mib", metavar="N|auto|published", default="auto", show_default=True,
              shell_complete=words("auto", "published"),
              help="Device memory for KV and workspaces: a size, the largest that is left and of use, or that with "
                   "which the simulated card's published figures were taken.")
@click.option("--margin-mib", metavar="N", type=click.FloatRange(0), default=64.0, show_default=True,
              help="What `auto` leaves free.")
@click.option("--baseline", metavar="NAME,...", default="", shell_complete=words(*BASELINES),
              help="Decode also without streaming, to compare: "
              "all-resident (if it fits), host-only (no page stays on the device), managed (CUDA moves the pages).")
@click.option("--cache-type-k", metavar="TYPE", default="q8_0", show_default=True,
              shell_complete=words(*KV_TYPES), help="KV type of K.")
@click.option("--cache-type-v", metavar="TYPE", default="q4_0", show_default=True,
              shell_complete=words(*KV_TYPES), help="KV type of V.")
@click.option("--page-tokens", metavar="N", type=int, default=256, show_default=True, help="Tokens of a page.")
@click.option("--pool-step-mib", metavar="N", type=click.IntRange(1, 4096), default=32, show_default=True,
              help="GPU: how finely `auto` looks for the largest pool.")
@click.option("--reserve-mib", metavar="N|model", default="model", show_default=True,
              help="GPU: memory taken in the place of a model, or as much as its weights and state would take.")
@click.option("--other-ms", metavar="MS[,MS]|CARD", default="0", show_default=True,
              help="GPU: keep it busy for so long per token [and per micro-batch] in the place of the model between "
                   "the attentions; of a card: as its profile says. With 0 times are those of KV alone.")
@click.option("--full-prefill", is_flag=True, help="GPU: run all of each prompt, not four places of it.")
@click.option("--output", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Folder of the results; one that has some is continued. [default: a new one]")
@click.pass_context
def kv(ctx: click.Context, /, **given: Any) -> None:
    """KV streaming over growing contexts, measured or simulated.

    How fast a context is decoded whose KV is larger than the device memory left for it. Measured on this machine's GPU
    with kvstream/cuda, or, with --simulate, its policy and transfers in virtual time with a card's constants; every
    row says which. Writes results.csv, results.jsonl, kv-stream-sweep.svg and .html after every point, and at the end
    a .png where matplotlib is; the same --output again goes on where it stopped. Exit codes: 0 done; 1 a context did
    not fit or failed on the GPU; 2 wrong options, or no GPU; 130 stopped by Ctrl-C, which leaves what there is.
    """
    if given["simulate"] is not None:
        for name in ("pool_step_mib", "reserve_mib", "other_ms", "full_prefill"):
            if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                flag = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{flag} is for a GPU and has no meaning with --simulate", ctx)
    sweep = sweep_of(given)
    from .bench.kv import run_sweep

    ctx.exit(run_sweep(sweep))


def sweep_of(given: dict[str, Any]) -> Sweep:
    """*Errors*: ConfigError."""
    pool, reserve = given["pool_mib"], given["reserve_mib"]
    if pool not in ("auto", "published") and not re.fullmatch(r"[1-9][0-9]{0,6}", pool):
        raise ConfigError(f"--pool-mib is a number of MiB, auto or published, not {pool!r}")
    if pool == "published" and given["simulate"] is None:
        raise ConfigError("--pool-mib published is for a card that is named with --simulate")
    if reserve != "model" and not re.fullmatch(r"[0-9]{1,7}", reserve):
        raise ConfigError(f"--reserve-mib is a number of MiB or model, not {reserve!r}")
    try:
        from .bench.kv import Sweep, baselines_of, model_of, other_ms_of, profile_of
        from .bench.kvpoint import Setup
        from .cuda.types import KVType
    except ImportError as error:
        if error.name != "numpy":
            raise
        from .parts import to_add

        raise ConfigError(f"bench kv needs numpy: {to_add('numpy')}") from error

    model = model_of(given["model_geometry"])
    other_ms, other_prefill_ms = other_ms_of(given["other_ms"], model, given["ubatch_size"])
    setup = Setup(
        None if given["simulate"] is None else profile_of(given["simulate"]), model, KVType.of(given["cache_type_k"]),
        KVType.of(given["cache_type_v"]), given["page_tokens"], given["decode_tokens"], given["ubatch_size"],
        pool_mib=None if pool == "auto" else pool if pool == "published" else int(pool),
        margin_mib=given["margin_mib"], baselines=baselines_of(given["baseline"]), pool_step_mib=given["pool_step_mib"],
        reserve_mib=None if reserve == "model" else float(reserve), other_ms=other_ms,
        other_prefill_ms=other_prefill_ms, full_prefill=given["full_prefill"])
    return Sweep(setup, given["max_context"], given["min_context"], given["step"], given["output"])


def refuse_group_flags(ctx: click.Context) -> None:
    """*Errors*: UsageError for flags of ``bench`` before the name of one of its commands, where they mean nothing."""
    typed = [parameter.opts[0] for parameter in ctx.command.params
             if ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE]
    if typed:
        raise click.UsageError(f"{', '.join(typed)} has no meaning for bench {ctx.invoked_subcommand}", ctx)

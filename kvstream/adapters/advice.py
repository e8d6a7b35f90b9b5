"""What a runtime lacks for KVStream, and the exact flag or setting that gives it. Pure.

Each :class:`Advice` is one sentence about what is, and one about what to do. Severities: ``ok`` (as it should be),
``note`` (worth knowing), ``warning`` (works, but will disappoint), ``problem`` (does not work).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

from attrs import frozen

from .identify import Identity, Replies, rows_of
from .inventory import instances_of, models_of
from .llamacpp_flags import CACHE_RAM_DEFAULT_MIB, ServerFlags

Severity = Literal["ok", "note", "warning", "problem"]
MIB: Final = 1024 * 1024
GIB: Final = 1024 * MIB
CACHE_RAM_SHARE_MAX: Final = 0.25  # of the machine's memory; the model and its KV want theirs too
CACHE_RAM_SUGGESTED_SHARE: Final = 0.125
BATCH_TOKENS_MAX: Final = 512
CONTEXT_SMALL: Final = 4096


@frozen
class Advice:
    """One finding. ``remedy`` says what to do, empty when nothing needs doing."""

    severity: Severity
    text: str
    remedy: str = ""


@frozen
class Tried:
    """What a running KVStream found out about a llama.cpp by trying. ``slots``: how they may be used was settled, so
    KVStream tells of it. ``unified``, ``ram_cache``: its KV layout, and whether it keeps prompts in RAM; None: unknown.
    """

    slots: bool = False
    unified: bool | None = None
    ram_cache: bool | None = None


UNTRIED: Final = Tried()


@frozen
class Machine:
    """What is known of the machine that the runtime runs on; None and empty where nothing is."""

    memory_bytes: int | None = None
    flags: ServerFlags | None = None  # of the llama.cpp process
    ollama: Mapping[str, str] | None = None  # the OLLAMA_ variables of its process
    local: bool = True
    tried: Tried = UNTRIED


def advise(identity: Identity, replies: Replies, machine: Machine) -> list[Advice]:
    """Everything worth saying about one runtime, in the order of what matters."""
    if identity.state == "locked":
        return [Advice("problem", f"{identity.title} wants a key.",
                       "set backend.api_key (or KVSTREAM_BACKEND__API_KEY)")]
    if identity.state == "loading":
        return [Advice("note", f"{identity.title} is still loading its model.",
                       "wait; kvstream serve holds requests for upstream.load_timeout_s meanwhile")]
    by_kind = {"llamacpp": _llamacpp, "ollama": _ollama, "lmstudio": _lmstudio, "foundry": _foundry,
               "foundry-old": _foundry, "vllm": _vllm, "openai": _openai}
    reader = by_kind.get(identity.kind)
    return list(reader(identity, replies, machine)) if reader is not None else []


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def _llamacpp(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    props = _object(replies, "/props")
    if identity.router:
        yield Advice("note", "It is a router: it serves several models and loads one when a request names it.",
                     "name the model in requests, or set backend.model; to see one model's slots, load it first")
        yield from _cache_ram(machine)
        return
    if not props:
        yield Advice("warning", "/props gives no answer, so its slots and context are not known.",
                     "set backend.seats and backend.context_tokens")
        return
    yield from _slots(props, machine.flags, machine.tried)
    if identity.state == "sleeping":
        yield Advice("note", "It sleeps (--sleep-idle-seconds): its KV is gone, the next request loads it again.",
                     "start it without --sleep-idle-seconds if that takes long")
    if not machine.tried.slots:  # else KVStream says what it does, whatever its flags promise
        yield from _hard_inject(props, machine.flags)
    yield from _endpoints(props)
    yield from _batch(machine.flags)
    yield from _cache_ram(machine)
    modalities = props.get("modalities")
    if isinstance(modalities, dict) and any(value is True for value in modalities.values()):
        kinds = " and ".join(sorted(name for name, value in modalities.items() if value is True))
        yield Advice("note", f"It takes {kinds} (--mmproj); such prompts are counted by estimate, not exactly.")


def _slots(props: Mapping[str, Any], flags: ServerFlags | None, tried: Tried) -> Iterator[Advice]:
    slots, settings = props.get("total_slots"), props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    if not isinstance(slots, int) or not isinstance(context, int):
        return
    if slots == 1:
        yield Advice("note", f"It has one slot of {context:,} tokens, so requests run one after the other.",
                     f"llama-server -np 4 -c {4 * context} (and the memory for it) runs four at once")
        return
    unified = tried.unified if tried.unified is not None else flags.unified if flags is not None else None
    if unified:
        why = ("as KVStream found" if flags is None or not flags.unified else
               "because -np was not given" if flags.unified_given is None else "because of --kv-unified")
        yield Advice("warning", f"Its {slots} slots share one KV pool of {context:,} tokens ({why}); when it "
                     "overflows, llama.cpp ends every running request. KVStream keeps requests within the pool.",
                     f"llama-server -np {slots} -c {slots * context} gives each slot its own {context:,} tokens")
    elif unified is not None:
        yield Advice("ok", f"{slots} slots with {context:,} tokens each (split KV).")
    else:
        yield Advice("note", f"{slots} slots; each may use up to {context:,} tokens. Whether they share that (a "
                     "unified pool, the default without -np) cannot be seen from here.",
                     f"start llama-server with an explicit -np {slots}, or set backend.kv")
    if context < CONTEXT_SMALL:
        yield Advice("note", f"{context:,} tokens of context are little for agents and long chats.",
                     f"llama-server -c {slots * 8192} -np {slots} gives each slot 8,192")


def _hard_inject(props: Mapping[str, Any], flags: ServerFlags | None) -> Iterator[Advice]:
    """Whether KV state can be saved and restored. What a server really does with it only a running KVStream finds out,
    by trying; see ``selfview``."""
    remedy = f"start it with: {launch_line(props, flags)}"
    if flags is None:
        yield Advice("note", "Whether it has --slot-save-path cannot be seen from here; without it KV state cannot be "
                     "saved and restored (hard inject is off), and the KV layout cannot be probed.", remedy)
    elif not flags.slot_save_path:
        yield Advice("warning", "It has no --slot-save-path: KV state cannot be saved and restored (hard inject "
                     "is off).", remedy)
    elif flags.unified and flags.cache_idle_slots and flags.cache_ram_mib:
        yield Advice("warning", "KV state can be saved and restored, but whenever a request starts it empties its idle "
                     "slots: requests are not pinned, and every turn is restored from a file.", remedy)
    elif flags.cache_ram_mib:
        yield Advice("note", "KV state can be saved and restored (--slot-save-path is set). Beside that it moves KV "
                     "between slots and memory by itself, which was seen to corrupt answers that others pin slots to.",
                     remedy)
    else:
        yield Advice("ok", "KV state can be saved and restored (--slot-save-path is set).")


def launch_line(props: Mapping[str, Any], flags: ServerFlags | None = None) -> str:
    """How this server is started so that all of KVStream works: as many slots and as much context as it has."""
    slots, settings = props.get("total_slots"), props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    size = (f"-np {slots} -c {slots * context}" if isinstance(slots, int) and isinstance(context, int)
            else "-np N -c N*CONTEXT")
    folder = flags.slot_save_path if flags is not None and flags.slot_save_path else "DIR"
    return f"llama-server {size} --cache-ram 0 --slot-save-path {folder}"


def _endpoints(props: Mapping[str, Any]) -> Iterator[Advice]:
    if props.get("endpoint_slots") is False:
        yield Advice("warning", "It was started with --no-slots: after a cancelled request nobody can see when its "
                     "slot is free, so the seat stays taken for up to upstream.slot_idle_s_max.",
                     "start llama-server without --no-slots")
    if props.get("endpoint_metrics") is False:
        yield Advice("note", "It has no /metrics, so a restart can only be told by other signs.",
                     "start llama-server with --metrics")


def _batch(flags: ServerFlags | None) -> Iterator[Advice]:
    if flags is not None and flags.batch_tokens > BATCH_TOKENS_MAX:
        yield Advice("note", f"It reads prompts in batches of {flags.batch_tokens:,} tokens; while it reads one, "
                     "running streams stand still (seconds, on a CPU).",
                     f"llama-server -b {BATCH_TOKENS_MAX} keeps them flowing")


def _cache_ram(machine: Machine) -> Iterator[Advice]:
    """The prompt cache in host memory (case 55). It cannot be read from ``/props``."""
    mib = machine.flags.cache_ram_mib if machine.flags is not None else CACHE_RAM_DEFAULT_MIB
    if machine.flags is None and machine.tried.ram_cache is False:
        mib = 0  # the default is used at once where it is on
    if machine.flags is None and machine.tried.ram_cache:
        what = f"Its prompt cache is on, and takes up to {mib:,} MiB unless told otherwise"
    elif machine.flags is None:
        what = f"Its prompt cache (--cache-ram, not visible from here) takes up to {mib:,} MiB unless told otherwise"
    elif machine.flags.cache_ram_given is None:
        what = f"Its prompt cache takes up to {mib:,} MiB of memory (the default, --cache-ram is not given)"
    else:
        what = f"Its prompt cache takes up to {mib:,} MiB of memory (--cache-ram {mib})"
    if mib == 0:
        flag = " (--cache-ram 0)" if machine.flags is not None else ", as KVStream found"
        yield Advice("ok", f"The prompt cache in host memory is off{flag}.")
        return
    memory = machine.memory_bytes if machine.local else None
    if mib < 0:
        yield Advice("warning", "Its prompt cache has no limit (--cache-ram -1): it grows until memory is full.",
                     "start llama-server with --cache-ram 0; without hard inject, --cache-ram 2048 bounds it")
    elif memory is None:
        yield Advice("note", f"{what}; how much memory its machine has is not known.",
                     "start llama-server with --cache-ram 0; without hard inject, a smaller --cache-ram MIB does")
    elif mib * MIB > memory * CACHE_RAM_SHARE_MAX:
        share = mib * MIB / memory
        fits = max(256, int(memory * CACHE_RAM_SUGGESTED_SHARE / MIB) // 256 * 256)
        yield Advice("warning", f"{what}: {share:.0%} of the {memory / GIB:.1f} GiB of this machine, beside the model.",
                     f"start llama-server with --cache-ram 0; without hard inject, --cache-ram {fits} does")
    else:
        yield Advice("ok", f"{what}, which this machine's {memory / GIB:.1f} GiB can bear.")


# --- others -----------------------------------------------------------------------------------------------------------


def _ollama(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    parallel = (machine.ollama or {}).get("OLLAMA_NUM_PARALLEL")
    if machine.ollama is not None and parallel is None:
        yield Advice("warning", "OLLAMA_NUM_PARALLEL is not set, so Ollama runs one request at a time.",
                     "start Ollama with OLLAMA_NUM_PARALLEL=4 and set backend.seats = 4")
    elif parallel is not None:
        yield Advice("ok", f"OLLAMA_NUM_PARALLEL is {parallel}.",
                     f"set backend.seats = {parallel}, Ollama does not tell it")
    else:
        yield Advice("note", "Ollama does not tell how many requests it runs at once (OLLAMA_NUM_PARALLEL, 1 by "
                     "default).",
                     "start Ollama with OLLAMA_NUM_PARALLEL=4 and set backend.seats to the same number")
    loaded = [row for row in models_of("ollama", replies) if row.state == "loaded"]
    for row in loaded:
        context = f"{row.context:,} tokens of context" if row.context else "an unknown context"
        yield Advice("ok", f"{row.name} is loaded with {context}.")
        if row.context is not None and row.context <= CONTEXT_SMALL:
            yield Advice("warning", f"Ollama cuts prompts over {row.context:,} tokens without a word.",
                         "start Ollama with OLLAMA_CONTEXT_LENGTH=16384")
    if not loaded:
        yield Advice("note", "No model is loaded; the first request loads one.",
                     "set OLLAMA_KEEP_ALIVE to keep it loaded longer than 5 minutes")
    yield Advice("note", "A change of num_ctx, num_batch or num_gpu between two requests makes Ollama load the "
                 "model anew.",
                 "let all clients send the same options, or none")


def _lmstudio(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    models = rows_of(replies.get("/api/v1/models"), "models")
    if models is None:
        yield Advice("note", "This LM Studio is older than 0.4 and does not tell how many requests run at once.",
                     "update LM Studio, or set backend.seats")
        models = []
    for name, config in [(str(row.get("key")), config) for row in models for config in instances_of(row)]:
        parallel, context = config.get("parallel"), config.get("context_length")
        yield Advice("ok", f"{name} is loaded: {parallel or 'an unknown number of'} requests at once, "
                     f"{context or 'an unknown number of'} tokens of context.",
                     f"set backend.seats = {parallel}" if parallel else "")
        if isinstance(context, int) and context <= CONTEXT_SMALL:
            yield Advice("warning", f"{name} was loaded with {context:,} tokens of context; longer prompts fail, in "
                         "streams without an error.", "load it with a larger context length")
    if not any(row.state == "loaded" for row in models_of("lmstudio", replies)):
        yield Advice("note", "No model is loaded; the first request loads one (JIT), which takes a while.",
                     "load a model: lms load NAME")


def _foundry(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    loaded = [row.name for row in models_of(identity.kind, replies) if row.state == "loaded"]
    if loaded:
        yield Advice("ok", f"Loaded: {', '.join(loaded)}.")
    else:
        yield Advice("problem", "No model is loaded, and Foundry Local loads none on demand.",
                     "foundry model load NAME (names: foundry model list)")
    yield Advice("note", "Foundry Local takes a new port at every start, and runs all requests at once, each slower.",
                 "set backend.base_url to what `foundry service status` says, and backend.seats = 2")


def _vllm(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    metrics = replies.get("/metrics")
    if metrics is not None and metrics.status == 200 and b"vllm:cache_config_info" in metrics.body:
        yield Advice("ok", "Its KV pool is told by /metrics.")
    else:
        yield Advice("note", "/metrics does not tell its KV pool.",
                     "set memory.num_gpu_blocks, or let /metrics through")
    yield Advice("note", "vLLM does not tell --max-num-seqs.", "set backend.seats to it (KVStream assumes 256)")
    yield Advice("note", "Cached tokens are only reported with --enable-prompt-tokens-details.",
                 "start vLLM with --enable-prompt-tokens-details")


def _openai(identity: Identity, replies: Replies, machine: Machine) -> Iterator[Advice]:
    yield Advice("note", "It does not tell how many requests it runs at once, nor its context.",
                 "set backend.seats and backend.context_tokens")


def _object(replies: Replies, path: str) -> Mapping[str, Any]:
    reply = replies.get(path)
    data = reply.json() if reply is not None and reply.status == 200 else None
    return data if isinstance(data, dict) else {}

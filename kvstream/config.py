"""The configuration: a frozen tree of sections, every key with its meaning, unit and bounds beside its default.

Where a value may come from, the first that is given wins: command-line flag, environment (``KVSTREAM_SECTION__KEY``),
file (``kvstream.toml`` in the working directory, or ``--config PATH``), the default written here. Reading, merging and
checking are in ``config_load``; what a key is, in ``config_keys``.

Units and qualifiers come last in a name (``stall_s``, ``body_bytes_max``), except in the keys kept from KVStream 0.1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_type_hints

import attrs
from attrs import frozen

from .config_inject import InjectConfig
from .config_keys import (
    Key,
    alias_lines,
    header_safe,
    host_name,
    host_names,
    http_url,
    key,
    lane_name,
    model_names,
    origins,
    power_of_two,
    secrets_safe,
    zero_or_batch,
)
from .config_reuse import CoalesceConfig, PrefixCacheConfig, PrefixConfig, ResponseCacheConfig

BackendType = Literal["llamacpp", "ollama", "openai"]
KvLayout = Literal["auto", "split", "unified"]
KvType = Literal["float32", "float16", "bfloat16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

# Where a kind of runtime listens when nobody says otherwise. llama-server's own default is 8080, which is ours; the
# README starts it on 8081. An OpenAI-compatible server can be anywhere, so it has no default.
BACKEND_URLS: Mapping[str, str] = MappingProxyType({
    "llamacpp": "http://127.0.0.1:8081", "ollama": "http://127.0.0.1:11434"})


@frozen
class ServerConfig:
    """Where KVStream listens and what it grants a client."""

    host: str = key("127.0.0.1", "Address to listen on. Without [auth] keys keep it on loopback: whoever reaches it "
                                 "may use it.", check=host_name)
    port: int = key(8080, "Port to listen on; 0 takes a free one.", high=65535)
    keepalive_s: float = key(15.0, "Send an SSE comment after this long without output; 0 = never.", unit="seconds")
    drain_s: float = key(30.0, "After SIGTERM, let running streams go on for this long.", unit="seconds")
    drain_queued: Literal["refuse", "finish"] = key(
        "refuse", "After SIGTERM, what becomes of requests that still wait.")
    body_bytes_max: int = key(64 * 2**20, "Largest request body.", unit="bytes", low=1024)
    header_bytes_max: int = key(64 * 2**10, "Largest request head (line and headers).", unit="bytes", low=1024)
    connections_max: int = key(1024, "Most open client connections.", unit="connections", low=1, high=1_000_000)
    audio_max: int = key(2, "Most transcriptions at once; others wait up to scheduler.max_wait_s.", unit="requests",
                         low=1, high=1024)
    stall_s: float = key(30.0, "End a stream whose client reads nothing for this long.", unit="seconds", low=0.001)
    stream_buffer_bytes: int = key(2**20, "Most bytes kept for a client that reads slowly, per stream.", unit="bytes",
                                   low=1024)
    allowed_hosts: tuple[str, ...] = key(
        (), "More names to accept in the Host header (others are refused: DNS rebinding). While empty, an address "
            "that is not loopback accepts any.", check=host_names)
    half_close: Literal["tolerate", "disconnect"] = key(
        "tolerate", "What it means when a client shuts down its sending side: it still reads, or it is gone.")
    cors_origins: tuple[str, ...] = key(
        (), 'Origins whose web pages may call KVStream, exactly as a browser sends them: "https://chat.example". '
            '"*" lets every web page in; only without [auth].', check=origins)
    public_metrics: bool = key(False, "Show /metrics and /status to anybody, also on an address that is not loopback.")
    reload: Literal["auto", "sighup", "off"] = key(
        "auto", "When to read this file again: on SIGHUP and when it changes, on SIGHUP only, or never.")


@frozen
class AuthConfig:
    """Who may use KVStream. Off unless keys_file or keys is set; then all but /health and /ready needs a key."""

    keys_file: str = key("", "Path of a TOML file with one [[key]] per client: name, key (or sha256, its digest in "
                             "hex), and if wanted priority (high, normal, low), share (weight in the fair share of "
                             "seats) and rate (requests per minute, 0 = no limit).")
    keys: tuple[str, ...] = key((), "Keys without a file; each is a client of its own, with default rights.",
                                secret=True, check=secrets_safe)
    metrics_token: str = key("", "A key that opens /metrics and /status and nothing else, for Prometheus.",
                             secret=True, check=header_safe)

    @property
    def enabled(self) -> bool:
        """Whether clients need a key."""
        return bool(self.keys_file or self.keys)


@frozen
class BackendConfig:
    """The model runtime behind KVStream. For several, a [[backend]] table each, with these keys."""

    type: BackendType = key("llamacpp", "Kind of runtime; openai is any OpenAI-compatible server.")
    base_url: str = key("", "Where it listens. Empty: http://127.0.0.1:8081 for llamacpp, :11434 for ollama; "
                                 "openai needs one.",
                        check=http_url)
    model: str = key("", "Model to ask for when a client names none. Empty: the runtime's own.")
    api_key: str = key("", "Key sent to the runtime as a bearer token.", secret=True, check=header_safe)
    seats: int = key(0, "Most requests in the runtime at once; 0 = ask the runtime.", unit="requests", high=65536)
    context_tokens: int = key(0, "Longest prompt + answer of one request; 0 = ask the runtime.", unit="tokens")
    group_by_load_key: bool = key(
        False, "With ollama: requests whose options would make it load the model anew (num_ctx and the like) are "
               "another group; one group is served at a time, as with scheduler.exclusive_models.")
    kv: KvLayout = key("auto", "How the runtime lays out its KV memory: one context per slot (split) or one pool for "
                               "all (unified). auto = find out.")
    name: str = key("", "What to call it in /status, logs and metrics. Empty: its type.", check=lane_name)
    models: tuple[str, ...] = key((), "Models it serves. Empty: those that its /v1/models lists.", check=model_names)
    aliases: tuple[str, ...] = key((), 'More names for its models, each as "alias=model".', check=alias_lines)
    rewrite_model: bool = key(True, "When a client used an alias, put it back into the answer's model field.")

    @property
    def url(self) -> str:
        """The address to call, without a trailing slash; empty when an openai backend has none."""
        return (self.base_url or BACKEND_URLS.get(self.type, "")).rstrip("/")

    @property
    def alias_table(self) -> Mapping[str, str]:
        """Alias -> model."""
        return MappingProxyType({alias: model for alias, _, model in (line.partition("=") for line in self.aliases)})


@frozen
class UpstreamConfig:
    """How KVStream talks to the runtime."""

    connect_s: float = key(5.0, "Time to connect.", unit="seconds", low=0.001)
    first_event_s: float = key(600.0, "Wait for the first event of an answer (prefill).", unit="seconds", low=0.001)
    stall_s: float = key(120.0, "Longest gap between two data events of an answer.", unit="seconds", low=0.001)
    total_s: float = key(0.0, "Longest answer from grant to end; 0 = no limit.", unit="seconds")
    load_timeout_s: float = key(600.0, "How long a request waits for a runtime that loads its model.", unit="seconds")
    keepalive_expiry_s: float = key(3.0, "Close an idle pooled connection after this long (llama.cpp drops it at 5 s).",
                                    unit="seconds")
    non_stream: Literal["assemble", "pass"] = key(
        "assemble", "A client that does not stream: stream from the runtime and assemble (a closed socket then frees "
                    "the runtime), or pass the call on as it is.")
    include_usage: bool = key(True, "Ask the runtime for token counts on streams (removed if the client did not).")
    event_bytes_max: int = key(8 * 2**20, "Largest single event of a stream.", unit="bytes", low=1024)
    answer_bytes_max: int = key(64 * 2**20, "Largest assembled non-stream answer.", unit="bytes", low=1024)
    forward_authorization: bool = key(True, "Pass the client's Authorization header on when backend.api_key is empty.")
    health_interval_s: float = key(2.0, "Time between two health checks of the runtime.", unit="seconds", low=0.01)
    slot_idle_poll_s: float = key(0.05, "After a cancel, time between two looks whether the slot is idle; 1.25 s at "
                                  "least while it reads a prompt (more would keep llama.cpp from noticing).",
                                  unit="seconds", low=0.001)
    slot_idle_s_max: float = key(30.0, "After a cancel, count the slot as busy for at most this long.", unit="seconds")
    wedged_s: float = key(90.0, "So long without a token, or a prompt that is still being read, while requests run: "
                          "the runtime hangs. End them, let the queue wait, try it later; 0 = never.", unit="seconds")
    busy_retry_s_max: float = key(30.0, "Ask a runtime that says it is busy (503) again for at most this long, while "
                                  "nothing was answered; 0 = pass the 503 on.", unit="seconds")
    down_grace_s: float = key(10.0, "A runtime that was there and is gone is waited for this long by new requests too "
                              "(those that waited already wait on); then they are refused at once.", unit="seconds")
    breaker_faults: int = key(5, "After so many faults of the runtime in a row (its 5xx, time-outs, broken connections "
                              "and streams) send it nothing for a while; 0 = go on regardless.", unit="requests",
                              high=1000)
    breaker_open_s: float = key(5.0, "How long that while is; doubled up to 60 s each time a trial request fails.",
                                unit="seconds", low=0.01)
    count_timeout_s: float = key(5.0, "Time to count a prompt's tokens at the runtime before estimating.",
                                 unit="seconds", low=0.001)


@frozen
class MemoryConfig:
    """The KV pages."""

    num_gpu_blocks: int | Literal["auto"] = key(
        "auto", 'Device pages. "auto" = what the runtime has; a number lowers it.', unit="pages", low=1)
    num_cpu_blocks: int = key(8192, "Host pages: the tier that swapped-out requests and cached prefixes may use.",
                              unit="pages")
    block_size: int = key(16, "Tokens per page, a power of two.", unit="tokens", low=1, high=1024, check=power_of_two)
    dtype: KvType = key("float16", "KV type: an embedded server is started with it; of other runtimes it is a "
                                    "statement, shown in /status.")
    watermark: float = key(0.01, "Share of the device pages kept free for answers that grow.", unit="fraction",
                           high=0.5)


@frozen
class SchedulerConfig:
    """Who runs and who waits."""

    max_batch_size: int = key(16, "Most requests running at once (never more than the runtime has seats).",
                              unit="requests", low=1, high=65536)
    preemption_policy: Literal["swap", "recompute", "off"] = key(
        "swap", "How a victim gives way: save its KV, drop and redo it, or never. Only where the runtime can restore.")
    preemptions_max: int = key(
        3, "How often one request gives way at most; then it runs to its end.", unit="times", low=0, high=1000)
    priority: Literal["fcfs", "sjf"] = key("fcfs", "Order of the queue: first come, or least predicted work first.")
    max_queue: int = key(1000, "Most waiting requests; more get 429.", unit="requests", high=1_000_000)
    max_queue_bytes: int = key(256 * 2**20, "Most bytes of waiting request bodies; more get 429.", unit="bytes")
    max_wait_s: float = key(120.0, "Longest wait in the queue; then 503.", unit="seconds", low=0.001)
    ageing_s: float = key(30.0, "With sjf, after this long a request counts as urgent as the shortest.",
                          unit="seconds", low=0.001)
    answer_tokens_default: int = key(512, "Answer length to reserve for a request that sets no limit.", unit="tokens",
                                     low=1)
    backfill: bool = key(True, "Let smaller requests pass a head that does not fit, unless that delays its start.")
    client_seats_max: int = key(0, "Most requests of one client running at once; 0 = no bound. Requests without a key "
                                   "are one client.", unit="requests", high=65536)
    long_prefills_max: int = key(1, "Most long prompts that are read at once, so that running streams keep flowing; "
                                    "0 = no bound.", unit="requests", high=65536)
    long_prefill_tokens: int = key(1024, "A prompt is long if more tokens of it than this are not cached.",
                                   unit="tokens")
    leader_tokens: int = key(512, "Wait for a request that computes at least this much of the same prefix, or for a "
                                  "cancelled one's slot that holds it; 0 = never.", unit="tokens")
    shed: bool = key(True, "Refuse a request at once (503, Retry-After) that would wait longer than max_wait_s.")
    shed_probe_every: int = key(16, "Let every so-many-th of those wait all the same.", unit="requests", low=1)
    cold_after_s: float = key(300.0, "A runtime that loads on demand gets one request for a model alone at first, and "
                                     "again if that model was not used for this long.", unit="seconds", low=0.001)
    exclusive_models: bool = key(False, "Serve one model at a time, where a second one would push the first out.")
    switch_wait_s: float = key(10.0, "With exclusive_models, how long requests of the model in use may pass one of "
                                     "another.", unit="seconds")


@frozen
class AttentionConfig:
    """The native engine's attention."""

    backend: Literal["naive"] = key("naive", "Kernel family of the native engine (not used by the proxy).")


@frozen
class EmbeddedConfig:
    """A llama.cpp server that KVStream starts and supervises itself."""

    model: str = key("", "Path of a GGUF file, from the folder where KVStream is started. Empty: no embedded "
                       "server.")
    llama_server: str = key("", "Path of llama-server. Empty: the one on PATH, else the xllamacpp wheel.")
    slots: int = key(4, "Slots of the server, each with its own context.", unit="requests", low=1, high=256)
    context_tokens: int = key(4096, "Context of each slot.", unit="tokens", low=64)
    batch_tokens: int = key(0, "Prompt tokens per batch; smaller keeps running streams flowing. 0 = 128 where only the "
                               "CPU computes, else 512.", unit="tokens", check=zero_or_batch)
    threads: int = key(0, "CPU threads; 0 = let the server choose.", unit="threads", high=4096)
    state_dir: str = key("", "Where logs and saved slots go. Empty: kvstream in the XDG state directory.")
    load_timeout_s: float = key(600.0, "Longest wait for the model to load.", unit="seconds", low=0.001)
    restart_backoff_s_max: float = key(30.0, "Longest pause before a dead server is started again.", unit="seconds",
                                       low=0.001)
    extra_args: tuple[str, ...] = key((), "More arguments for llama-server (not for the wheel).")


@frozen
class CompatConfig:
    """Repairs of answers that a client cannot read. Off: every frame travels byte for byte."""

    normalize_tool_calls: bool = key(
        False, "Number tool calls from 0, tell each id once, and end with tool_calls an answer that called.")
    reasoning_field: Literal["pass", "reasoning_content", "reasoning"] = key(
        "pass", "Name of the reasoning text in chat answers; pass = as the runtime calls it.")
    keepalive_mode: Literal["comment", "empty-delta", "off"] = key(
        "comment", "What server.keepalive_s sends: an SSE comment, a chunk that adds nothing (for clients that time "
                   "the gap between chunks), or nothing.")


@frozen
class LoggingConfig:
    """What KVStream writes to stderr."""

    level: LogLevel = key("INFO", "Least severe level that is written.")
    format: Literal["text", "json"] = key("text", "One line per event, for people or for machines.")


@frozen
class Config:
    """The whole configuration. ``Config()`` holds every default; ``attrs.evolve`` makes variants.

    ``backend`` is the first backend and ``more_backends`` are those after it; with ``embedded.model`` the first is the
    embedded server. :attr:`backends` has them all.
    """

    server: ServerConfig = ServerConfig()
    auth: AuthConfig = AuthConfig()
    backend: BackendConfig = BackendConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    coalesce: CoalesceConfig = CoalesceConfig()
    response_cache: ResponseCacheConfig = ResponseCacheConfig()
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    prefix: PrefixConfig = PrefixConfig()
    inject: InjectConfig = InjectConfig()
    attention: AttentionConfig = AttentionConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    compat: CompatConfig = CompatConfig()
    logging: LoggingConfig = LoggingConfig()
    more_backends: tuple[BackendConfig, ...] = ()

    @property
    def backends(self) -> tuple[BackendConfig, ...]:
        """Every backend in the order of the configuration, each with a name of its own."""
        given = (self.backend, *self.more_backends)
        taken = {backend.name for backend in given}
        named = []
        for index, backend in enumerate(given):
            name = backend.name
            if not name:
                base = "embedded" if self.embedded.model and index == 0 else backend.type
                name = next(n for n in (base, *(f"{base}-{i}" for i in range(2, len(given) + 2))) if n not in taken)
                taken.add(name)
            named.append(attrs.evolve(backend, name=name))
        return tuple(named)

    def of_backend(self, backend: BackendConfig) -> Config:
        """This configuration with ``backend`` as its only one: what the lane of that backend is made from."""
        return attrs.evolve(self, backend=backend, more_backends=())

    def get(self, path: str) -> object:
        """The value at ``section.key``."""
        section, _, name = path.partition(".")
        value: object = getattr(getattr(self, section), name)
        return value


@frozen
class Loaded:
    """A configuration and where each of its values came from.

    ``origins`` maps ``section.key`` to ``default``, the file's path, ``env NAME`` or ``flag --name``; where there are
    several, the keys of the n-th ``[[backend]]`` are ``backend[n].key``. ``path`` is the file that was read, None when
    there was none. ``again`` reads the same sources once more (*Errors*: as ``load_config``); None if made in code.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None = None
    again: Callable[[], Loaded] | None = attrs.field(default=None, repr=False, eq=False)

    @classmethod
    def of(cls, config: Config) -> Loaded:
        """Wrap a configuration made in code."""
        return cls(config, MappingProxyType({about.path: "code" for about in KEYS}))


SECTION_TYPES: Mapping[str, Any] = MappingProxyType(
    {name: kind for name, kind in get_type_hints(Config).items() if attrs.has(kind)})
SECTIONS: tuple[str, ...] = tuple(SECTION_TYPES)


def _keys() -> tuple[Key, ...]:
    """Every key in the order of the tree, its names, type and choices read off the tree."""
    found = []
    for section, section_type in SECTION_TYPES.items():
        hints = get_type_hints(section_type)
        for attribute in attrs.fields(section_type):
            kind = hints[attribute.name]
            words = tuple(word for word in get_args(kind) if isinstance(word, str))
            # A union such as int | "auto" is checked by its type; the words alone are not the choices.
            choices = words if words and len(words) == len(get_args(kind)) else ()
            found.append(attrs.evolve(attribute.metadata["key"], section=section, name=attribute.name, type=kind,
                                      choices=choices))
    return tuple(found)


KEYS: tuple[Key, ...] = _keys()
KEYS_BY_PATH: Mapping[str, Key] = MappingProxyType({about.path: about for about in KEYS})


def load_config(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    flag_names: Mapping[str, str] | None = None,
    *,
    together: bool = True,
) -> Loaded:
    """Read, merge and check the configuration.

    ``path`` names a TOML file that must exist; without it ``kvstream.toml`` of the working directory is read if it is
    there. ``env`` defaults to ``os.environ``. ``flags`` maps ``section.key`` to a value that was really given on the
    command line, ``flag_names`` the same paths to how the flag is spelt, for messages. Without ``together`` a half of a
    configuration will do, whose other half is in the flags of another process.

    *Errors*: :class:`~kvstream.errors.ConfigError` with every problem of every source, each with its path.
    """
    from .config_load import load

    return load(path, os.environ if env is None else env, flags or {}, flag_names or {}, together=together)

"""The knobs of the fake runtime: one value for the runtime as a whole, one per scripted request."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import trio
from attrs import define, field, frozen

from .journal import FakeRequest

End = Literal[
    "done",  # finish chunk, [DONE], proper end of the body
    "eof_no_done",  # finish chunk, then a proper end of the body
    "eof_no_finish",  # neither, but a proper end of the body
    "done_no_finish",  # [DONE] without any finish_reason
    "error_event",  # data: {"error": ...}, then a proper end of the body
    "cut",  # the connection is closed in the middle of the body (FIN, no last chunk)
    "rst",  # the connection is reset
    "keep_open_after_done",  # everything was sent, but the body does not end until the client leaves
    "truncated_length",  # Content-Length promises more than is sent, then FIN
]


@frozen
class Script:
    """What happens to one request. Everything left out happens as the runtime would do it by itself.

    Delays in seconds. ``headers_after`` counts from the start of the slot, ``first_byte_after`` from the headers,
    ``itl`` between tokens; with one of them set the request is paced by the script instead of the step loop (it still
    occupies a slot and cells; what is left out follows the runtime's rates). ``script`` replaces the body by raw
    writes ``(delay, bytes)``. ``tokens`` ends the generation after so many tokens and then ``end`` happens.
    ``hang_at_token`` stops producing after k tokens while the connection stays, with ``goes_on`` until that is set: an
    answer is then under way for as long as a test needs it, on a slow machine too. What is raw, or has no slot, begins
    with ``goes_on``. ``refuse`` resets before any answer.
    ``slot=False`` answers at once, without a slot, and so does a ``status`` other than 200. ``chunk_tokens`` packs
    several tokens into one chunk. ``noise`` is written before every token chunk (pings).
    """

    headers_after: float = 0.0
    first_byte_after: float | None = None
    itl: float | None = None
    script: Sequence[tuple[float, bytes]] | None = None
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    end: End = "done"
    tokens: int | None = None
    hang_at_token: int | None = None
    goes_on: trio.Event | None = None
    refuse: bool = False
    slot: bool = True
    busy_after_close: float | None = None
    chunk_tokens: int = 1
    noise: bytes = b""

    @property
    def paced(self) -> bool:
        return bool(self.headers_after) or self.first_byte_after is not None or self.itl is not None or (
            self.goes_on is not None)


@define
class Rule:
    """A script and whom it is for. ``times`` None means every match."""

    script: Script
    when: Callable[[FakeRequest], bool] | None = None
    path: str | None = None
    times: int | None = 1

    def matches(self, request: FakeRequest, inference: bool) -> bool:
        if self.times == 0 or (self.path is None and not inference and self.when is None):
            return False
        return (self.path is None or self.path == request.path) and (self.when is None or self.when(request))


@define
class RuntimeConfig:
    """The runtime as a whole. Attributes may be changed while it runs.

    ``n_ctx`` is the whole pool, as in llama.cpp's ``-c``: with ``unified`` every slot may use all of it, otherwise each
    owns ``n_ctx // slots``. Rates are tokens per second; a decode step costs ``1 / decode_rate`` whatever the number of
    decoding slots. ``shared_step``: one loop for all slots, so a prefill batch of ``n_batch`` tokens delays everyone.
    ``repeats``: an answer begins with its own prompt, or mixed up, with the one that came before it.
    ``answer_tokens`` is where the model says "stop" by itself (None: never, it runs to the limit).
    ``busy_after_close``: a cancelled request keeps its slot "processing" for so many seconds.
    ``deaf``: which clients' leaving goes unnoticed: the ``nonstream`` ones (llama.cpp), ``none`` or ``all``.
    ``usage_style``: where a stream reports usage when asked: ``chunk`` (its own), ``finish`` (on the last), ``none``.
    ``load_s``: seconds after the start during which everything but nothing else answers 503 "Loading model".
    ``cold_load_s``: the model is loaded by the first request, as Ollama does; ``FakeRuntime.loads`` counts.
    ``one_model``: memory for one only; a request for another kills what runs (``evicted``) and loads (``swaps``).
    ``ends_every``: the model also ends where its state, a function of all tokens so far, divides by it: so a continued
    answer ends where it would have (with ``answer_tokens=None``).

    Slots, as llama.cpp's flags have them. ``cache_ram``: the host prompt cache is on, with the dangers of it; then
    ``cache_idle_slots`` (None: if ``unified``) empties idle slots into it when any request starts. ``sleep_idle_s``:
    idle for so long, the model is put away with all KV, until the next request or GET /slots, which take ``wake_s``.
    ``router``: no model of its own; one child per model (``models``, at most ``models_max`` at once), each with slots.
    ``mmproj``: it reads images, and saving answers 501 for slots that hold some (``media``) or for all (``all``).
    ``slots_dir``: slot files are real files there, of llama.cpp's format as far as the token ids and zeros from there
    to the right size; without it they are in ``FakeRuntime.files``. ``cell_bytes`` is that of one token, ``disk_bytes``
    what all files may take before a save fails half way. A save takes ``save_s``, a restore ``restore_s``; meanwhile
    nothing else moves. ``restore_mode``: ``noop_200`` restores to no effect what has more than ``window`` tokens (a
    model with a sliding window restores what fits into it).
    """

    dialect: Literal["llamacpp", "openai", "ollama"] = "llamacpp"
    slots: int = 4
    n_ctx: int = 16384
    unified: bool = False
    n_batch: int = 2048
    prefill_rate: float = 5000.0
    decode_rate: float = 100.0
    shared_step: bool = True
    cache_model: bool = True
    repeats: Literal["", "own", "other"] = ""
    answer_tokens: int | None = 16
    ends_every: int = 0
    model: str = "fake-model"
    model_path: str = ""  # of its file; empty: one that is not there
    build: str = "b0-fake"
    load_s: float = 0.0
    cold_load_s: float = 0.0
    one_model: bool = False
    busy_after_close: float = 0.0
    deaf: Literal["nonstream", "none", "all"] = "nonstream"
    usage_style: Literal["chunk", "finish", "none"] = "chunk"
    refuse_stream_options: bool = False
    cached_reported: bool = True
    metrics: bool = True
    tokenizer: bool = True
    embeddings: bool = False
    api_key: str = ""
    # faults of the whole runtime
    refuse: bool = False
    health_status: int = 200
    health_hang: bool = False
    slots_hang: bool = False
    # openai dialect
    max_model_len: int | None = None
    block_size: int = 16
    gpu_blocks: int | None = None
    # ollama dialect: `slots` is OLLAMA_NUM_PARALLEL, `n_ctx // slots` the default num_ctx, `cold_load_s` a load
    models: tuple[str, ...] = ()  # besides `model`
    models_max: int = 1  # in memory at once
    load_queue_max: int = 512
    keep_alive_s: float = 300.0
    heads_per_layer: bool = False
    # slots and their files
    slot_prompt_similarity: float = 0.1
    cache_ram: bool = False
    cache_idle_slots: bool | None = None
    sleep_idle_s: float | None = None
    wake_s: float = 0.0
    router: bool = False
    mmproj: Literal["", "media", "all"] = ""
    slot_save: bool = True
    slots_dir: str = ""
    cell_bytes: int = 23056  # SmolLM2-135M: 23 040 bytes of KV and 16 of bookkeeping
    disk_bytes: float = math.inf
    restore_mode: Literal["real", "noop_200", "501", "400_version", "400_size"] = "real"
    window: int = 0
    restore_s: float = 0.0
    save_s: float = 0.0
    # TCP front
    keepalive_close_s: float = 5.0
    close_after_requests: int = 100
    close_after_stream: bool = True
    notice_close: Literal["read", "write"] = "read"
    body_bytes_max: float = field(default=math.inf)

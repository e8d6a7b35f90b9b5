"""One inference request of the fake runtime, from the body to the last byte.

A streamed answer holds back its headers until a slot starts it, so the client sees the runtime's hidden queue as time
to headers; an error found before that is a plain HTTP error (both as llama.cpp does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from . import apis as A
from . import tokens as T
from . import wire as W
from .engine import Job
from .front import Wire
from .journal import Entry, FakeRequest
from .script import Script

if TYPE_CHECKING:
    from .runtime import FakeRuntime

SSE = (("X-Accel-Buffering", "no"), ("Content-Type", "text/event-stream"))
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
JSON = (("Content-Type", "application/json; charset=utf-8"),)


async def answer(rt: FakeRuntime, r: FakeRequest, wire: Wire, entry: Entry, script: Script | None) -> None:
    """Answer ``r``; whatever ends it, its jobs give their slots back."""
    s = script if script is not None else Script()
    if s.refuse:
        await rt.end(wire, entry, "refused")
        return
    if not entry.inference or not s.slot or s.status != 200:
        await _raw(rt, wire, entry, s)
        return
    try:
        jobs, shapes, ask = _prepare(rt, r, s)
    except Refused as exc:
        entry.outcome = "refused"
        await rt.reply(wire, entry, exc.status, exc.value)
        return
    for job in jobs:
        rt.engine.submit(job)
    entry.task, entry.jobs = jobs[0].task, jobs
    try:
        await _serve(rt, wire, entry, s, jobs, shapes, ask)
    finally:
        for job in jobs:
            rt.engine.cancel(job)
        entry.tokens_out = sum(job.generated for job in jobs)
        # the slot may be released later than this request ends: let the journal tell when
        if rt._nursery is not None:
            rt._nursery.start_soon(_note_release, rt, entry, jobs)


async def _note_release(rt: FakeRuntime, entry: Entry, jobs: list[Job]) -> None:
    for job in jobs:
        await job.released.wait()
        slot = job.slot
        if slot is not None and slot.job is None and slot.busy_until is not None:
            await trio.sleep_until(slot.busy_until)
    entry.released_at = trio.current_time()
    rt.journal.touch()


# --- reading the request ---


class Refused(Exception):
    def __init__(self, status: int, value: Any) -> None:
        super().__init__(status)
        self.status, self.value = status, value


class Ask:
    """What the client asked for, besides the tokens."""

    def __init__(self, body: dict[str, Any]) -> None:
        options = body.get("stream_options")
        self.stream = bool(body.get("stream"))
        self.usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self.progress = bool(body.get("return_progress"))


def _bad(rt: FakeRuntime, message: str) -> Refused:
    if rt.config.dialect == "openai":
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return Refused(400, {"error": error})
    return Refused(400, W.error(400, message, "invalid_request_error"))


def _prepare(rt: FakeRuntime, r: FakeRequest, s: Script) -> tuple[list[Job], W.Shapes, Ask]:
    body, c = r.json, rt.config
    if not isinstance(body, dict):
        raise _bad(rt, "[json.exception.parse_error.101] parse error at line 1, column 1: syntax error")
    chat = r.path.endswith("/chat/completions")
    if r.path in A.READ_ONLY and not c.embeddings:
        what, flag = ("reranking", "reranking") if "rank" in r.path else ("embeddings", "embeddings")
        raise Refused(501, W.error(
            501, f"This server does not support {what}. Start it with `--{flag}`", "not_supported_error"))
    if c.refuse_stream_options and "stream_options" in body:
        raise _bad(rt, "Unknown parameter: 'stream_options'.")
    try:
        prompts = _prompts(rt, r.path, body, chat)
    except (TypeError, AttributeError, KeyError) as nonsense:
        raise _bad(rt, f"[json.exception.type_error] {nonsense}") from nonsense
    n = body.get("n", 1) if chat else 1
    if not isinstance(n, int) or not 1 <= n <= c.slots:
        raise _bad(rt, f"Field 'n': Value must be between 1 <= value <= {c.slots}, but got {n}")
    jobs = []
    for index, prompt in enumerate(prompts * n):
        _check_length(rt, len(prompt))
        jobs.append(_job(rt, {**body, "n_predict": 1} if r.path in A.READ_ONLY else body, s, index, prompt))
        jobs[-1].says = rt.repeated(prompt)
    shapes = _shapes(rt, r.path, jobs, chat)
    shapes.return_tokens = body.get("return_tokens") is True
    return jobs, shapes, Ask(body)


def _shapes(rt: FakeRuntime, path: str, jobs: list[Job], chat: bool) -> W.Shapes:
    if path in A.READ_ONLY:
        read = A.ReadShapes(rt.config, jobs, chat=False)
        read.path = path
        return read
    if path == A.MESSAGES:
        return A.MessagesShapes(rt.config, jobs, chat=True)
    if path in A.RESPONSES:
        return A.ResponsesShapes(rt.config, jobs, chat=True)
    return W.Shapes(rt.config, jobs, chat=chat, native=path in ("/completion", "/completions", A.INFILL))


def _prompts(rt: FakeRuntime, path: str, body: dict[str, Any], chat: bool) -> list[list[int]]:
    if path in A.READ_ONLY:
        return [rt.tokenizer.encode(text) for text in A.documents_of(path, body)] or [[0]]
    if path == A.MESSAGES or path in A.RESPONSES:
        if path in A.RESPONSES and "input" not in body:
            raise _bad(rt, "'input' is required")
        return [rt.tokenizer.encode(T.apply_template(A.turns_of(path, body)))]
    if path == A.INFILL:
        return [rt.tokenizer.encode("".join(str(body.get(k, "")) for k in ("input_prefix", "prompt", "input_suffix")))]
    if chat:
        if "messages" not in body:
            raise _bad(rt, "'messages' is required")
        if not isinstance(body["messages"], list):
            raise _bad(rt, "Expected 'messages' to be an array")
        return [rt.tokenizer.encode(T.apply_template(body["messages"]))]
    prompt = body.get("prompt", "")
    if isinstance(prompt, list) and all(isinstance(part, int) for part in prompt) and prompt:
        return [list(prompt)]
    parts = prompt if isinstance(prompt, list) else [prompt]
    if not parts:
        raise _bad(rt, '"prompt" must not be empty')
    return [list(part) if isinstance(part, list) else rt.tokenizer.encode(str(part)) for part in parts]


def _check_length(rt: FakeRuntime, tokens: int) -> None:
    c, n_ctx = rt.config, rt.engine.slots[0].n_ctx
    if c.dialect == "openai":
        limit = c.max_model_len if c.max_model_len is not None else c.n_ctx
        if tokens >= limit:
            text = f"This model's maximum context length is {limit} tokens. However, your request has {tokens}."
            raise _bad(rt, text)
    elif tokens >= n_ctx:
        raise Refused(400, W.too_long(tokens, n_ctx))


def _job(rt: FakeRuntime, body: dict[str, Any], s: Script, index: int, prompt: list[int]) -> Job:
    c = rt.config
    limit = next((body[k] for k in LIMITS if body.get(k) is not None), -1)
    limit = max(1, limit) if isinstance(limit, int) and limit >= 0 else 10**9
    stop_at = None if body.get("ignore_eos") else c.answer_tokens
    if s.tokens is not None:
        stop_at = s.tokens
    slot = body.get("id_slot")
    return Job(
        prompt, limit, index, slot if isinstance(slot, int) and slot != -1 else None, stop_at, s.hang_at_token,
        paced=s.paced or s.script is not None, cache_prompt=body.get("cache_prompt", True) is not False,
        media=T.has_media(body.get("messages")), eos=not body.get("ignore_eos") and s.tokens is None,
        busy_after_close=c.busy_after_close if s.busy_after_close is None else s.busy_after_close,
    )  # fmt: skip


# --- writing the answer ---


async def _serve(
    rt: FakeRuntime, wire: Wire, entry: Entry, s: Script, jobs: list[Job], shapes: W.Shapes, ask: Ask
) -> None:
    kind, value = await jobs[0].results.receive()  # the slot; only then the headers
    if kind == "error":
        await rt.reply(wire, entry, 500, W.error(500, value, "server_error"))
        return
    if kind == "start":
        entry.slot = value
        rt.journal.touch()
    if s.script is not None:
        await _raw(rt, wire, entry, s)
        rt.engine.finish(jobs[0])
    elif ask.stream:
        await _Stream(rt, wire, entry, s, jobs, shapes, ask).run()
    else:
        await _whole(rt, wire, entry, s, jobs, shapes)


async def _pace(rt: FakeRuntime, job: Job, s: Script) -> None:
    """Produce a paced job's tokens at the script's times."""
    prefill_s = (len(job.prompt) - job.cached) / rt.config.prefill_rate
    await trio.sleep(prefill_s if s.first_byte_after is None else s.first_byte_after)
    while True:
        if job.hang_at is not None and job.generated >= job.hang_at:
            await (trio.Event() if s.goes_on is None else s.goes_on).wait()
        if not rt.engine.produce(job):
            return
        await trio.sleep(1 / rt.config.decode_rate if s.itl is None else s.itl)


async def _whole(rt: FakeRuntime, wire: Wire, entry: Entry, s: Script, jobs: list[Job], shapes: W.Shapes) -> None:
    reasons: dict[int, str] = {}
    await trio.sleep(s.headers_after)
    async with trio.open_nursery() as nursery:
        for job in jobs:
            if job.paced:
                nursery.start_soon(_pace, rt, job, s)
        for job in jobs:
            async for kind, value in job.results:
                if kind in ("end", "error"):
                    reasons[job.index] = value
                    if kind == "error":
                        entry.outcome = "error"
                    break
        nursery.cancel_scope.cancel()
    if entry.outcome == "error":
        await rt.reply(wire, entry, 500, W.error(500, reasons[0], "server_error"))
        return
    await _body(rt, wire, entry, s, W.dump(shapes.whole(reasons)))


async def _body(rt: FakeRuntime, wire: Wire, entry: Entry, s: Script, body: bytes) -> None:
    """A non-stream body with the script's kind of end."""
    if s.end in ("done", "keep_open_after_done"):
        await rt.send(wire, entry, s.status, (*JSON, *s.headers), body)
        return
    entry.status, entry.headers_at = s.status, trio.current_time()
    await wire.head(s.status, (*JSON, *s.headers), len(body))
    await rt.put(wire, entry, body[: len(body) // 2])
    await rt.end(wire, entry, s.end if s.end == "rst" else "truncated_length")


class _Stream:
    """One streamed answer: the events of its jobs, in order of arrival, as SSE frames."""

    def __init__(
        self, rt: FakeRuntime, wire: Wire, entry: Entry, s: Script, jobs: list[Job], shapes: W.Shapes, ask: Ask
    ) -> None:
        self.rt, self.wire, self.entry, self.s = rt, wire, entry, s
        self.jobs, self.shapes, self.ask = jobs, shapes, ask
        self.left = len(jobs)
        self.failed = ""
        self.lock = trio.Lock()

    async def run(self) -> None:
        await trio.sleep(self.s.headers_after)
        self.entry.status, self.entry.headers_at = self.s.status, trio.current_time()
        server = (("Server", "llama.cpp"),) if self.rt.config.dialect == "llamacpp" else (("Server", "uvicorn"),)
        await self.wire.head(self.s.status, (*server, *SSE, *self.s.headers), None)
        self.rt.journal.touch()
        async with trio.open_nursery() as nursery:
            for job in self.jobs:
                if job.paced:
                    nursery.start_soon(_pace, self.rt, job, self.s)
                nursery.start_soon(self._one, job, nursery.cancel_scope)
        await self._close()

    async def _put(self, data: bytes) -> None:
        if data:
            async with self.lock:
                await self.rt.put(self.wire, self.entry, data)

    async def _one(self, job: Job, scope: trio.CancelScope) -> None:
        began = trio.current_time()
        role_sent, text, count = False, "", 0
        async for kind, value in job.results:
            if kind == "progress" and self.ask.progress:
                await self._put(self.shapes.progress(job, value, (trio.current_time() - began) * 1000))
            elif kind == "token":
                if not role_sent:
                    role_sent = True
                    await self._put(self.shapes.role(job))
                text, count = text + value, count + 1
                if count >= self.s.chunk_tokens:
                    await self._put(self.s.noise + self.shapes.token(job, text, count))
                    text, count = "", 0
            elif kind == "end":
                if text:
                    await self._put(self.s.noise + self.shapes.token(job, text, count))
                self.left -= 1
                if self.s.end in ("done", "eof_no_done", "keep_open_after_done"):
                    await self._put(self.shapes.finish(job, value, self.ask.usage, self.left == 0))
                return
            elif kind == "error":
                self.failed = value
                scope.cancel()
                return

    async def _close(self) -> None:
        entry, s = self.entry, self.s
        if self.failed or s.end == "error_event":
            entry.outcome = "error"
            await self._put(W.event(W.error(500, self.failed or "scripted failure", "server_error")))
            await self.rt.end(self.wire, entry)
            return
        if s.end in ("done", "keep_open_after_done"):
            await self._put((self.shapes.usage_chunk() if self.ask.usage else b"") + self._done())
        elif s.end == "eof_no_done" and self.ask.usage:
            await self._put(self.shapes.usage_chunk())
        elif s.end == "done_no_finish":
            await self._put(W.DONE)
        await _end(self.rt, self.wire, entry, s)

    def _done(self) -> bytes:
        return self.shapes.done


async def _raw(rt: FakeRuntime, wire: Wire, entry: Entry, s: Script) -> None:
    """Only what the script says: status, headers, writes, end."""
    await trio.sleep(s.headers_after)
    if s.goes_on is not None:
        await s.goes_on.wait()
    entry.status, entry.headers_at = s.status, trio.current_time()
    writes = s.script if s.script is not None else []
    total = sum(len(data) for _, data in writes)
    names = {name.lower() for name, _ in s.headers}
    sse = s.status == 200 and entry.inference
    headers = s.headers if "content-type" in names else ((*SSE, *s.headers) if sse else (*JSON, *s.headers))
    length = total + 100 if s.end == "truncated_length" else None if sse else total
    await wire.head(s.status, headers, length)
    rt.journal.touch()
    await trio.sleep(s.first_byte_after or 0.0)
    for delay, data in writes:
        await trio.sleep(delay)
        await rt.put(wire, entry, data)
    await _end(rt, wire, entry, s)


async def _end(rt: FakeRuntime, wire: Wire, entry: Entry, s: Script) -> None:
    if s.end == "keep_open_after_done":
        entry.outcome = s.end
        await wire.gone.wait()
    else:
        await rt.end(wire, entry, s.end)

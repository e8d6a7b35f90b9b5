"""One inference request of the fake Ollama, native or ``/v1``, from the body to the last byte.

The head goes out with the first output, as Ollama's does; whatever fails before is an HTTP error. What fails later is a
line ``{"error": ...}`` on the native routes, and is *lost* on ``/v1``: an empty chunk, then the end (case 22).

The model is the fake's own, with three tricks for clients to see: asked with tools, it calls the one whose name the
last user message has in it; with a ``format`` it answers one JSON object; with ``think`` its first two words are a
thought.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import trio

from . import tokens as T
from . import wire as W
from .answer import _raw
from .engine import Job
from .front import Wire
from .journal import Entry, FakeRequest
from .ollama import CREATED_AT, Refused, Runner, dump_line, full_name
from .ollama_v1 import shapes_of
from .script import Script

if TYPE_CHECKING:
    from .runtime import FakeRuntime

NDJSON = (("Content-Type", "application/x-ndjson"),)
SSE = (("Content-Type", "text/event-stream"),)
JSON = (("Content-Type", "application/json; charset=utf-8"),)
EMBEDDINGS = frozenset({"/api/embed", "/api/embeddings", "/v1/embeddings"})
FAILED = "an error was encountered while running the model: CUDA error"


async def ollama_answer(rt: FakeRuntime, r: FakeRequest, wire: Wire, entry: Entry, script: Script | None) -> None:
    """Answer ``r``; whatever ends it, its slot is free again."""
    s = script if script is not None else Script()
    if s.refuse:
        await rt.end(wire, entry, "refused")
        return
    if not s.slot or s.status != 200:
        await _raw(rt, wire, entry, s)
        return
    body = r.json
    if not isinstance(body, dict):
        await rt.ollama.refuse(r, wire, entry, 400, "invalid character 'x' looking for beginning of value")
        return
    try:
        async with rt.ollama.hold(body) as runner:
            await _Answer(rt, r, wire, entry, s, body, runner).run()
    except Refused as refused:
        await rt.ollama.refuse(r, wire, entry, refused.status, refused.text)


class _Answer:
    """One answer of a loaded model."""

    def __init__(self, rt: FakeRuntime, r: FakeRequest, wire: Wire, entry: Entry, s: Script, body: dict[str, Any],
                 runner: Runner) -> None:  # fmt: skip
        self.rt, self.r, self.wire, self.entry, self.s, self.body, self.runner = rt, r, wire, entry, s, body, runner
        self.v1 = r.path.startswith("/v1/")
        self.chat = r.path in ("/api/chat", "/v1/chat/completions", "/v1/messages")
        self.shapes = shapes_of(r.path, str(body.get("model", "")))
        self.stream = bool(body.get("stream", not self.v1)) and r.path not in EMBEDDINGS
        self.begun = False
        self.lines: list[dict[str, Any]] = []  # of a native answer in one piece

    async def run(self) -> None:
        try:
            prompt = self._prompt()
            self._tool()
        except (TypeError, AttributeError, KeyError, ValueError) as wrong:
            raise Refused(400, f"json: cannot unmarshal: {wrong}") from wrong
        if not prompt:
            reason = "unload" if self.body.get("keep_alive") in (0, "0") else "load"
            await self._whole(self._line("", done=True) | {"done_reason": reason})
            return
        job = self.job = self._job(self._cut(prompt))
        engine = self.runner.engine
        engine.submit(job)
        self.entry.task = job.task
        try:
            if self.r.path in EMBEDDINGS:
                await self._embed(job)
            else:
                await self._generate(job)
        finally:
            engine.cancel(job)
            self.entry.tokens_out = job.generated
            if self.rt._nursery is not None:
                self.rt._nursery.start_soon(self._note_release, job)

    async def _note_release(self, job: Job) -> None:
        with trio.move_on_after(1000):  # a runner that is thrown out releases nobody
            await job.released.wait()
        self.entry.released_at = trio.current_time()
        self.rt.journal.touch()

    # --- the prompt ---

    def _prompt(self) -> list[int]:
        body = self.body
        if self.r.path in EMBEDDINGS:
            given = body.get("input", body.get("prompt", ""))
            text = max(given, key=len) if isinstance(given, list) and given else str(given)
        elif self.chat:
            messages = body.get("messages") or []
            if self.v1:  # Ollama makes a message of every part
                messages = [m | {"content": part.get("text", "")} if isinstance(part, Mapping) else m
                            for m in messages for part in
                            (m["content"] if isinstance(m.get("content"), list) else [None])]  # fmt: skip
            system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
            text = T.apply_template(system + messages) if messages else ""
        elif self.r.path == "/v1/responses":
            given = body.get("input", "")
            text = given if isinstance(given, str) else T.apply_template(given)
        else:
            text = str(body.get("prompt", ""))
        return self.rt.tokenizer.encode(text)

    def _cut(self, prompt: list[int]) -> list[int]:
        """A prompt that is too long is cut without a word, unless asked not to."""
        context = self.runner.context
        if len(prompt) < context:
            return prompt
        if self.body.get("truncate") is False:
            raise Refused(400, "the input length exceeds the context length")
        return prompt[-(context // 2) :]

    def _job(self, prompt: list[int]) -> Job:
        limited = self.body.get("max_tokens", self.body.get("max_output_tokens"))
        options = {"num_predict": limited} if self.v1 else self.body.get("options")
        limit = options.get("num_predict") if isinstance(options, Mapping) else None
        limit = limit if isinstance(limit, int) and limit > 0 else 10**9
        stop_at = self.s.tokens if self.s.tokens is not None else self.rt.config.answer_tokens
        return Job(prompt, 1 if self.r.path in EMBEDDINGS else limit, 0, None, stop_at, self.s.hang_at_token,
                   paced=self.s.paced or self.s.script is not None)  # fmt: skip

    # --- generating ---

    async def _generate(self, job: Job) -> None:
        kind, value = await job.results.receive()
        if kind == "error":
            raise Refused(500, value)
        self.entry.slot = value
        self.rt.journal.touch()
        if self.s.script is not None:
            await self._begin()
            await _raw_body(self.rt, self.wire, self.entry, self.s)
            self.runner.engine.finish(job)
            return
        await trio.sleep(self.s.headers_after)
        async with trio.open_nursery() as nursery:
            if job.paced:
                nursery.start_soon(self._pace, job)
            how = await self._events(job)
            nursery.cancel_scope.cancel()
        if how == "error" or self.s.end == "error_event":
            await self._fail()
        elif self.s.end in ("done", "keep_open_after_done", "eof_no_done"):
            await self._last(job, how)
        if self.s.end == "keep_open_after_done":
            await self.wire.gone.wait()
        elif self.entry.ended_at is None:
            await self.rt.end(self.wire, self.entry, "done" if self.s.end.startswith("e") else self.s.end)

    async def _pace(self, job: Job) -> None:
        prefill_s = (len(job.prompt) - job.cached) / self.rt.config.prefill_rate
        await trio.sleep(prefill_s if self.s.first_byte_after is None else self.s.first_byte_after)
        while not (job.hang_at is not None and job.generated >= job.hang_at):
            if not self.runner.engine.produce(job):
                return
            await trio.sleep(1 / self.rt.config.decode_rate if self.s.itl is None else self.s.itl)
        await trio.sleep_forever()

    async def _events(self, job: Job) -> str:
        """Tokens as they come; how it ended."""
        held = bool(self.body.get("format") or self.body.get("response_format") or self._tool())
        count = 0
        async for kind, value in job.results:
            if kind == "token":
                count += 1
                thought = bool(self.body.get("think")) and count <= 2
                if not held:
                    await self._say({"thinking": value} if thought else {"content": value})
            elif kind in ("end", "error"):
                return "error" if kind == "error" else str(value)
        raise AssertionError("a job ends with an end")

    def _tool(self) -> dict[str, Any] | None:
        """The tool that is called: the one whose name is in the last message, if a user wrote it."""
        last = (self.body.get("messages") or [{}])[-1]
        for tool in self.body.get("tools") or ():
            function = tool.get("function", {})
            if last.get("role") == "user" and function.get("name", "?") in T.content_text(last.get("content")):
                names = list(function.get("parameters", {}).get("properties", {}))[:1]
                return {"function": {"name": function["name"], "arguments": dict.fromkeys(names, "Oslo")}}
        return None

    async def _last(self, job: Job, reason: str) -> None:
        tool = self._tool()
        if tool is not None:
            await self._say({"tool_calls": [tool]})
        elif self.body.get("format") or self.body.get("response_format"):
            await self._say({"content": json.dumps({"answer": "".join(job.text).strip()}, ensure_ascii=False)})
        if self.v1:
            reason, text = "tool_calls" if tool else reason, "".join(job.text)
            if self.stream:
                await self._put(self.shapes.last(job, reason, text))
            else:
                await self._whole(self.shapes.whole(job, reason, text))
            return
        numbers = {"prompt_eval_count": len(job.prompt), "eval_count": job.generated,
                   "prompt_eval_duration": int(job.prefill_s * 1e9), "eval_duration": int(job.decode_s * 1e9),
                   "total_duration": int((job.prefill_s + job.decode_s) * 1e9), "load_duration": 1000}  # fmt: skip
        told = {key: value for key, value in numbers.items() if value}  # zero fields are left out
        line = self._line("", done=True) | {"done_reason": reason} | told
        if self.stream:
            await self._put(dump_line(line))
        else:
            await self._whole(self._merged(line))

    # --- shapes ---

    def _line(self, content: str, *, done: bool = False, **more: Any) -> dict[str, Any]:
        head = {"model": self.body["model"], "created_at": CREATED_AT}
        if self.chat:
            return {**head, "message": {"role": "assistant", "content": content, **more}, "done": done}
        return {**head, "response": content, **more, "done": done}

    def _merged(self, last: dict[str, Any]) -> dict[str, Any]:
        """The lines of an answer in one piece."""
        texts = [line["message"] if self.chat else line for line in self.lines]
        content = "".join(text["content" if self.chat else "response"] for text in texts)
        more: dict[str, Any] = {}
        if thought := "".join(text.get("thinking", "") for text in texts):
            more["thinking"] = thought
        if calls := [call for text in texts for call in text.get("tool_calls", ())]:
            more["tool_calls"] = calls
        return {**last, **{k: v for k, v in self._line(content, done=True, **more).items() if k != "done"}}

    async def _say(self, said: dict[str, Any]) -> None:
        content = said.pop("content", "")
        if not self.v1:
            line = self._line(content, **said)
            if self.stream:
                await self._put(dump_line(line))
            else:
                self.lines.append(line)
        elif self.stream:
            first = b"" if self.begun else self.shapes.start(self.job)
            await self._put(first + self.shapes.say({"content": content, **said}))
        else:
            self.lines.append({"response": content})

    async def _fail(self) -> None:
        self.entry.outcome = "error"
        if not self.begun:
            raise Refused(500, FAILED)
        # /v1 decodes the error into a chunk that says nothing, and then the stream just ends
        await self._put(self.shapes.lost() if self.v1 else dump_line({"error": FAILED}))

    # --- bytes ---

    async def _begin(self) -> None:
        if self.begun:
            return
        self.begun = True
        self.entry.status, self.entry.headers_at = 200, trio.current_time()
        await self.wire.head(200, (*(SSE if self.v1 else NDJSON), *self.s.headers), None)
        self.rt.journal.touch()

    async def _put(self, data: bytes) -> None:
        await self._begin()
        await self.rt.put(self.wire, self.entry, data)

    async def _whole(self, value: dict[str, Any]) -> None:
        if self.stream:
            await self._put(dump_line(value))
            await self.rt.end(self.wire, self.entry)
        else:
            await self.rt.send(self.wire, self.entry, 200, JSON, W.dump(value))

    async def _embed(self, job: Job) -> None:
        async for kind, value in job.results:
            if kind == "error":
                raise Refused(500, value)
            if kind == "end":
                break
        given = self.body.get("input", self.body.get("prompt", ""))
        texts = given if isinstance(given, list) else [given or ""]  # null is taken for nothing
        vectors = [[((T.piece_id(text) >> shift) % 255) / 256 for shift in (0, 8, 16)] for text in texts]
        name = full_name(self.body["model"])
        if self.r.path == "/api/embeddings":
            await self._whole({"embedding": vectors[0]})
        elif self.r.path == "/api/embed":
            await self._whole({"model": name, "embeddings": vectors, "total_duration": 1000, "load_duration": 100,
                               "prompt_eval_count": len(job.prompt)})  # fmt: skip
        else:
            packed = [base64.b64encode(struct.pack("<3f", *row)).decode() for row in vectors]
            rows = packed if self.body.get("encoding_format") == "base64" else vectors
            data = [{"object": "embedding", "embedding": row, "index": i} for i, row in enumerate(rows)]
            usage = {"prompt_tokens": len(job.prompt), "total_tokens": len(job.prompt)}
            await self._whole({"object": "list", "data": data, "model": name, "usage": usage})


async def _raw_body(rt: FakeRuntime, wire: Wire, entry: Entry, s: Script) -> None:
    """The script's own writes, then its end."""
    await trio.sleep(s.first_byte_after or 0.0)
    for delay, data in s.script or ():
        await trio.sleep(delay)
        await rt.put(wire, entry, data)
    if s.end == "keep_open_after_done":
        await wire.gone.wait()
    else:
        await rt.end(wire, entry, s.end)

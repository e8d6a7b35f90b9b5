"""The routes beside chat, as llama.cpp answers them: Anthropic's messages, OpenAI's responses, embeddings, rankings.

Shapes copied from ``tests/adapters/golden/llamacpp``; a test plays the same prompt to both and compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import tokens as T
from . import wire as W
from .engine import Job

MESSAGES, RESPONSES, INFILL = "/v1/messages", frozenset(("/v1/responses", "/responses")), "/infill"
READ_ONLY = frozenset(("/v1/embeddings", "/embedding", "/embeddings", "/v1/rerank", "/rerank", "/v1/reranking",
                       "/reranking"))
ROUTES = frozenset((MESSAGES, INFILL)) | RESPONSES | READ_ONLY


def named(kind: str, **fields: Any) -> bytes:
    """One event with its name."""
    return b"event: " + kind.encode() + b"\ndata: " + W.dump({"type": kind, **fields}) + b"\n\n"


def turns_of(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The dialogue as chat messages."""
    if path == MESSAGES or path.startswith("/v1/messages/"):
        system = T.content_text(body.get("system")) if body.get("system") else ""
        return [*([{"role": "system", "content": system}] if system else []), *body.get("messages", [])]
    items = body.get("input", "")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    head = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return [*head, *({"role": i.get("role", "tool"), "content": i.get("content", i.get("output", ""))} for i in items)]


def documents_of(path: str, body: dict[str, Any]) -> list[str]:
    """What is read, one text a job."""
    if "rank" in path:
        return [f"{body.get('query', '')} {document}" for document in body.get("documents", [])]
    given = body.get("input", body.get("content", ""))
    return [str(item) for item in given] if isinstance(given, list) else [str(given)]


class MessagesShapes(W.Shapes):
    """Of ``/v1/messages``."""

    done = b""

    def _usage(self, job: Job, completion: int) -> dict[str, Any]:
        return {"cache_read_input_tokens": job.cached, "input_tokens": len(job.prompt) - job.cached,
                "output_tokens": completion}

    def _message(self, job: Job, completion: int, content: list[Any], stop: str | None) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "content": content, "model": self.config.model,
                "stop_reason": stop, "stop_sequence": None, "usage": self._usage(job, completion)}

    def role(self, job: Job) -> bytes:
        start = named("message_start", message=self._message(job, 0, [], None))
        return start + named("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def progress(self, job: Job, processed: int, ms: float) -> bytes:
        return b""

    def token(self, job: Job, text: str, count: int = 1) -> bytes:
        return named("content_block_delta", index=0, delta={"type": "text_delta", "text": text})

    def finish(self, job: Job, reason: str, with_usage: bool, last: bool) -> bytes:
        stop = "max_tokens" if reason == "length" else "end_turn"
        return named("content_block_stop", index=0) + named(
            "message_delta", delta={"stop_reason": stop, "stop_sequence": None},
            usage={"output_tokens": job.generated}) + named("message_stop")

    def usage_chunk(self) -> bytes:
        return b""

    def whole(self, reasons: Mapping[int, str]) -> dict[str, Any]:
        job = self.jobs[0]
        stop = "max_tokens" if reasons[0] == "length" else "end_turn"
        return self._message(job, job.generated, [{"type": "text", "text": "".join(job.text)}], stop)


class ResponsesShapes(W.Shapes):
    """Of ``/v1/responses``."""

    done = b""

    @property
    def _rid(self) -> str:
        return f"resp_fake{self.jobs[0].task}"

    @property
    def _mid(self) -> str:
        return f"msg_fake{self.jobs[0].task}"

    def _part(self, job: Job) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": "".join(job.text)}

    def _item(self, job: Job) -> dict[str, Any]:
        return {"type": "message", "status": "completed", "id": self._mid, "content": [self._part(job)],
                "role": "assistant"}

    def _response(self, job: Job) -> dict[str, Any]:
        n, m = len(job.prompt), job.generated
        return {"id": self._rid, "object": "response", "created_at": W.CREATED, "status": "completed",
                "model": self.config.model, "output": [self._item(job)],
                "usage": {"input_tokens": n, "output_tokens": m, "total_tokens": n + m,
                          "input_tokens_details": {"cached_tokens": job.cached}}}

    def role(self, job: Job) -> bytes:
        started = {"id": self._rid, "object": "response", "status": "in_progress"}
        item = {"content": [], "id": self._mid, "role": "assistant", "status": "in_progress", "type": "message"}
        return named("response.created", response=started) + named("response.in_progress", response=started) + named(
            "response.output_item.added", item=item) + named(
            "response.content_part.added", item_id=self._mid, part={"type": "output_text", "text": ""})

    def progress(self, job: Job, processed: int, ms: float) -> bytes:
        return b""

    def token(self, job: Job, text: str, count: int = 1) -> bytes:
        return named("response.output_text.delta", item_id=self._mid, delta=text)

    def finish(self, job: Job, reason: str, with_usage: bool, last: bool) -> bytes:
        text = "".join(job.text)
        return named("response.output_text.done", item_id=self._mid, text=text) + named(
            "response.content_part.done", item_id=self._mid, part=self._part(job)) + named(
            "response.output_item.done", item=self._item(job)) + named(
            "response.completed", response=self._response(job), timings=W.timings(job))

    def usage_chunk(self) -> bytes:
        return b""

    def whole(self, reasons: Mapping[int, str]) -> dict[str, Any]:
        return {"completed_at": W.CREATED, **self._response(self.jobs[0])}


class ReadShapes(W.Shapes):
    """Of embeddings and rankings: nothing is generated, so there is no stream."""

    path = ""

    def whole(self, reasons: Mapping[int, str]) -> Any:
        read = sum(len(job.prompt) for job in self.jobs)
        usage = {"prompt_tokens": read, "total_tokens": read}
        if "rank" in self.path:
            results = [{"index": job.index, "relevance_score": 1 / (1 + job.index)} for job in self.jobs]
            return {"model": self.config.model, "object": "list", "usage": usage, "results": results}
        vectors = [[float(len(job.prompt)), float(job.index)] for job in self.jobs]
        if self.path == "/v1/embeddings":
            data = [{"embedding": v, "index": i, "object": "embedding"} for i, v in enumerate(vectors)]
            return {"model": self.config.model, "object": "list", "usage": usage, "data": data}
        return [{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)]

"""What the fake Ollama says on its compatible routes: OpenAI's chat, completions and responses, Anthropic's messages.

Of an error in mid-stream nothing is left on any of them: ``lost`` is what a client gets in its stead (case 22).
"""

from __future__ import annotations

from typing import Any

from . import wire as W
from .engine import Job


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + W.event({"type": kind, **fields})


class ChatShapes:
    """``/v1/chat/completions`` and ``/v1/completions``. ``text`` is the whole answer."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        self.head = {"id": "chatcmpl-417" if chat else "cmpl-417", "created": W.CREATED, "model": model,
                     "object": "chat.completion.chunk" if chat else "text_completion",
                     "system_fingerprint": "fp_ollama"}  # fmt: skip

    def start(self, job: Job) -> bytes:
        return b""

    def say(self, said: dict[str, Any]) -> bytes:
        if "thinking" in said:
            said = {"reasoning": said["thinking"]}
        return self._chunk({"role": "assistant", "content": "", **said})

    def last(self, job: Job, reason: str, text: str) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, reason) + W.DONE

    def lost(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def whole(self, job: Job, reason: str, text: str) -> dict[str, Any]:
        message = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        usage = {"prompt_tokens": len(job.prompt), "completion_tokens": job.generated,
                 "total_tokens": len(job.prompt) + job.generated}  # fmt: skip
        return {**self.head, "object": self.head["object"].removesuffix(".chunk"),
                "choices": [{"index": 0, **message, "finish_reason": reason}], "usage": usage}  # fmt: skip

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        if self.chat:
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        else:
            choice = {"index": 0, "text": delta["content"], "finish_reason": reason}
        return W.event({**self.head, "choices": [choice]})


class MessagesShapes:
    """``/v1/messages``."""

    def __init__(self, model: str) -> None:
        self.model = model

    def start(self, job: Job) -> bytes:
        return named("message_start", message=self._message(job, [], None)) + named(
            "content_block_start", index=0, content_block={"type": "text", "text": ""})

    def say(self, said: dict[str, Any]) -> bytes:
        delta = {"type": "text_delta", "text": said.get("content", "")}
        return named("content_block_delta", index=0, delta=delta)

    def last(self, job: Job, reason: str, text: str) -> bytes:
        stop = {"stop_reason": {"length": "max_tokens"}.get(reason, "end_turn"), "stop_sequence": None}
        usage = {"input_tokens": len(job.prompt), "output_tokens": job.generated}
        return (named("content_block_stop", index=0) + named("message_delta", delta=stop, usage=usage)
                + named("message_stop"))  # fmt: skip

    def lost(self) -> bytes:
        return b""

    def whole(self, job: Job, reason: str, text: str) -> dict[str, Any]:
        return self._message(job, [{"type": "text", "text": text}], reason)

    def _message(self, job: Job, content: list[Any], reason: str | None) -> dict[str, Any]:
        stop = None if reason is None else {"length": "max_tokens"}.get(reason, "end_turn")
        usage = {"input_tokens": len(job.prompt), "output_tokens": job.generated}
        return {"id": "msg_417", "type": "message", "role": "assistant", "model": self.model, "content": content,
                "stop_reason": stop, "stop_sequence": None, "usage": usage}  # fmt: skip


class ResponsesShapes:
    """``/v1/responses``."""

    def __init__(self, model: str) -> None:
        self.model = model

    def start(self, job: Job) -> bytes:
        item = {"id": "msg_417", "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": []}
        return (named("response.created", response=self._response([], "in_progress"))
                + named("response.output_item.added", output_index=0, item=item)
                + named("response.content_part.added", item_id="msg_417", output_index=0, content_index=0, part=part))

    def say(self, said: dict[str, Any]) -> bytes:
        return named("response.output_text.delta", item_id="msg_417", output_index=0, content_index=0,
                     delta=said.get("content", ""))  # fmt: skip

    def last(self, job: Job, reason: str, text: str) -> bytes:
        where: dict[str, Any] = {"item_id": "msg_417", "output_index": 0, "content_index": 0}
        item = self._item(text)
        return (named("response.output_text.done", **where, text=text)
                + named("response.output_item.done", output_index=0, item=item)
                + named("response.completed", response=self.whole(job, reason, text)))  # fmt: skip

    def lost(self) -> bytes:
        return b""

    def whole(self, job: Job, reason: str, text: str) -> dict[str, Any]:
        usage = {"input_tokens": len(job.prompt), "output_tokens": job.generated,
                 "total_tokens": len(job.prompt) + job.generated}  # fmt: skip
        return self._response([self._item(text)], "completed") | {"usage": usage}

    def _item(self, text: str) -> dict[str, Any]:
        return {"id": "msg_417", "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": text, "annotations": []}]}  # fmt: skip

    def _response(self, output: list[Any], status: str) -> dict[str, Any]:
        return {"id": "resp_417", "object": "response", "created_at": W.CREATED, "status": status,
                "model": self.model, "output": output}  # fmt: skip


Shapes = ChatShapes | MessagesShapes | ResponsesShapes


def shapes_of(path: str, model: str) -> Shapes:
    if path == "/v1/messages":
        return MessagesShapes(model)
    if path == "/v1/responses":
        return ResponsesShapes(model)
    return ChatShapes(model, chat=path == "/v1/chat/completions")

"""The backend that costs least: raw Trio sockets and answers prepared beforehand. With it, what a gateway adds is
nearly all there is to measure.

    python canned_backend.py PORT [--chunks 64]

``POST .../chat/completions`` is answered with an SSE stream, each chunk in a send of its own, or with one JSON object
when the client does not stream. Any GET is answered 200. A request may carry ``"canned": {"chunks": N, "gap_ms": T}``,
which a gateway passes on like any field it does not know: so clients of one run may get short, long and slow streams.
"""

from __future__ import annotations

import argparse
import json
from functools import lru_cache, partial
from typing import Any

import trio

HEAD = {"id": "chatcmpl-canned", "object": "chat.completion.chunk", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def frame(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return b"data: " + json.dumps(HEAD | {"choices": choices} | more, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST = chunk(frame({"role": "assistant", "content": ""}))
TOKEN = chunk(frame({"content": " token"}))
LAST = chunk(frame({}, "stop"))


def usage(chunks: int) -> dict[str, int]:
    return {"prompt_tokens": 8, "completion_tokens": chunks, "total_tokens": 8 + chunks}


@lru_cache(maxsize=64)
def tail(chunks: int, with_usage: bool) -> bytes:
    """Everything after the last token, in one send as real servers do it."""
    return LAST + (chunk(frame(None, usage=usage(chunks))) if with_usage else b"") + chunk(DONE) + b"0\r\n\r\n"


def whole(value: dict[str, Any]) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Connection:
    """One client. ``request`` gives the next request, or None when the client is done."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._bytes = bytearray()

    async def request(self) -> tuple[bytes, bytes] | None:
        while (end := self._bytes.find(b"\r\n\r\n")) < 0:
            if not await self._more():
                return None
        head = bytes(self._bytes[:end])
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = int(value)
        size = end + 4 + length
        while len(self._bytes) < size:
            if not await self._more():
                return None
        body = bytes(self._bytes[end + 4 : size])
        del self._bytes[:size]
        return head, body

    async def _more(self) -> bool:
        data = await self.stream.receive_some(65536)
        self._bytes += data
        return bool(data)


async def answer_chat(stream: trio.SocketStream, request: dict[str, Any], chunks: int) -> None:
    options = request.get("canned") or {}
    chunks, gap_s = options.get("chunks", chunks), options.get("gap_ms", 0) / 1000
    if not request.get("stream"):
        message = {"role": "assistant", "content": " token" * chunks}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = HEAD | {"object": "chat.completion"}
        await stream.send_all(whole(head | {"choices": [choice], "usage": usage(chunks)}))
        return
    await stream.send_all(STREAM_HEAD + FIRST)
    for _ in range(chunks):
        if gap_s:
            await trio.sleep(gap_s)
        await stream.send_all(TOKEN)
    await stream.send_all(tail(chunks, bool((request.get("stream_options") or {}).get("include_usage"))))


async def serve(stream: trio.SocketStream, chunks: int) -> None:
    connection = Connection(stream)
    try:
        while (call := await connection.request()) is not None:
            head, body = call
            if head.startswith(b"POST") and b"/chat/completions " in head.split(b"\r\n", 1)[0]:
                await answer_chat(stream, json.loads(body), chunks)
            else:
                await stream.send_all(whole({"object": "list", "data": [{"id": "m", "object": "model"}]}))
    except trio.BrokenResourceError:
        return  # the other side left in mid-answer, as it may


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI-like backend with canned answers.")
    parser.add_argument("port", type=int)
    parser.add_argument("--chunks", type=int, default=64)
    args = parser.parse_args()

    async def handler(stream: trio.SocketStream) -> None:
        await serve(stream, args.chunks)

    trio.run(partial(trio.serve_tcp, handler, args.port, host="127.0.0.1"))


if __name__ == "__main__":
    main()

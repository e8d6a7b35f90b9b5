"""What answers where the backend should be: pages, compressed bodies, other protocols, ends in the wrong place."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import pytest

from tests.gateway.conftest import CHAT, chat
from tests.gateway.rawback import Raw, RawRig, open_raw

TOKENIZE, COUNT = "/tokenize", "/v1/messages/count_tokens"
CALLS: dict[str, Any] = {
    CHAT: chat(), "/v1/embeddings": {"input": "x"}, TOKENIZE: {"content": "x"},
    COUNT: {"model": "fake-model", "messages": [{"role": "user", "content": "hi"}]}}
HTML = b"<html><body>It works</body></html>"


def answer(kind: bytes, body: bytes, more: bytes = b"", status: bytes = b"200 OK") -> Raw:
    return Raw([b"HTTP/1.1 %s\r\nContent-Type: %s\r\n%sContent-Length: %d\r\n\r\n%s"
                % (status, kind, more, len(body), body)])


WRONG = {
    "page": answer(b"text/html", HTML),
    "empty": answer(b"application/json", b""),
    "no content": Raw([b"HTTP/1.1 204 No Content\r\n\r\n"]),
    "redirect": answer(b"text/plain", b"", b"Location: http://evil.example/\r\n", b"302 Found"),
    "not modified": Raw([b"HTTP/1.1 304 Not Modified\r\n\r\n"]),
    "gzip": answer(b"application/json", gzip.compress(b'{"tokens": [1]}'), b"Content-Encoding: gzip\r\n"),
    "cut without a length": Raw([b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"tok']),
    "cut": Raw([b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"tokens": []}']),
    "error in a 200": answer(b"application/json", b'{"error": {"message": "no", "code": 400}}'),
}


async def asked(rig: RawRig, path: str, raw: Raw) -> tuple[int, Any]:
    rig.raw.answers = {path: raw}
    response = await rig.post(CALLS[path], path, [("Connection", "close")])
    body = await response.read_all()
    await response.close()
    await rig.until(rig.idle)
    return response.status, json.loads(body)


@pytest.mark.parametrize("path", CALLS)
async def test_what_is_no_answer_is_told_as_an_error(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """Calls without a seat passed on whatever had a status below 400, an empty body as JSON, and a redirect."""
    async with open_raw(upstream={"breaker_faults": 0}) as rig:
        for name, raw in WRONG.items():
            status, value = await asked(rig, path, raw)
            assert status >= 400 and status != 500, name
            assert value["error"]["message"], name
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_pages_and_compressed_answers_are_called_by_their_name() -> None:
    """They were called a stream that ended too early."""
    async with open_raw(upstream={"breaker_faults": 0}) as rig:
        for raw, word in ((WRONG["page"], "HTML"), (WRONG["gzip"], "compresses"), (WRONG["redirect"], "302")):
            status, value = await asked(rig, CHAT, raw)
            assert status == 502 and word in value["error"]["message"], value


@pytest.mark.parametrize("raw", [
    b"-ERR unknown command\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nX-Big: " + b"x" * 300_000 + b"\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
], ids=["redis", "bad length", "giant head", "upgrade"])
async def test_another_protocol_is_not_a_closed_connection(raw: bytes) -> None:
    """It was a 503 that said that the connection was closed, with a Retry-After."""
    async with open_raw(upstream={"breaker_faults": 0}) as rig:
        status, value = await asked(rig, CHAT, Raw([raw]))
        assert status == 502 and "does not speak HTTP" in value["error"]["message"], value


async def test_interim_answers_and_trailers_are_skipped() -> None:
    ok = answer(b"application/json", b'{"tokens": [1]}')
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    trailers = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
                b"f\r\n{\"tokens\": [1]}\r\n0\r\nX-Sum: 1\r\n\r\n")
    async with open_raw() as rig:
        for raw in (Raw([interim * 20, *ok.pieces]), Raw([trailers]), Raw([*ok.pieces], early=True)):
            assert await asked(rig, TOKENIZE, raw) == (200, {"tokens": [1]})

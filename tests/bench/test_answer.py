"""The reader of a stream: any split gives the same answer."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvstream.bench.answer import AnswerReader, milliseconds
from tests.bench.conftest import DONE, ROLE, delta, frame, usage

STREAMS = (
    b"".join([ROLE, delta(reasoning="hm"), delta(content="a\u2028雨"), b": ping\r\n\r\n", delta(content="b"),
              delta("stop"), usage(9, 3, 4), DONE]),
    b"".join([delta(content="a"), frame({"error": {"message": "slot died"}})]),
    b": queued-ms 12\n\n" + frame({"choices": [{"text": "x", "finish_reason": "length"}]}).replace(b"\n", b"\r\n"),
    delta(content="a") + b"data: not json\n\n",
    delta(content="a") + frame({"choices": [{"delta": {}, "finish_reason": "stop"}]}).rstrip(),
)


def facts(reader: AnswerReader) -> tuple[object, ...]:
    return (reader.text, reader.finish, reader.done, reader.usage, reader.error, reader.malformed, reader.queue_s,
            len(reader.token_times), reader.first_answer is None, reader.complete)


def read(parts: list[bytes]) -> AnswerReader:
    reader = AnswerReader()
    for at, part in enumerate(parts):
        reader.feed(part, float(at))
    reader.close(float(len(parts)))
    return reader


@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 1000), max_size=12))
def test_any_split_gives_the_same(stream: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    parts = [stream[a:b] for a, b in pairwise(edges)]
    assert facts(read(parts)) == facts(read([stream])) == facts(read([stream[n:n + 1] for n in range(len(stream))]))


def test_what_is_in_them() -> None:
    first, error, queued, broken, unended = (read([stream]) for stream in STREAMS)
    assert first.text == "a\u2028雨b" and len(first.token_times) == 3 and first.complete and first.done
    assert first.usage is not None and (first.usage.prompt, first.usage.completion, first.usage.cached) == (9, 3, 4)
    assert error.error == "slot died" and not error.complete
    assert queued.queue_s == 0.012 and queued.text == "x" and queued.complete
    assert broken.malformed is not None and not broken.complete
    assert unended.complete and not unended.done


@given(st.lists(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3),
                             lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                                 st.sampled_from(["choices", "delta", "content", "usage", "error", "text", "index",
                                                  "prompt_tokens", "tool_calls", "finish_reason", "timings"]),
                                 inner, max_size=4), max_leaves=9), max_size=4))
def test_nothing_a_server_sends_breaks_it(values: list[object]) -> None:
    read([frame(value) for value in values])


def test_milliseconds() -> None:
    assert milliseconds("1500") == 1.5 and milliseconds(b"0.5\n\n") == 0.0005
    assert [milliseconds(text) for text in ("", "x", "-1", "nan", "inf")] == [None] * 5

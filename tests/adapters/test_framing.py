"""The SSE splitter: any line end, any cut, bounded memory, linear time."""

from __future__ import annotations

import gc
import time
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstream.adapters.framing import SseFrame, SseSplitter

EOLS = st.sampled_from(["\n", "\r\n", "\r"])
LINES = st.sampled_from(
    [
        "data: a",
        "data:b",
        "data:  c",
        "data",
        "data:",
        ": note",
        ":",
        "id: 7",
        "retry: 10",
        "event: ping",
        "event:x",
        "foo",
    ]
)


def split(pieces: list[bytes], bytes_max: int = 10_000) -> tuple[list[SseFrame], SseFrame | None, str]:
    splitter = SseSplitter(bytes_max)
    frames = [frame for piece in pieces for frame in splitter.feed(piece)]
    return frames, splitter.finish(), splitter.error


def one(text: str) -> SseFrame:
    frames, rest, error = split([text.encode()])
    assert len(frames) == 1 and rest is None and not error
    return frames[0]


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    parts = ["\ufeff"] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 5))):
        for line in draw(st.lists(LINES, max_size=4)):
            parts += [line, draw(EOLS)]
        parts.append(draw(EOLS))
    parts.append(draw(st.sampled_from(["", "data: open", "data: open\n", "\r"])))
    return "".join(parts).encode()


@given(streams(), st.lists(st.integers(0, 200), max_size=12))
@settings(max_examples=250, deadline=None)
def test_case_18_any_cut_gives_the_same_frames_and_loses_no_byte(body: bytes, cuts: list[int]) -> None:
    whole = split([body])
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    assert split([body[a:b] for a, b in pairwise(edges)]) == whole
    assert split([bytes([byte]) for byte in body]) == whole
    frames, rest, _ = whole
    assert b"".join(frame.raw for frame in frames) + (rest.raw if rest else b"") == body


def naive(body: bytes) -> list[bytes]:
    """The data of each event by the letter of the standard, all bytes at hand."""
    text = body.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data = [], None
    for line in text.split("\n")[:-1]:
        if line == "":
            if data is not None:
                events.append("\n".join(data).encode())
            data = None
        elif line == "data" or line.startswith("data:"):
            data = [*(data or []), line[5:].removeprefix(" ")]
    return events


@given(streams())
@settings(max_examples=250, deadline=None)
def test_case_18_data_is_what_the_standard_says(body: bytes) -> None:
    frames, rest, _ = split([body])
    seen = [frame.data for frame in frames if frame.data is not None]
    if rest is not None and rest.data is not None and rest.raw.endswith(b"\r\r"):
        seen.append(rest.data)
    assert seen[: len(naive(body))] == naive(body)[: len(seen)]
    assert len(naive(body)) - len(seen) in (0, 1)  # 1: the end of the last event is a CR that is still held


def test_case_18_fields() -> None:
    assert one("data: x\n\n") == SseFrame(b"data: x\n\n", b"", b"x")
    assert one("data:x\r\n\r\n").data == b"x"
    assert one("data:  x\n\n").data == b" x"
    assert one("data: a\ndata:b\ndata\n\n").data == b"a\nb\n"
    assert one("event: error\ndata: {}\n\n").event == b"error"
    assert one("\ufeffdata: x\n\n").data == b"x"
    assert one("id: 1\nretry: 5\ndata: x\n\n").data == b"x"
    assert one(": ping\n\n").is_comment_only and one(": ping\n\n").data is None
    assert one("id: 1\n\n").is_comment_only
    assert one("\n").is_comment_only and one("\r\n").is_comment_only
    assert not one("data:\n\n").is_comment_only and one("data:\n\n").data == b""
    assert not one("event: ping\n\n").is_comment_only


def test_case_18_a_bom_counts_only_at_the_very_start() -> None:
    frames, _, _ = split(["data: a\n\n\ufeffdata: b\n\n".encode()])
    assert [frame.data for frame in frames] == [b"a", None]


def test_case_18_fifty_events_in_one_read() -> None:
    frames, rest, _ = split([b"".join(b"data: %d\n\n" % n for n in range(50))])
    assert [frame.data for frame in frames] == [b"%d" % n for n in range(50)] and rest is None


def test_line_separators_inside_json_do_not_split() -> None:
    text = 'data: {"a":"\u2028\u2029\x85\x0b\x0c\x1c"}\n\n'
    assert one(text).raw == text.encode()


def test_case_18_an_event_above_the_cap_is_an_error_for_any_cut_and_what_came_before_stands() -> None:
    body = b"data: ok\n\ndata: " + b"x" * 100 + b"\n\ndata: later\n\n"
    for size in (1, 3, 50, 109, 200):
        frames, rest, error = split([body[at : at + size] for at in range(0, len(body), size)], 100)
        assert [frame.data for frame in frames] == [b"ok"] and rest is None
        assert error == "one event of the stream is larger than 100 bytes"
    assert split([b"data: " + b"x" * 92 + b"\n\n"], 100)[0][0].raw[6:-2] == b"x" * 92


def test_case_18_memory_is_bounded_while_an_event_is_open() -> None:
    splitter = SseSplitter(1000)
    for _ in range(100):
        splitter.feed(b"x" * 100)
    assert splitter.error and len(splitter._held) == 0


def test_case_18_a_two_megabyte_event_is_read_in_linear_time() -> None:
    body = b"data: " + b"y" * 2_000_000 + b"\n\n"
    # Were it quadratic, the small reads would copy 125 GB.
    for size, seconds in ((65536, 5.0), (16, 25.0)):
        begun = time.process_time()
        frames, _, _ = split([body[at : at + size] for at in range(0, len(body), size)], 3_000_000)
        assert len(frames) == 1 and time.process_time() - begun < seconds


def test_a_crlf_stream_in_one_read_is_not_rescanned_for_every_event() -> None:
    def seconds(events: int) -> float:
        body = b"data: some text here\r\n\r\n" * events
        gc.disable()  # a collection costs by all that lives in this process, and would be taken for ours
        try:
            begun = time.process_time()
            assert len(split([body], 100)[0]) == events
            return time.process_time() - begun
        finally:
            gc.enable()

    seconds(100)
    # The best of three each: the machine has slow moments. Were it quadratic: 100 times.
    few, many = (min(seconds(events) for _ in range(3)) for events in (2_000, 20_000))
    assert many < 50 * max(few, 0.002)

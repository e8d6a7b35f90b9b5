"""Splits a byte stream into server-sent events, without decoding any text.

Theory of operation. An event ends at the first empty line. A line ends with LF, CRLF or a lone CR, and a stream may mix
them. Bytes of the event that is still open wait in ``_held``; ``_scan`` is how far they are known to hold no end, so
that a big event that arrives in small reads is searched once, not once per read. While no CR was ever seen (all known
runtimes) an end is simply two LF and one ``find`` does the work; after the first CR a walk over the lines takes over
for good.

A CR that is the very last byte we have may be half of a CRLF, so an event that ends there is held until the next byte,
or ``finish``. That keeps the result independent of how the bytes were cut.

Splitting on bytes means that U+2028 inside JSON is not a line end, and a character cut in two is never seen.
"""

from __future__ import annotations

import re

from attrs import field, frozen

EVENT_BYTES_MAX = 8 * 1024 * 1024
"""Default cap of one event. The largest known real ones (tool arguments, images in an answer) have a few megabytes."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"
_CR, _LF = 13, 10


@frozen
class SseFrame:
    """One event. ``raw`` is every byte of it, the empty line that ends it included.

    ``event`` is the last ``event:`` field, "" without one. ``data`` joins the ``data:`` lines with LF; None when there
    is no such line. ``is_comment_only`` marks a frame that carries neither: comments, ``id:``, ``retry:``, blank lines.
    """

    raw: bytes = field(repr=lambda b: f"{len(b)} bytes")
    event: bytes = b""
    data: bytes | None = None
    is_comment_only: bool = False


class SseSplitter:
    """Feed bytes in any split, get the same frames. After an overflow ``error`` says so and nothing more comes out."""

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._held = bytearray()
        self._scan = 0
        self._seen_cr = False
        self._seen_frame = False
        self.error = ""

    def feed(self, data: bytes) -> list[SseFrame]:
        """The frames completed by ``data``."""
        if self.error or not data:
            return []
        window: bytes | bytearray = data
        if self._held:
            self._held += data
            window = self._held
        frames: list[SseFrame] = []
        start, scan = 0, self._scan
        while (end := self._frame_end(window, start, scan)) >= 0:
            if end - start > self._event_bytes_max:
                break
            frames.append(self._parse(bytes(window[start:end])))
            start = scan = end
        self._keep(window, start)
        return frames

    def finish(self) -> SseFrame | None:
        """The bytes after the last empty line as a frame, or None. A held CR counts as the line end it is."""
        if self.error or not self._held:
            return None
        raw = bytes(self._held)
        self._held.clear()
        return self._parse(raw)

    def _keep(self, window: bytes | bytearray, start: int) -> None:
        """Hold what is left from ``start`` on, and remember that no event ends in it."""
        left = len(window) - start
        if left > self._event_bytes_max:
            self.error = f"one event of the stream is larger than {self._event_bytes_max} bytes"
            self._held.clear()
            return
        if window is self._held:
            del self._held[:start]
        else:
            self._held += window[start:]
        # The end is at most four bytes long (CRLF CRLF), so the last three may be its beginning.
        self._scan = max(0, left - 3)

    def _frame_end(self, window: bytes | bytearray, start: int, scan: int) -> int:
        """Where the event that begins at ``start`` ends, or -1. No end begins before ``scan``."""
        if start >= len(window):
            return -1
        if window[start] == _LF:
            return start + 1
        if window[start] == _CR:
            if start + 1 == len(window):
                return -1
            return start + 2 if window[start + 1] == _LF else start + 1
        if not self._seen_cr:
            end = window.find(b"\n\n", scan)
            if window.find(b"\r", scan, end if end >= 0 else len(window)) < 0:
                return end + 2 if end >= 0 else -1
            self._seen_cr = True
        return _end_by_lines(window, scan)

    def _parse(self, raw: bytes) -> SseFrame:
        first, self._seen_frame = not self._seen_frame, True
        if raw.startswith(b"data:"):  # nearly every event is one such line
            lf, size = raw.find(b"\n"), len(raw)
            if lf == size - 2 and not self._seen_cr:
                return SseFrame(raw, b"", raw[6:-2] if raw[5] == 32 else raw[5:-2])
            if lf == size - 3 and raw.find(b"\r") == size - 4 and raw.endswith(b"\r\n\r\n"):
                return SseFrame(raw, b"", raw[6:-4] if raw[5] == 32 else raw[5:-4])
        text = raw[len(_BOM) :] if first and raw.startswith(_BOM) else raw
        event = b""
        data: list[bytes] = []
        has_event = False
        for line in _LINE_END.split(text):
            name, _, value = line.partition(b":")
            value = value[1:] if value.startswith(b" ") else value
            if name == b"data":
                data.append(value)
            elif name == b"event":
                event, has_event = value, True
        return SseFrame(raw, event, b"\n".join(data) if data else None, not data and not has_event)


def _end_by_lines(window: bytes | bytearray, position: int) -> int:
    """Where the first two line ends in a row from ``position`` on end, or -1; any kind of line end, in any mixture."""
    size = len(window)
    cr = window.find(b"\r", position)
    while True:
        if 0 <= cr < position:
            cr = window.find(b"\r", position)
        lf = window.find(b"\n", position, cr if cr >= 0 else size)
        if lf >= 0:
            position = lf + 1
        elif cr >= 0:
            position = cr + 2 if window[cr + 1 : cr + 2] == b"\n" else cr + 1
        else:
            return -1
        following = window[position : position + 2]
        if following.startswith(b"\n"):
            return position + 1
        if following.startswith(b"\r"):
            # A CR at the very end may be half of a CRLF: wait for the next byte.
            return -1 if len(following) == 1 else position + 1 + (following == b"\r\n")

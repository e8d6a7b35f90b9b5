"""Splits a byte stream into lines of JSON (``application/x-ndjson``).

A line is everything up to and including LF. Bytes of the open line wait in ``_held``; ``_scan`` is how far they are
known to hold no LF, so that a long line that arrives in small reads is searched once. The last line may lack its LF.
"""

from __future__ import annotations

from .framing import EVENT_BYTES_MAX


class NdjsonSplitter:
    """Feed bytes in any split, get the same lines. After an overflow ``error`` says so and nothing more comes out."""

    def __init__(self, line_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._held = bytearray()
        self._scan = 0
        self.error = ""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by ``data``, each with its LF."""
        if self.error:
            return []
        self._held += data
        lines: list[bytes] = []
        start = 0
        while (end := self._held.find(b"\n", max(start, self._scan))) >= 0:
            if end + 1 - start > self._line_bytes_max:
                break
            lines.append(bytes(self._held[start : end + 1]))
            start = end + 1
        del self._held[:start]
        self._scan = len(self._held)
        if self._scan > self._line_bytes_max:
            self.error = f"one line of the stream is larger than {self._line_bytes_max} bytes"
            self._held.clear()
        return lines

    def finish(self) -> bytes | None:
        """The bytes after the last LF, or None."""
        rest = bytes(self._held)
        self._held.clear()
        return None if self.error or not rest else rest

"""Request bodies in gzip and zstd, decoded piece by piece and never beyond a cap.

A few kilobytes can decode to gigabytes. So every step takes a bounded piece of input and gives a bounded piece of
output; what a decoder has given in all is held against the cap after each, and between two steps the caller lets others
run. Several codings (``Content-Encoding: gzip, zstd``) are undone from the last to the first, each with its own cap.

*Memory*: one piece per coding beside the result; zstd's window is bounded as RFC 9659 wants it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from ..errors import BodyTooLargeError, InvalidRequestError, MediaTypeError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    try:
        from backports import zstd
    except ImportError:  # the zipapp carries nothing that was compiled
        zstd = None  # type: ignore[assignment,unused-ignore]

PIECE_BYTES = 64 * 1024
CODINGS_MAX = 3
PARTS_MAX = 4096  # gzip members or zstd frames in a row; an empty one costs 20 bytes to send and far more to decode
ZSTD_WINDOW_LOG_MAX = 23  # 8 MiB
SUPPORTED = "gzip" if zstd is None else "gzip or zstd"


class _Part(Protocol):
    """One gzip member or zstd frame."""

    def decompress(self, data: bytes, max_length: int) -> bytes: ...

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...


class _GzipMember:
    """zlib's object with the manners of the newer ones: input it has not come to stays inside."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(wbits=31)
        self._full = False

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)
        self._full = len(out) == max_length
        return out

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self.eof and not self._zlib.unconsumed_tail and not self._full

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


def _zstd_frame() -> _Part:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG_MAX})


_CODINGS: Mapping[str, Callable[[], _Part]] = MappingProxyType(
    {"gzip": _GzipMember, "x-gzip": _GzipMember, **({} if zstd is None else {"zstd": _zstd_frame})})
_FAULTS = (zlib.error, EOFError, *(() if zstd is None else (zstd.ZstdError,)))


class _Decoder:
    """Undoes one coding."""

    def __init__(self, name: str, bytes_max: int) -> None:
        self._name = name
        self._new = _CODINGS[name]
        self._bytes_max = bytes_max
        self._part: _Part | None = None
        self._parts = 0
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of output; an empty one after work that gave none. *Errors*: see :class:`BodyDecoder`."""
        for start in range(0, len(data), PIECE_BYTES):
            rest = data[start : start + PIECE_BYTES]
            while rest:
                if self._part is None:
                    rest = self._begin(rest)
                    if not rest:
                        break
                part = self._part
                assert part is not None
                yield self._step(part, rest)
                while not part.eof and not part.needs_input:
                    yield self._step(part, b"")
                rest = b""
                if part.eof:
                    rest, self._part = part.unused_data, None

    def finish(self) -> None:
        if self._part is not None or not self._parts:
            raise InvalidRequestError(f"the {self._name} body ends too early")

    def _begin(self, data: bytes) -> bytes:
        """Start the next member or frame; the input that belongs to it."""
        if self._parts and self._new is _GzipMember:
            data = data.lstrip(b"\0")  # gzip may be padded
            if not data:
                return data
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise InvalidRequestError(f"the {self._name} body has more than {PARTS_MAX} parts")
        self._part = self._new()
        return data

    def _step(self, part: _Part, data: bytes) -> bytes:
        try:
            out = part.decompress(data, PIECE_BYTES)
        except _FAULTS as error:
            raise InvalidRequestError(f"the body cannot be decoded as {self._name}: {error}") from error
        self._size += len(out)
        if self._size > self._bytes_max:
            raise too_large(self._size, self._bytes_max)
        return out


class BodyDecoder:
    """Undoes all codings of one body. Feed it, then :meth:`finish`.

    *Errors*: ``BodyTooLargeError`` above ``bytes_max`` decoded bytes, ``InvalidRequestError`` for a body that is broken
    or ends too early.
    """

    def __init__(self, codings: Sequence[str], bytes_max: int) -> None:
        self._decoders = [_Decoder(name, bytes_max) for name in reversed(codings)]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Pieces of the decoded body, some of them empty; between two of them others should get their turn."""
        return _through(self._decoders, data)

    def finish(self) -> None:
        """The body ended; whether it might is checked here."""
        for decoder in self._decoders:
            decoder.finish()


def _through(decoders: Sequence[_Decoder], data: bytes) -> Iterator[bytes]:
    if not decoders:
        yield data
        return
    for piece in decoders[0].feed(data):
        if piece:
            yield from _through(decoders[1:], piece)
        else:
            yield piece


def codings_of(values: Sequence[bytes]) -> list[str]:
    """The codings that ``Content-Encoding`` names, in the order they were applied; ``identity`` is none.

    *Errors*: ``MediaTypeError``, which says what is supported.
    """
    named = [name.strip().lower() for value in values for name in value.decode("latin-1").split(",")]
    codings = [name for name in named if name not in ("", "identity")]
    unknown = [name for name in codings if name not in _CODINGS]
    if unknown:
        raise MediaTypeError(f"Content-Encoding {unknown[0][:40]!r} is not supported; send the body as {SUPPORTED}, or "
                             "as it is")
    if len(codings) > CODINGS_MAX:
        raise MediaTypeError(f"Content-Encoding names {len(codings)} codings; {CODINGS_MAX} are the most")
    return codings


def too_large(size: int, limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the request body has at least {size} bytes; server.body_bytes_max allows {limit} bytes")

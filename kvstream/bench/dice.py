"""Chance without a generator: a number is a hash of the seed and of what it is for.

The same seed gives the same load on every machine and in every order of asking, and two things that are named
differently never share a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b

_NUMBERS_PER_DIGEST = 32  # of 16 bits each, in the 64 bytes of a digest


def draw(seed: int, *name: object) -> float:
    """A number in [0, 1), evenly spread over names."""
    digest = blake2b(_key(seed, name), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def exponential(seed: int, *name: object) -> float:
    """A number with mean 1, as the waiting times of a Poisson process have them."""
    return -math.log1p(-draw(seed, *name))


def words(source: Sequence[str], count: int, seed: int, *name: object) -> Iterator[str]:
    """``count`` words of ``source``. A longer row begins with the shorter one of the same name."""
    key = _key(seed, name)
    digest = b""
    for number in range(count):
        place = number % _NUMBERS_PER_DIGEST
        if place == 0:
            digest = blake2b(key + number.to_bytes(8, "little"), digest_size=64).digest()
        yield source[int.from_bytes(digest[2 * place : 2 * place + 2], "little") % len(source)]


def _key(seed: int, name: tuple[object, ...]) -> bytes:
    return "\0".join(map(str, (seed, *name))).encode()

"""From a prompt to page keys, and from characters to a token estimate.

A page key names one full page *in its context*: the digest of page i covers pages 0..i, because it hashes the digest
before it together with the page's own content. One pass, linear in the prompt. The chain starts from a salt, so equal
text of two models or two clients (when they must not share) never meets in the tree.

Exact token ids are best. Where the runtime has no tokenizer the rendered text itself is cut into pieces of a fixed
number of bytes from its start: any two prompts with a common beginning then have the same first keys, which is all
that prefix accounting needs. Cutting by *estimated* tokens would not do: the estimate changes as it learns.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import ClassVar, Final

from attrs import evolve, frozen

from .types import PageKey

DIGEST_BYTES: Final = 16
SALT_PERSON: Final = b"kvstream-salt"

# A unit is what tokenizers rarely merge across: a run of Latin letters, up to three digits, one character of a script
# without spaces (CJK, kana, Hangul and everything else beyond Latin), one mark.
_UNIT: Final = re.compile(r"[A-Za-z\u00c0-\u024f]+|[0-9]{1,3}|[^\sA-Za-z\u00c0-\u024f0-9]")


def salt(model: str, client: str = "") -> bytes:
    """The start of a chain. Leave ``client`` empty where clients may share prefixes."""
    named = model.encode("utf-8", "surrogatepass")
    owner = client.encode("utf-8", "surrogatepass")
    head = len(named).to_bytes(8, "little")  # length first, so that ("ab", "c") and ("a", "bc") differ
    return blake2b(head + named + owner, digest_size=DIGEST_BYTES, person=SALT_PERSON).digest()


def page_keys(token_ids: Sequence[int], page_tokens: int, salt: bytes) -> tuple[PageKey, ...]:
    """Keys of the full pages of a prompt given as token ids (0 to 2**32 - 1)."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return _chain(packed.tobytes(), page_tokens * packed.itemsize, salt)


def text_keys(text: bytes, page_tokens: int, salt: bytes, bytes_per_token: int = 4) -> tuple[PageKey, ...]:
    """Keys of the full pieces of ``page_tokens * bytes_per_token`` bytes of a rendered prompt."""
    return _chain(text, page_tokens * bytes_per_token, salt)


def _chain(packed: bytes, step: int, digest: bytes) -> tuple[PageKey, ...]:
    if step < 1:
        raise ValueError("a page has at least one token")
    keys = []
    for start in range(0, len(packed) - step + 1, step):
        content = packed[start : start + step]
        digest = blake2b(digest + content, digest_size=DIGEST_BYTES).digest()
        keys.append(PageKey(digest, content))
    return tuple(keys)


def common_pages(one: Sequence[PageKey], other: Sequence[PageKey]) -> int:
    """How many pages two prompts have in common from their start. Digests are chained, so equal ones at a page mean
    equal ones before it: found by bisection, whatever the length. Of contents only the last is compared: a hash is a
    hint, and what is counted here is checked by the runtime, token by token."""
    low, high = 0, min(len(one), len(other))
    if not high or one[0].digest != other[0].digest:
        return 0
    if one[high - 1].digest == other[high - 1].digest:
        low = high
    while low < high:
        middle = (low + high) // 2
        if one[middle].digest == other[middle].digest:
            low = middle + 1
        else:
            high = middle
    return low if one[low - 1].content == other[low - 1].content else 0


@frozen
class TextSize:
    """How long a text is, in two measures that do not need a tokenizer."""

    chars: int
    units: int

    @classmethod
    def of(cls, text: str) -> TextSize:
        return cls(len(text), sum(1 for _ in _UNIT.finditer(text)))


@frozen
class TokenEstimator:
    """Tokens from characters and units, taking the larger guess, since under-counting overflows a pool while
    over-counting only waits. Learns both ratios from what runtimes report; each lesson moves them by ``ALPHA``.

    Images, audio and base64 are not text: the caller leaves them out and adds what they cost.
    """

    chars_per_token: float = 4.0
    units_per_token: float = 1.0
    samples: int = 0

    ALPHA: ClassVar[float] = 0.2
    CHARS_RANGE: ClassVar[tuple[float, float]] = (1.5, 8.0)
    UNITS_RANGE: ClassVar[tuple[float, float]] = (0.3, 3.0)
    SAMPLE_TOKENS_MIN: ClassVar[int] = 16  # below this, template tokens drown the ratio

    def estimate(self, text: str) -> int:
        return self.estimate_size(TextSize.of(text))

    def estimate_size(self, size: TextSize) -> int:
        return math.ceil(max(size.chars / self.chars_per_token, size.units / self.units_per_token))

    def learn(self, size: TextSize, tokens: int) -> TokenEstimator:
        """The estimator after a runtime counted ``tokens`` for a text of that size. Useless samples change nothing."""
        if tokens < self.SAMPLE_TOKENS_MIN or size.chars < 1 or size.units < 1:
            return self
        return evolve(
            self,
            chars_per_token=self._moved(self.chars_per_token, size.chars / tokens, self.CHARS_RANGE),
            units_per_token=self._moved(self.units_per_token, size.units / tokens, self.UNITS_RANGE),
            samples=self.samples + 1,
        )

    def _moved(self, ratio: float, sample: float, span: tuple[float, float]) -> float:
        # The sample is clamped, not only the result: one absurd count must not undo ten good ones.
        sample = min(max(sample, span[0]), span[1])
        return ratio + self.ALPHA * (sample - ratio)

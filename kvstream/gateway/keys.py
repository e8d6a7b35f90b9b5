"""Who a key belongs to, and how often it may be used.

A key that comes in is compared, by its digest and in constant time, with *every* key there is. So how long the answer
takes tells neither whether a guess was near nor at which key the search ended, and a wrong key costs some microseconds.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from attrs import define

from ..config_auth import KEY_CHARS_MAX, ClientKey

MINUTE_S = 60.0


@define
class _Bucket:
    """Calls in hand at ``at`` (seconds): at most a minute's worth, at least one, filled evenly."""

    rate: float
    tokens: float
    at: float


class Keys:
    """The keys of the gateway. :meth:`replace` puts others in their place; requests in hand are not touched."""

    def __init__(self, entries: Sequence[ClientKey] = ()) -> None:
        self._entries = tuple(entries)
        self._buckets: dict[str, _Bucket] = {}

    def replace(self, entries: Sequence[ClientKey]) -> None:
        """Use these from now on. What a name has used up of an unchanged rate stays used up."""
        self._entries = tuple(entries)
        rates = {entry.name: entry.rate for entry in entries}
        self._buckets = {name: bucket for name, bucket in self._buckets.items() if rates.get(name) == bucket.rate}

    @property
    def enabled(self) -> bool:
        """Whether anybody needs a key."""
        return bool(self._entries)

    def find(self, secrets: Iterable[bytes]) -> ClientKey | None:
        """The one client that all of ``secrets`` that are known belong to; None when there is none, or more than one.
        """
        digests = [digest_of(secret) for secret in secrets if len(secret) <= KEY_CHARS_MAX]
        found = [entry for entry in self._entries for digest in digests if hmac.compare_digest(digest, entry.digest)]
        return found[0] if found and all(entry is found[0] for entry in found) else None

    def try_spend(self, key: ClientKey, now: float) -> float | None:
        """Take one call from the key's minute. None: taken. Else nothing was taken, and so many seconds later one
        will be there (unless somebody else takes it)."""
        if not key.rate:
            return None
        most = max(1.0, key.rate)
        bucket = self._buckets.setdefault(key.name, _Bucket(key.rate, most, now))
        bucket.tokens = min(most, bucket.tokens + (now - bucket.at) * key.rate / MINUTE_S)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * MINUTE_S / key.rate
        bucket.tokens -= 1
        return None


def digest_of(secret: bytes) -> bytes:
    """What keys are compared by."""
    return hashlib.sha256(secret).digest()

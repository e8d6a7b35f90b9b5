"""What is written beside a saved file: whose it is, which tokens it holds, and how to tell that it is whole.

JSON, so that a person can read it. The page keys are rebuilt from the packed token ids and the digest of the first
page: what came before that (a salt of model name and client) cannot be, nor need it be. The last digest must come out
again, and ``check`` is over everything, so a damaged manifest is known as one.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, Final

from attrs import evolve, field, frozen

from ..core.tokens import DIGEST_BYTES, text_keys
from ..core.types import PageKey
from .kvfiles import NAME
from .saving import Gone

VERSION: Final = 1
FACTS_MAX: Final = 64
FACT_CHARS_MAX: Final = 4096


class ManifestError(Exception):
    """Not a manifest that can be trusted. ``foreign``: one of another version, which is not ours to judge."""

    def __init__(self, message: str, *, foreign: bool = False) -> None:
        super().__init__(message)
        self.foreign = foreign


@frozen
class Manifest:
    """One kept file. ``file`` is its name on the runtime's disk, ``name`` what the scheduler calls it. ``tokens`` it
    holds, of which ``keys`` name the full pages, in ``size`` bytes. ``checksum`` is empty where we cannot read the
    file. Times are seconds of the wall clock."""

    name: str
    file: str
    identity: str
    facts: Mapping[str, str]
    keys: tuple[PageKey, ...] = field(repr=lambda keys: f"{len(keys)} pages")
    tokens: int
    size: int
    checksum: str
    created: float
    used: float
    hits: int = 0
    why: str = ""

    @property
    def page_bytes(self) -> int:
        return len(self.keys[0].content)

    def dump(self) -> bytes:
        body = {
            "kvstream": VERSION, "name": self.name, "file": self.file,
            "identity": self.identity, "identity_facts": dict(self.facts),
            "page_tokens": self.page_bytes // 4, "pages": len(self.keys),
            "first": self.keys[0].digest.hex(), "last": self.keys[-1].digest.hex(),
            "ids": base64.b64encode(b"".join(key.content for key in self.keys)).decode("ascii"),
            "tokens": self.tokens, "bytes": self.size, "checksum": self.checksum,
            "created": self.created, "used": self.used, "hits": self.hits, "why": self.why,
        }
        return json.dumps({**body, "check": _check(body)}, indent=1).encode("ascii")

    @classmethod
    def load(cls, data: bytes) -> Manifest:
        """*Errors*: ``ManifestError``; nothing else, whatever the bytes are."""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"it is not JSON ({error})") from None
        if not isinstance(body, dict):
            raise ManifestError("it is not an object")
        check = body.pop("check", None)
        version = body.get("kvstream")
        if isinstance(version, int) and version > VERSION:
            raise ManifestError(f"it has version {version}", foreign=True)
        if version != VERSION or check != _check(body):
            raise ManifestError("it is damaged")
        try:
            return cls._read(body)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ManifestError(f"it lacks something, or has it wrong ({type(error).__name__}: {error})") from None

    @classmethod
    def _read(cls, body: Mapping[str, Any]) -> Manifest:
        keys = keys_of(base64.b64decode(body["ids"], validate=True), bytes.fromhex(body["first"]),
                       body["page_tokens"] * 4)
        if len(keys) != body["pages"] or keys[-1].digest.hex() != body["last"]:
            raise ValueError("the pages do not chain")
        if not (NAME.fullmatch(body["name"]) and NAME.fullmatch(body["file"])):
            raise ValueError("no name of a file of ours")
        counts = (body["tokens"], body["bytes"], body["hits"])
        if any(type(count) is not int or count < 0 for count in counts) or body["tokens"] < 1:
            raise ValueError("a count is wrong")
        if not (math.isfinite(body["created"]) and math.isfinite(body["used"])):
            raise ValueError("a time is wrong")
        return cls(
            str(body["name"]), str(body["file"]), str(body["identity"]),
            {str(name): str(value) for name, value in body["identity_facts"].items()}, keys, body["tokens"],
            body["bytes"], str(body["checksum"]), float(body["created"]), float(body["used"]), body["hits"],
            str(body["why"]))

    def touched(self, used: float, hits: int) -> Manifest:
        return evolve(self, used=used, hits=hits)


def bounded_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """What a person needs to recognise a model, however much there is."""
    return {name[:FACT_CHARS_MAX]: value[:FACT_CHARS_MAX] for name, value in list(facts.items())[:FACTS_MAX]}


def keys_of(packed: bytes, first: bytes, page_bytes: int) -> tuple[PageKey, ...]:
    """The keys of whole pages, given the first one's digest. *Errors*: ``ValueError``."""
    if page_bytes < 4 or not packed or len(packed) % page_bytes or len(first) != DIGEST_BYTES:
        raise ValueError("no whole pages")
    keys = [PageKey(first, packed[:page_bytes])]
    return tuple(keys) + longer(keys[0], packed[page_bytes:], page_bytes)


def longer(last: PageKey, packed: bytes, page_bytes: int) -> tuple[PageKey, ...]:
    """Keys of the full pages of ``packed``, which comes after the page ``last``."""
    return text_keys(packed, page_bytes, last.digest, 1)


def _check(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def why_gone(gone: Manifest, others: Iterable[Manifest]) -> Gone:
    """Why a good file is deleted. Not for want of room, if one of the others begins with it, or if it was the state of
    a request that needs it no more."""
    if gone.why == "swap":
        return "done"
    count = len(gone.keys)
    return "replaced" if any(other.tokens >= gone.tokens and other.keys[:count] == gone.keys
                             for other in others) else "quota"

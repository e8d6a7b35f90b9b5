"""Why a prompt does not find its prefix in the cache again: a value that changed in the middle of what else is equal.

Theory of operation. A bounded memory holds the last prompts of each owner (client and model) as flat bytes. A new
prompt is laid beside the one it shares the longest beginning with. A normal next turn extends it, and another
conversation goes its own way for good; but a clock in the system prompt makes both differ in a few bytes and then run
on in step. So after a difference both are searched, a few bytes ahead, for a place where they agree again; if they do,
and enough follows, that difference has cost the runtime everything that follows. Up to ``CHANGES_MAX`` differences are
passed that way, so a clock and a counter are seen as what they are.

Findings are kept by owner, place and word, with how often and what it cost. Of the prompts only the differing run and
a few bytes of its own word before it ever leave this file, and of a long run only its length.

Cost: one pass to make the bytes, comparisons at the speed of ``memcmp``; nothing beyond ``PROMPT_BYTES_MAX`` is looked
at. No clock: the oldest prompt is the one used least recently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from json import dumps
from typing import Any, Final

from attrs import evolve, field, frozen

from .volatile import LIST_FIELDS, SYSTEM_FIELDS, SYSTEM_ROLES, pattern_at

PROMPT_BYTES_MAX: Final = 256 * 1024  # of one prompt that are looked at
MEMORY_BYTES_MAX: Final = 8 * 1024 * 1024  # of all prompts of a lane
PROMPTS_MAX: Final = 64
PROMPTS_PER_OWNER: Final = 4
FINDINGS_MAX: Final = 32
CHANGES_MAX: Final = 8
RUN_BYTES_MAX: Final = 64  # a longer difference is content, not a value
ANCHOR_BYTES: Final = 16  # so many equal bytes are no coincidence
LOST_BYTES_MIN: Final = 64
LOST_BYTES_MIN_LAST: Final = 1024  # for the last message: a template around a word is a normal way to ask
BEFORE_CHARS: Final = 4
SHOWN_CHARS: Final = 8

Owner = tuple[str, str]


@frozen
class Part:
    """One message, or the system text beside the messages. ``start`` is its first byte in the flat prompt."""

    where: str
    system: bool
    start: int


@frozen
class Prompt:
    """A prompt laid out flat. ``tools`` has a digest per tool in their order, ``tools_sorted`` the same blind to the
    order of tools and keys."""

    flat: bytes = field(repr=False)
    parts: tuple[Part, ...]
    tools: tuple[bytes, ...] = ()
    tools_sorted: tuple[bytes, ...] = ()
    tools_bytes: int = 0

    @classmethod
    def read(cls, view: Mapping[str, Any]) -> Prompt:
        """From a request body of any of the APIs; empty when it holds no text."""
        pieces: list[bytes] = []
        parts: list[Part] = []
        size = 0
        for where, role, text in _texts(view):
            if size >= PROMPT_BYTES_MAX:
                break
            head = f"\0{role}\0".encode("utf-8", "surrogatepass") if role else b""
            piece = head + text[:PROMPT_BYTES_MAX].encode("utf-8", "surrogatepass")
            parts.append(Part(where, not role or role in SYSTEM_ROLES, size + len(head)))
            pieces.append(piece)
            size += len(piece)
        return cls(b"".join(pieces)[:PROMPT_BYTES_MAX], tuple(parts), *_tools(view.get("tools")))

    def part_at(self, offset: int) -> Part:
        """The part that holds a byte of ``flat``."""
        return next((part for part in reversed(self.parts) if part.start <= offset), self.parts[0])


@frozen
class Finding:
    """One thing that costs a client its prefix. ``byte`` is where in the message ``where`` the prompts first differ;
    ``pattern`` the name of a known kind of volatile value, or empty. Tokens are what re-aligned after it, as counted
    for the latest request and summed over all ``requests``."""

    kind: str  # "diverges" or "tools reordered"
    where: str
    byte: int
    excerpt: str
    pattern: str
    tokens_lost: int
    tokens_lost_total: int = 0
    requests: int = 0
    model: str = ""

    @property
    def sentence(self) -> str:
        if self.kind != "diverges":
            return f"{self.kind}: the same tools in another order; the prefix ends at their beginning"
        return f"prefix diverges at byte {self.byte} of {self.where}: `{self.excerpt}`"


class RecentPrompts:
    """The memory and the findings of one lane."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[Owner, list[Prompt]] = OrderedDict()
        self._findings: OrderedDict[tuple[Owner, str, str, int], Finding] = OrderedDict()
        self.bytes = 0

    def look(self, owner: Owner, prompt: Prompt, tokens: int) -> Finding | None:
        """Compare a prompt of ``tokens`` tokens with the owner's recent ones, remember it; what was found."""
        if not prompt.flat:
            return None
        recent = self._prompts.get(owner, [])
        best = max(reversed(recent), key=lambda old: _shared(old, prompt), default=None)  # of equals the latest
        found = None if best is None else diagnose(best, prompt, tokens)
        self._remember(owner, prompt)
        return None if found is None else self._note(owner, *found)

    def findings(self) -> list[Finding]:
        """The worst first."""
        return sorted(self._findings.values(), key=lambda found: -found.tokens_lost_total)

    def _note(self, owner: Owner, word: int, found: Finding) -> Finding:
        key = (owner, found.kind, found.where, word)
        before = self._findings.get(key, found)
        found = evolve(found, model=owner[1], requests=before.requests + 1,
                       tokens_lost_total=before.tokens_lost_total + found.tokens_lost)
        self._findings[key] = found
        self._findings.move_to_end(key)
        if len(self._findings) > FINDINGS_MAX:
            self._findings.popitem(last=False)
        return found

    def _remember(self, owner: Owner, prompt: Prompt) -> None:
        mine = self._prompts.setdefault(owner, [])
        self._prompts.move_to_end(owner)
        mine.append(prompt)
        self.bytes += len(prompt.flat)
        if len(mine) > PROMPTS_PER_OWNER:
            self.bytes -= len(mine.pop(0).flat)
        while self.bytes > MEMORY_BYTES_MAX or sum(map(len, self._prompts.values())) > PROMPTS_MAX:
            oldest = next(iter(self._prompts))
            self.bytes -= len(self._prompts[oldest].pop(0).flat)
            if not self._prompts[oldest]:
                del self._prompts[oldest]


def diagnose(old: Prompt, new: Prompt, tokens: int) -> tuple[int, Finding] | None:
    """(where the changed word begins in its part, the finding), or None where nothing was lost that need not be."""
    first, lost = _walk(old.flat, new.flat)
    share = tokens / max(1, len(new.flat) + new.tools_bytes)
    if new.tools != old.tools:
        kept = (len(new.flat) if first is None else first[1]) + lost
        if new.tools_sorted != old.tools_sorted or new.tools_bytes + kept < LOST_BYTES_MIN:
            return None
        kind = "tools reordered" if sorted(new.tools) == sorted(old.tools) else "keys of tools reordered"
        return 0, Finding(kind, "tools", 0, "", "", round((new.tools_bytes + kept) * share))
    if first is None:
        return None
    part = new.part_at(first[1])
    least = LOST_BYTES_MIN if part.system or part is not new.parts[-1] else LOST_BYTES_MIN_LAST
    if lost < least or first[1] < part.start:
        return None
    word = _word_start(new.flat, first[1], part.start)
    return word - part.start, Finding(
        "diverges", part.where, first[1] - part.start, _excerpt(old.flat, new.flat, word, first),
        _pattern(new.flat, first[1], first[3]), round(lost * share))


# --- comparing two prompts --------------------------------------------------------------------------------------------

Change = tuple[int, int, int, int]  # begins in old, in new, ends in old, in new


def _walk(old: bytes, new: bytes) -> tuple[Change | None, int]:
    """The first change, and how many bytes re-align after it."""
    first: Change | None = None
    i = j = lost = 0
    for _ in range(CHANGES_MAX + 1):
        run = _common_bytes(old, new, i, j)
        lost += run if first is not None else 0
        i, j = i + run, j + run
        if i >= len(old) or j >= len(new):
            break
        again = _realigned(old, new, i, j)
        if again is None:
            break
        first = first or (i, j, *again)
        i, j = again
    return first, lost


def _realigned(old: bytes, new: bytes, i: int, j: int) -> tuple[int, int] | None:
    """The nearest place after (i, j) where both go on with the same ``ANCHOR_BYTES``."""
    window = old[i : i + RUN_BYTES_MAX + ANCHOR_BYTES]
    for skipped in range(RUN_BYTES_MAX + 1):
        anchor = new[j + skipped : j + skipped + ANCHOR_BYTES]
        if len(anchor) < ANCHOR_BYTES:
            return None
        at = window.find(anchor)
        if at >= 0:
            return i + at, j + skipped
    return None


def _shared(old: Prompt, new: Prompt) -> tuple[bool, int, int]:
    """How much two prompts share: the tools, then the prefix, then what re-aligns."""
    return old.tools == new.tools, _common_bytes(old.flat, new.flat, 0, 0), _walk(old.flat, new.flat)[1]


def _common_bytes(a: bytes, b: bytes, i: int, j: int) -> int:
    """How many bytes from ``a[i]`` and ``b[j]`` on are equal: doubling steps, then halving the one that fails."""
    n, step, most = 0, 64, min(len(a) - i, len(b) - j)
    while n < most and a[i + n : i + min(n + step, most)] == b[j + n : j + min(n + step, most)]:
        n, step = min(n + step, most), step * 2
    step = min(step, most - n)
    while step > 0:
        step //= 2 if step > 1 else 1
        if a[i + n : i + n + step] == b[j + n : j + n + step] and n + step <= most:
            n += step
        elif step == 1:
            break
    return n


# --- words and excerpts -----------------------------------------------------------------------------------------------

_WORD_MARKS: Final = frozenset(b":.,_-+/=")


def _word_start(flat: bytes, at: int, low: int) -> int:
    while at > low and (bytes((flat[at - 1],)).isalnum() or flat[at - 1] in _WORD_MARKS):
        at -= 1
    return at


def _excerpt(old: bytes, new: bytes, word: int, change: Change) -> str:
    """``…12:3[4|5]…``: what was and what is, and at most a few characters of the same word before it."""
    before = _shown(new[max(word, change[1] - BEFORE_CHARS) : change[1]])
    return f"…{before}[{_run(old[change[0] : change[2]])}|{_run(new[change[1] : change[3]])}]…"


def _run(run: bytes) -> str:
    return _shown(run) if len(run) <= SHOWN_CHARS else f"{_shown(run[:2])}… {len(run)} bytes"


def _shown(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _pattern(flat: bytes, start: int, end: int) -> str:
    low = max(0, start - RUN_BYTES_MAX)
    around = flat[low : end + RUN_BYTES_MAX].decode("latin-1")  # one character a byte; the patterns are ASCII
    return pattern_at(around, start - low, end - low)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=8).digest()


# --- reading a request ------------------------------------------------------------------------------------------------


def _texts(view: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(where, role, text) in the order of the prompt. The role is empty for the system text beside the messages."""
    found = [("the system text", "", text) for name in sorted(SYSTEM_FIELDS) if (text := _text(view.get(name)))]
    for name in sorted(LIST_FIELDS, reverse=True):
        items = view.get(name)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, Mapping):
                text = _text(item.get("content"))
                if item.get("tool_calls"):
                    text += dumps(item["tool_calls"])
                found.append((f"message {index}", str(item.get("role", "user")) or "user", text))
    if isinstance(view.get("prompt"), str):
        found.append(("the prompt", "user", view["prompt"]))
    return found


def _tools(tools: Any) -> tuple[tuple[bytes, ...], tuple[bytes, ...], int]:
    """(digests in order, digests blind to the order of tools and keys, bytes) of the first tools, up to the same bound
    as the text."""
    plain: list[bytes] = []
    ordered: list[bytes] = []
    size = 0
    for tool in tools if isinstance(tools, list) else ():
        if size >= PROMPT_BYTES_MAX:
            break
        text = dumps(tool)
        size += len(text)
        plain.append(_digest(text.encode()))
        ordered.append(_digest(dumps(tool, sort_keys=True).encode()))
    return tuple(plain), tuple(sorted(ordered)), size


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else ()
    return "\n".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))

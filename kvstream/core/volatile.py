"""Values in a prompt that change from request to request and mean nothing to the answer: nonces, clocks, countdowns.

One such value near the start of a prompt costs its whole cached prefix. A pattern here is a name for one kind of them.
:func:`replaced` puts a constant in the place of each value in a JSON body and leaves every other byte alone: a client
may depend on its own spelling, and re-serialising could itself move the prefix. So the body is walked, not rebuilt:
the string literals that hold prompt text are found in the text of the body, each is matched in its decoded form, and
positions are carried back over the escapes before the match.

Most patterns apply to *system text* only: the top-level ``system`` and ``instructions``, and messages of the roles
system and developer. In what a user wrote a date is content, not noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from json import JSONDecoder
from json.decoder import scanstring  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Final

from attrs import define, field, frozen

MONTHS: Final = (r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?"
                 r"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?")
DAYS: Final = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\.?,? )?"
YEAR: Final = r"(?:19|20)\d{2}"
ORDINAL: Final = r"\d{1,2}(?:st|nd|rd|th)?"
SYSTEM_ROLES: Final = frozenset(("system", "developer"))
SYSTEM_FIELDS: Final = frozenset(("system", "instructions"))
LIST_FIELDS: Final = frozenset(("messages", "input"))


@frozen
class Volatile:
    """One kind of volatile value. ``pattern`` has a group ``value``; ``mark`` is in every body that has one (empty: no
    such mark). ``anywhere``: also in what is no system text."""

    pattern: re.Pattern[str]
    constant: str
    mark: bytes = b""
    anywhere: bool = False


PATTERNS: Final[Mapping[str, Volatile]] = MappingProxyType({
    # x-anthropic-billing-header: cc_version=...; cc_entrypoint=cli; cch=fa690;
    "anthropic_cch": Volatile(re.compile(r"cch=(?<!\wcch=)(?P<value>\w{1,64})(?=;)"), "00000", b"cch="),
    "dates": Volatile(re.compile(
        rf"(?<![\w-])(?P<value>{YEAR}([-/.])[01]\d\2[0-3]\d|[0-3]\d([./])[0-3]\d\3{YEAR}"
        rf"|{DAYS}{MONTHS} {ORDINAL},? {YEAR}|{DAYS}{ORDINAL} {MONTHS},? {YEAR})(?!\d)"), "2000-01-01"),
    "times": Volatile(re.compile(
        r"(?<![\d:])(?P<value>\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?:Z|[+-]\d{2}:?\d{2})?)"
        r"(?![\d:])"), "00:00"),
    "total_tokens": Volatile(re.compile(
        r"(?P<value>(?<=<total_tokens>)[^<]{1,64}(?=</total_tokens>)"
        r"|(?<![\d,])\d[\d,]{0,15}(?= tokens (?:left|remaining)))"), "0", b"tokens", anywhere=True),
})


def replaced(body: bytes, names: Collection[str]) -> bytes | None:
    """The body with a constant for every value of the named patterns; None when there is none, or the body is not
    JSON in UTF-8. Every other byte stays as it is."""
    wanted = [PATTERNS[name] for name in names if PATTERNS[name].mark in body]
    if not wanted:
        return None
    try:
        text = body.decode()
        spans = _TextSpans(text).found()
    except (ValueError, IndexError, StopIteration, RecursionError):
        return None
    edits = sorted(edit for span in spans for edit in _edits(text, span, wanted))
    if not edits:
        return None
    out, at = [], 0
    for start, end, constant in edits:
        if start >= at:  # two patterns may claim one value: the first has it
            out += [text[at:start], constant]
            at = end
    out.append(text[at:])
    return "".join(out).encode()


def pattern_at(text: str, start: int, end: int) -> str:
    """The name of the pattern whose value touches ``text[start:end]``; empty when none does."""
    for name, volatile in PATTERNS.items():
        for match in volatile.pattern.finditer(text):
            if match.start("value") <= end and start <= match.end("value"):
                return name
    return ""


# --- where the prompt's text is in a body -----------------------------------------------------------------------------


@frozen
class _Span:
    """What is between the quotes of a string literal."""

    start: int
    end: int
    system: bool


def _edits(text: str, span: _Span, wanted: list[Volatile]) -> list[tuple[int, int, str]]:
    wanted = [volatile for volatile in wanted if span.system or volatile.anywhere]
    if not wanted:
        return []
    literal = text[span.start : span.end]
    decoded = scanstring(f'{literal}"', 0, False)[0] if "\\" in literal else literal
    found = []
    for volatile in wanted:
        for match in volatile.pattern.finditer(decoded):
            if match["value"] != volatile.constant:
                start, end = (_raw_offset(literal, decoded, at) for at in match.span("value"))
                found.append((span.start + start, span.start + end, volatile.constant))
    return found


_ESCAPE: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.")


def _raw_offset(literal: str, decoded: str, at: int) -> int:
    """Where character ``at`` of the decoded text begins in the literal: each escape before it is longer by so much."""
    if literal is decoded:
        return at
    longer = 0
    for match in _ESCAPE.finditer(literal):
        if match.start() >= at + longer:
            break
        longer += len(match[0]) - 1
    return at + longer


_SPACE: Final = re.compile(r"[ \t\n\r]*")
_DECODER: Final = JSONDecoder()
Visit = Callable[[str, int], int]


@define
class _TextSpans:
    """A walk over the text of a JSON object that goes only where prompt text is; the rest is skipped at C's speed.
    Raises ``ValueError``, ``IndexError`` or ``StopIteration`` where the text is no JSON."""

    text: str
    spans: list[_Span] = field(factory=list)

    def found(self) -> list[_Span]:
        self._object(self._space(0), self._top)
        return self.spans

    def _top(self, key: str, at: int) -> int:
        if key in SYSTEM_FIELDS:
            return self._content(at, system=True)
        if key in LIST_FIELDS and self.text[at] == "[":
            return self._array(at, self._message)
        return self._skip(at)

    def _message(self, at: int) -> int:
        if self.text[at] != "{":
            return self._skip(at)
        role, outer = "", self.spans
        mine: list[_Span] = []
        self.spans = mine

        def member(key: str, at: int) -> int:
            nonlocal role
            if key == "role" and self.text[at] == '"':
                role, end = scanstring(self.text, at + 1, False)
                return int(end)
            return self._content(at, system=False) if key == "content" else self._skip(at)

        end = self._object(at, member)
        self.spans = outer
        outer.extend(_Span(span.start, span.end, role in SYSTEM_ROLES) for span in mine)
        return end

    def _content(self, at: int, *, system: bool) -> int:
        """A string, or a list of parts with a ``text``."""
        if self.text[at] == '"':
            end = int(scanstring(self.text, at + 1, False)[1])
            self.spans.append(_Span(at + 1, end - 1, system))
            return end
        if self.text[at] != "[":
            return self._skip(at)

        def member(key: str, at: int) -> int:
            return self._content(at, system=system) if key == "text" else self._skip(at)

        return self._array(at, lambda at: self._object(at, member) if self.text[at] == "{" else self._skip(at))

    # --- JSON ---

    def _object(self, at: int, visit: Visit) -> int:
        """Call ``visit(key, where its value begins)``, which returns where it ends, for each member."""
        at = self._opened(at, "{")
        while self.text[at] != "}":
            if self.text[at] == ",":
                at = self._space(at + 1)
            key, at = scanstring(self.text, self._opened(at, '"', space=False), False)
            at = self._space(visit(key, self._opened(self._space(at), ":")))
        return at + 1

    def _array(self, at: int, visit: Callable[[int], int]) -> int:
        at = self._opened(at, "[")
        while self.text[at] != "]":
            if self.text[at] == ",":
                at = self._space(at + 1)
            at = self._space(visit(at))
        return at + 1

    def _opened(self, at: int, mark: str, *, space: bool = True) -> int:
        if self.text[at] != mark:
            raise ValueError(f"no {mark} at {at}")
        return self._space(at + 1) if space else at + 1

    def _skip(self, at: int) -> int:
        return _DECODER.raw_decode(self.text, at)[1]

    def _space(self, at: int) -> int:
        if self.text[at : at + 1] > " ":  # nearly always, and far cheaper than a match
            return at
        match = _SPACE.match(self.text, at)
        return match.end() if match else at

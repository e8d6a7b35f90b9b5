"""What llama.cpp can count exactly of a request: the server renders and tokenizes, we only ask.

An image or a sound becomes a number of tokens that no text tells; prompts with one are estimated, by their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from .base import ProxyRequest
from .routes import route_of


@frozen
class Ask:
    """A route of the server that takes the client's own body and renders or counts its prompt."""

    path: str


_ASKED: Mapping[str, Ask] = MappingProxyType({
    "chat": Ask("/apply-template"),
    "messages": Ask("/v1/messages/count_tokens"),
    "responses": Ask("/v1/responses/input_tokens"),
})
_TEXT = frozenset(("text", "refusal", "input_text", "output_text", "thinking", "redacted_thinking", "tool_use",
                   "tool_result", None))


def countable(request: ProxyRequest) -> Ask | str | tuple[int, ...] | None:
    """Whom to ask, or the text to tokenize, or the ids that the client sent; None when nobody can tell."""
    view, form = request.view, route_of(request.route).form
    if form in _ASKED:
        turns = view.get("input" if form == "responses" else "messages")
        return None if has_media(turns) else _ASKED[form]
    if form in ("embeddings", "native_embeddings"):
        return longest(view.get("input", view.get("content")))
    if form not in ("completions", "native"):
        return None
    prompt = view.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    return tuple(prompt) if isinstance(prompt, list) and prompt and are_ids(prompt) else None


def longest(given: Any) -> str | tuple[int, ...] | None:
    """The longest of the documents, all of one kind: each runs by itself, so that one must fit."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not given:
        return None
    if are_ids(given):
        return tuple(given)
    if all(isinstance(item, str) for item in given):
        return max((str(item) for item in given), key=len)
    if all(isinstance(item, list) and are_ids(item) for item in given):
        return max((tuple(item) for item in given), key=len)
    return None


def are_ids(items: list[Any]) -> bool:
    """Whether all items are token ids; others cannot be packed into page keys, and are for the runtime to refuse."""
    return all(type(item) is int and 0 <= item < 2**32 for item in items)


def has_media(turns: Any) -> bool:
    """Whether a message has a part that is no text: its tokens cannot be counted from a rendered prompt."""
    for turn in turns if isinstance(turns, list) else ():
        content = turn.get("content") if isinstance(turn, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (part.get("type") not in _TEXT or has_media([part])):
                return True
    return False

"""A deterministic tokenizer, chat template and "model" for the fake runtime.

The three fit together on purpose: what the model says, put back into the next turn's prompt, gives the same token ids
again. So the fake's prefix cache hits over turns exactly where a real one would.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from attrs import define, field

_PIECE = re.compile(r"<\|[a-z_]+\|>| ?\w+| ?[^\w\s<]+|\s|<")
WORDS_TEXT = (  # as one text: thirty quoted words are hard to read
    "amber birch cedar delta ember fjord grove haven inlet jetty knoll lemon maple north ocean prism quartz river "
    "stone tidal umber vivid willow xenon yield zephyr über naïve 雨 🦊"
)
WORDS: list[str] = re.findall(r"\S+", WORDS_TEXT)


def piece_id(piece: str) -> int:
    """The id of one piece."""
    return crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


@define
class Tokenizer:
    """Pieces of text to ids and back. Ids are CRCs of the piece, so they are the same in every process."""

    _pieces: dict[int, str] = field(factory=lambda: {piece_id(f" {word}"): f" {word}" for word in WORDS})

    def encode(self, text: str) -> list[int]:
        out = []
        for piece in _PIECE.findall(text):
            token = piece_id(piece)
            self._pieces[token] = piece
            out.append(token)
        return out

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids this tokenizer has produced before or the model says, as text."""
        return "".join(self._pieces.get(token, "?") for token in tokens)


def content_text(content: Any) -> str:
    """The text of a message's ``content``: a string, or the text parts of a list. Images count nothing."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(p.get("text", "") for p in content if isinstance(p, Mapping) and p.get("type") == "text")
    return ""


def ids_of(text: str) -> list[int]:
    """The ids of a text."""
    return [piece_id(piece) for piece in _PIECE.findall(text)]


def has_media(messages: Any) -> bool:
    """Whether a message has a part that is not text."""
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


def apply_template(messages: Sequence[Any]) -> str:
    """ChatML, as the SmolLM2 template renders it; a trailing assistant message is a prefill without end tag."""
    out = []
    for message in messages:
        if isinstance(message, Mapping):
            text = content_text(message.get("content"))
            out.append(f"<|im_start|>{message.get('role', 'user')}\n{text}<|im_end|>\n")
    last = messages[-1] if messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        return "".join(out).removesuffix("<|im_end|>\n")
    return "".join(out) + "<|im_start|>assistant\n"


def prompt_hash(tokens: Sequence[int]) -> int:
    """The model's whole state: depends on every token so far, so a continued answer continues the same text."""
    h = 0
    for token in tokens:
        h = fold(h, token)
    return h


def fold(state: int, token: int) -> int:
    """The state after one more token."""
    return crc32(token.to_bytes(4, "little"), state)


def next_piece(state: int) -> str:
    """The piece the model says in this state: always a space and one word, hence always one token."""
    return " " + WORDS[state % len(WORDS)]

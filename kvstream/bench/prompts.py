"""Prompts of a wanted length that were never sent before. Pure.

A prompt is a fixed first word and a row of single words. Where every word is one token, its length is known without
counting it: the overhead (chat template, first word) plus the number of words. ``Lengths`` is what was learnt about a
tokenizer; ``target`` learns it, and the token counts of the answers show afterwards whether it was true.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from . import dice
from .plan import Load, Talk
from .words import WORDS

FIRST_WORD = "Words:"  # without a space before it a word may be another number of tokens; so the first is always this
WORDS_MIN = 4  # 36 bits of chance: two prompts of one run are never the same
COMPLETIONS = "/v1/completions"

Source = Literal["exact", "learnt", "estimated"]


@frozen
class Lengths:
    """What words cost. ``source``: ``exact``, counted by the target's own tokenizer and each word one token;
    ``learnt``, from the token counts of two warm-up answers; ``estimated``, guessed."""

    source: Source
    overhead: float = 30.0
    per_word: float = 1.0
    words: tuple[str, ...] = WORDS

    def words_for(self, tokens: int) -> int:
        """How many words make a prompt of ``tokens``, or of as few as it can have."""
        return max(WORDS_MIN, round((tokens - self.overhead) / self.per_word))

    @property
    def tokens_min(self) -> int:
        """The shortest prompt, in tokens."""
        return round(self.overhead + WORDS_MIN * self.per_word)


def learnt(few: tuple[int, int], many: tuple[int, int]) -> Lengths:
    """From two prompts, each as (words, tokens)."""
    per_word = max(0.1, (many[1] - few[1]) / (many[0] - few[0]))
    return Lengths("learnt", few[1] - few[0] * per_word, per_word)


def text_of(words: Sequence[str]) -> str:
    return " ".join((FIRST_WORD, *words))


def message(load: Load, lengths: Lengths, target: str, talk: Talk, turn: int) -> str:
    """The user's message of a turn. Of a first message the first ``shared_prefix`` is the same in all talks of a
    target; the texts of two targets have nothing in common, nor has a warm-up (a talk below 0) with anything."""
    count = lengths.words_for(load.message_tokens(talk.kind, turn))
    if turn:  # the template around a later message is not known apart; it is a few tokens
        count = max(WORDS_MIN, round(load.message_tokens(talk.kind, turn) / lengths.per_word))
    shared = round(count * load.shared_prefix) if turn == 0 and talk.number >= 0 else 0
    shared = min(shared, count - WORDS_MIN)
    first = dice.words(lengths.words, shared, load.seed, target, "shared")
    own = dice.words(lengths.words, count - shared, load.seed, target, "talk", talk.number, turn)
    return text_of([*first, *own])


def request_body(load: Load, model: str, messages: Sequence[dict[str, str]], output_tokens: int) -> bytes:
    """A streamed call with token counts asked for. ``ignore_eos`` (llama.cpp, vLLM, SGLang) makes answers as long as
    asked; others skip what they do not know."""
    body: dict[str, Any] = {"model": model} if model else {}
    if load.route == COMPLETIONS:
        body["prompt"] = "\n".join(message["content"] for message in messages)
    else:
        body["messages"] = list(messages)
    body |= {"max_tokens": output_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    if load.ignore_eos:
        body["ignore_eos"] = True
    return json.dumps(body).encode()

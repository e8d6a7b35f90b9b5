"""``kvstream doctor --isolation``: does one session ever see another's text (case 54)?

llama.cpp keeps evicted slots in a prompt cache in host memory (``--cache-ram``, 8 GiB by default), and there were
reports of one conversation's text in another's answer. The test: two sessions, each with a canary (a random word that
nothing else can produce) in its system prompt, ask by turns, while other long prompts keep pushing both out of their
slots. Every answer is searched for the canaries of everybody else.

This is the one part of ``doctor`` that sends model calls. Their number is fixed beforehand, each is short, and all
together have a deadline. A pass proves nothing, it only failed to find a leak; a canary in the wrong answer proves one.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import trio
from attrs import define, field, frozen

from ..adapters.advice import Advice
from ..adapters.base import HttpCall
from ..adapters.openai import root_of
from ..errors import KVStreamError, UnauthorizedError
from .upstream import HttpUpstream

ROUNDS = 6
CROWD = 4  # other sessions that fill slots and caches, per round
AT_ONCE = 4
ANSWER_TOKENS = 48
FILLER_WORDS = 350
CALL_TIMEOUT_S = 300.0
TOTAL_S_MAX = 600.0
FAILURES_MAX = 4
CALL_TOKENS = 540  # about: prompt and answer, with the tokenizers that were tried
HOW_TO_UNLOCK = ("give a key that may use the model in KVSTREAM_KEY; it is shown to a KVStream, and to the server of "
                 "--url (a configured backend is shown its api_key)")
REMEDY = "start llama-server with --cache-ram 0, and report it to the runtime's makers"

_FILLER = ("amber", "basin", "cedar", "drift", "ember", "field", "grove", "haven", "inlet", "jetty", "knoll", "ledge")


@frozen
class Leak:
    """A canary of ``of`` that turned up in an answer to ``seen_by``, in ``round``."""

    of: str
    seen_by: str
    round: int


@define
class Trial:
    """What happened. ``calls`` were made, ``done`` are over, ``failed`` of them gave no answer; ``last_error`` says
    why."""

    calls: int = 0
    done: int = 0
    failed: int = 0
    leaks: list[Leak] = field(factory=list)
    last_error: str = ""
    locked: bool = False  # it wants a key, or another one
    cut_short: bool = False


@frozen
class Session:
    """Somebody who talks; ``canary`` is in the system prompt, ``filler`` makes it long."""

    name: str
    canary: str
    filler: str

    def messages(self, turn: int) -> list[dict[str, str]]:
        system = f"Session notes. The code word of this session is {self.canary}. {self.filler}"
        return [{"role": "system", "content": system},
                {"role": "user", "content": f"Question {turn}: which code words do you know? Repeat all of them."}]


def calls_total(rounds: int = ROUNDS, crowd: int = CROWD) -> int:
    """How many model calls a trial makes at most."""
    return rounds * (2 + crowd)


async def try_isolation(url: str, *, model: str = "", api_key: str = "", rounds: int = ROUNDS, crowd: int = CROWD,
                        progress: Callable[[int, int], None] = lambda done, total: None) -> Trial:
    """Run the test against the OpenAI-compatible server at ``url``; ``progress(done, total)`` is told of each call.

    *Errors*: none; a call that fails is counted, and after ``FAILURES_MAX`` of them the rest is left. *Cancellation*:
    safe; calls in progress are closed.
    """
    trial, total = Trial(), calls_total(rounds, crowd)
    pair = [_session("red"), _session("blue")]
    canaries = {one.name: one.canary for one in pair}
    limit = trio.CapacityLimiter(AT_ONCE)
    async with HttpUpstream(root_of(url)) as upstream:
        async def ask(session: Session, round_: int) -> None:
            async with limit:
                if trial.failed >= FAILURES_MAX:
                    return
                trial.calls += 1
                try:
                    answer = await _ask(upstream, session.messages(round_), model, api_key)
                except KVStreamError as error:
                    trial.failed, trial.last_error = trial.failed + 1, error.message
                    trial.locked |= isinstance(error, UnauthorizedError)
                    answer = ""
                trial.leaks += [Leak(name, session.name, round_) for name, canary in canaries.items()
                                if name != session.name and seen(canary, answer)]
                trial.done += 1
                progress(trial.done, total)

        with trio.move_on_after(TOTAL_S_MAX) as deadline:
            for round_ in range(1, rounds + 1):
                others = [_session(f"crowd {round_}.{n}") for n in range(crowd)]
                # The pair first and last by turns: once both at the same time as the crowd, once pushed out by it.
                order = [pair[0], *others, pair[1]] if round_ % 2 else [*others, *pair]
                canaries |= {one.name: one.canary for one in others}
                async with trio.open_nursery() as nursery:
                    for session in order:
                        nursery.start_soon(ask, session, round_)
        trial.cut_short = deadline.cancelled_caught or trial.failed >= FAILURES_MAX
    return trial


def run_trial(url: str, *, model: str, api_key: str, progress: Callable[[int, int], None]) -> Trial:
    """:func:`try_isolation` for who has no event loop."""
    return trio.run(partial(try_isolation, url, model=model, api_key=api_key, progress=progress))


def judge(trial: Trial) -> list[Advice]:
    """The result as findings."""
    findings = [Advice("problem", f"The code word of session {leak.of} turned up in an answer to session "
                       f"{leak.seen_by} (round {leak.round}): sessions see each other's text.", REMEDY)
                for leak in trial.leaks]
    answered = trial.done - trial.failed
    if trial.failed or trial.cut_short:
        why = f" ({trial.last_error})" if trial.last_error else ""
        remedy = HOW_TO_UNLOCK if trial.locked else "run it again when it serves"
        findings.append(Advice("problem" if answered == 0 else "warning", f"Isolation: {trial.failed} of {trial.calls} "
                               f"calls gave no answer{why}; the test is not complete.", remedy))
    if not trial.leaks and answered:
        findings.append(Advice("ok", f"Isolation: in {answered} answers nobody saw another session's code word. That "
                               "proves nothing; --cache-ram 0 rules the known cause out."))
    return findings


def seen(canary: str, answer: str) -> bool:
    """Whether a canary is in an answer, however it is spelt: tokenizers and models put blanks and capitals into words
    they do not know."""
    return _letters(canary) in _letters(answer)


def _letters(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


def _session(name: str) -> Session:
    filler = " ".join(secrets.choice(_FILLER) for _ in range(FILLER_WORDS))  # no two prompts share a prefix
    return Session(name, f"kvs{secrets.token_hex(5)}", filler)


async def _ask(upstream: HttpUpstream, messages: list[dict[str, str]], model: str, api_key: str) -> str:
    """The text of an answer, thinking included. *Errors*: ``KVStreamError``."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": ANSWER_TOKENS, "stream": False}
    if model:
        body["model"] = model
    headers = [("content-type", "application/json"), *([("authorization", f"Bearer {api_key}")] if api_key else [])]
    call = HttpCall("POST", "/v1/chat/completions", tuple(headers), json.dumps(body).encode())
    reply = await upstream.request(call, timeout_s=CALL_TIMEOUT_S)
    value = reply.json()
    if reply.status != 200 or not isinstance(value, dict):
        kind = UnauthorizedError if reply.status in (401, 403) else KVStreamError
        raise kind(f"status {reply.status}: {reply.body[:200].decode('utf-8', 'replace')}")
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    return " ".join(_texts(message)) if isinstance(message, dict) else ""


def _texts(message: Mapping[str, Any]) -> list[str]:
    return [value for value in message.values() if isinstance(value, str)]

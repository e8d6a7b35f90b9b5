"""A tiny language for playbooks of the scheduler: events and the actions they must cause, top to bottom.

::

    play = Play(seats=1)
    play.at(0).step(submit(1, 32), submit(2, 32), expect=["admit 1"])
    play.at(5).step(ended(1), expect=["admit 2"])

Actions are compared as short texts: ``admit 2``, ``admit 2 cached=64``, ``refuse 3 timeout``, ``refuse 3 timeout
retry=2.5``, ``truncate 4``, ``admit 5 slot=2 restore``; what a line does not mention is not compared. The invariants
are checked after every step, and a mismatch prints the dialogue so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from kvstream.core import messages as m
from kvstream.core.scheduler import Scheduler, SchedulerSettings
from kvstream.core.snapshot import Snapshot
from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import CountSource, EndReason, Limits, PageKey, PoolMode, Priority, RequestId, SlotPlan

PAGE = 16


def keys_of(prompt: str | int, tokens: int, page_tokens: int = PAGE) -> tuple[PageKey, ...]:
    """Keys of a prompt of that length. Prompts of one name share their beginning; ``"a+b"`` is one page per letter
    of the name, so that ``"aab"`` and ``"aac"`` share two pages; a number is a prompt like no other."""
    if isinstance(prompt, int):
        ids = [1000 + prompt] * tokens
    else:
        ids = [ord(prompt[min(i // page_tokens, len(prompt) - 1)]) for i in range(tokens)]
    return page_keys(ids, page_tokens, salt("test"))


def submit(rid: int, tokens: int, most: int | None = 16, *, prompt: str | int | None = None, priority: str = "normal",
           client: str = "", deadline: float = 1e9, size: int = 0, weight: float = 1.0, group: str = "",
           seats: int = 1, pinnable: bool = False, exact: bool = False,
           preemptible: bool = False) -> m.Submitted:
    return m.Submitted(
        RequestId(rid), keys_of(rid if prompt is None else prompt, tokens), tokens, most, deadline,
        Priority[priority.upper()], client, size, CountSource.EXACT, weight=weight, group=group, seats=seats,
        pinnable=pinnable, exact=exact, preemptible=preemptible,
    )


def produced(rid: int, tokens: int = 1) -> m.Produced:
    return m.Produced(RequestId(rid), tokens)


def ended(rid: int, reason: EndReason = EndReason.FINISHED, *, draining: bool = False) -> m.Ended:
    return m.Ended(RequestId(rid), reason, draining=draining)


def idle(rid: int) -> m.SeatIdle:
    return m.SeatIdle(RequestId(rid))


def limits(*, seats: int = 4, pages: int = 64, mode: PoolMode = PoolMode.UNIFIED, **more: Any) -> Limits:
    return Limits(mode, seats=seats, pages=pages, page_tokens=more.pop("page_tokens", PAGE), source="test", **more)


class Play:
    """A scheduler whose backend is up (unless ``up=False``), with the settings given by name."""

    def __init__(self, *, backend: Limits | None = None, up: bool = True, seats: int = 4, pages: int = 64,
                 **settings: Any) -> None:
        settings = {"wait_s_max": 1e6, "watermark": 0.0, "answer_tokens_default": 16, **settings}
        self.scheduler = Scheduler(SchedulerSettings(**settings))
        self.backend = backend or limits(seats=seats, pages=pages)
        self.now = 0.0
        self.lines: list[str] = []
        if up:
            self.step(m.BackendUp(self.backend))

    def at(self, now: float) -> Play:
        self.now = now
        return self

    def step(self, *events: m.Event, expect: Sequence[str] | None = ()) -> list[m.Action]:
        """Step once; ``expect=None`` accepts anything."""
        actions = self.scheduler.step(self.now, events)
        said = [tell(action) for action in actions]
        self.lines.append(f"at {self.now:g}: " + "; ".join(map(_short, events)))
        self.lines += [f"    -> {line}" for line in said]
        try:
            self.scheduler.check_invariants()
        except AssertionError as error:
            raise AssertionError("\n".join([*self.lines, f"    INVARIANT: {error}"])) from error
        if expect is not None:
            same = len(said) == len(expect) and all(_says(*pair) for pair in zip(said, expect, strict=True))
            assert same, "\n".join([*self.lines, "    EXPECTED:", *(f"    -> {line}" for line in expect)])
        return actions

    def see(self) -> Snapshot:
        return self.scheduler.snapshot(self.now)

    @property
    def running(self) -> list[int]:
        return [run.rid for run in self.see().running]

    @property
    def waiting(self) -> list[int]:
        return [view.rid for view in self.see().waiting]

    @property
    def why(self) -> dict[int, str]:
        """Why each waiting request waits."""
        return {view.rid: view.why for view in self.see().waiting}

    @property
    def free(self) -> int:
        return self.see().pages[0].free

    @property
    def cached(self) -> int:
        return self.see().pages[0].cached


def tell(action: m.Action) -> str:
    """An action in one line."""
    match action:
        case m.Admit(rid, table, cached, reserved, plan, resumes):
            said = f"admit {rid} cached={cached} pages={table.pages_held} reserved={reserved}"
            said += " resumes" * resumes
            return said if plan is None else f"{said} {tell_plan(plan)}"
        case m.Proceed(rid, spec):
            return f"proceed {rid} " + (f"save={spec.why}:{len(spec.keys)}" if spec is not None else "nothing-saved")
        case m.SaveSlot(slot, spec, owner):
            return f"save {slot} why={spec.why} pages={len(spec.keys)} rid={owner}"
        case m.Forget(name):
            return f"forget {name}"
        case m.Refuse(rid, why, retry, tokens, limit):
            later = "" if retry is None else f" retry={retry:g}"
            return f"refuse {rid} {why.value}{later} tokens={tokens} limit={limit}"
        case m.Truncate(rid):
            return f"truncate {rid}"
        case m.Preempt(rid, swap, _):
            return f"preempt {rid} {'swap' if swap else 'recompute'}"
        case m.SaveSlot(slot, spec, rid):
            return f"save {rid} slot={slot} tokens={spec.tokens} why={spec.why}"
        case m.Forget(name):
            return f"forget {name}"
    raise AssertionError(f"unknown action {action}")


def tell_plan(plan: SlotPlan) -> str:
    """A plan in one line."""
    words = [f"slot={'any' if plan.slot is None else plan.slot}", f"promised={plan.tokens_cached}"]
    words += [f"save={plan.save.why}:{len(plan.save.keys)}"] if plan.save is not None else []
    words += ["erase=" + ",".join(map(str, plan.erase))] if plan.erase else []
    words += ["restore"] if plan.restore else []
    return " ".join([*words, "read_first"] if plan.read_first else words)


def _short(event: m.Event) -> str:
    text = str(evolve(event, keys=()) if isinstance(event, m.Submitted | m.Recounted) else event)
    return text.replace("keys=(), ", "")


def _says(said: str, wanted: str) -> bool:
    """Every word of ``wanted`` is in ``said``, the first two at their places."""
    words = said.split()
    return wanted.split()[:2] == words[:2] and set(wanted.split()) <= set(words)

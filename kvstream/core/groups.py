"""What the runtime must have loaded: one pioneer per cold group, and one group at a time where they exclude each other.

Theory of operation. A *group* is everything that runs on one load of the runtime: a model and its load options.

*Cold.* A runtime that loads on demand and is asked four times at once may load four times, or fail. So of a group that
is not known to be loaded one request, the pioneer, goes alone; the others wait for its first token. Ends it without
one, the next is the pioneer. A group counts as loaded from its first token until nothing of it has run for
``cold_after_s``, the runtime was restarted, or another group took its place.

*Exclusive.* One group is *active*, and only its requests are admitted. Requests of others wait behind their group's
gate, in any order of arrival, so a, b, a, b are served as a, a, b, b. That must end: once the first of another group
has waited ``switch_wait_s`` (while this group was active: a backlog of two groups must not swap at every request), the
active group gets no more either, what runs of it ends, and the other becomes active. When nothing of the active group
waits or runs there is nothing to wait for. Draining requests run: a swap would kill what the runtime still computes.
"""

from __future__ import annotations

from math import inf
from typing import Final

from .flows import Section
from .queue import WaitingQueue
from .settings import SchedulerSettings
from .state import Gate, Running, Waiting
from .types import RequestId

GROUPS_KEPT: Final = 256  # groups remembered as loaded; clients name them


class Groups:
    """Which groups are loaded, loading and served. Told of every request that starts, lives and ends."""

    __slots__ = ("_active", "_counts", "_pioneers", "_queue", "_settings", "_since", "_switch_at", "_target", "_warm")

    def __init__(self, settings: SchedulerSettings, queue: WaitingQueue) -> None:
        self._settings = settings
        self._queue = queue
        self._counts: dict[str, int] = {}  # running requests, draining ones included
        self._warm: dict[str, float] = {}  # loaded groups, least recently used first, and when they were used
        self._pioneers: dict[str, RequestId] = {}
        self._active: str | None = None
        self._since = -inf  # when it became active
        self._target: str | None = None  # the group that waits for the active one to drain
        self._switch_at = inf  # not before this can another group's patience be at its end

    def gate(self, waiting: Waiting, now: float) -> Gate | None:
        """What a request waits for because of its group."""
        group = waiting.group
        if self._settings.exclusive_groups and self._active is not None:
            if group == self._active and self._target is None and now >= self._switch_at:
                self._look_for_target(now)
            if group != self._active or self._target is not None:
                if group != self._active:
                    self._switch_at = min(self._switch_at, self._patience(waiting))
                return "model", group
        if self._settings.cold_groups and group in self._pioneers and not self._is_warm(group, now):
            return "cold", group
        return None

    def settle(self, now: float) -> bool:
        """Nobody can be admitted: whether a change of the active group lets somebody."""
        if not self._settings.exclusive_groups or self._active is None:
            return False
        if self._target is not None and not self._queue.holds(("model", self._target)):
            self._target = None  # whoever it was has left
            if self._queue.release(("model", self._active)):
                return True
        if self._counts:
            return False
        target, waiting = self._target, self._waiting_groups()
        if target is None and waiting:
            target = str(min(waiting, key=lambda section: self._queue.best_of(section, now)[:3]).gate[1])
        if target is None:
            return False
        self._activate(target, now)
        return self._queue.release(("model", target))

    def started(self, run: Running, now: float) -> None:
        if self._settings.cold_groups and not self._is_warm(run.group, now):
            self._warm.pop(run.group, None)  # that a request of it runs must not count for a use long ago
            self._pioneers[run.group] = run.rid
        self._counts[run.group] = self._counts.get(run.group, 0) + 1
        if self._settings.exclusive_groups and self._active is None:
            self._active, self._since = run.group, now

    def alive(self, run: Running, now: float) -> None:
        """A first token."""
        self.warm(run.group, now)

    def over(self, run: Running, now: float) -> None:
        """Its client is done with it, whether the runtime is or not. May be told twice."""
        if self._pioneers.get(run.group) == run.rid:
            del self._pioneers[run.group]
            self._queue.release(("cold", run.group), for_good=True)
        if run.group in self._warm:
            self._warm[run.group] = now

    def closed(self, run: Running) -> None:
        left = self._counts[run.group] - 1
        if left:
            self._counts[run.group] = left
        else:
            del self._counts[run.group]

    def warm(self, group: str, now: float) -> None:
        """The group is loaded."""
        if not self._settings.cold_groups:
            return
        self._warm.pop(group, None)  # the most recently used last
        self._warm[group] = now
        if len(self._warm) > GROUPS_KEPT:
            del self._warm[next(iter(self._warm))]
        self._pioneers.pop(group, None)
        self._queue.release(("cold", group), for_good=True)

    def forget(self) -> None:
        """The runtime was restarted: nothing is loaded."""
        self._warm.clear()

    def _is_warm(self, group: str, now: float) -> bool:
        used = self._warm.get(group)
        return used is not None and (group in self._counts or now - used < self._settings.cold_after_s)

    def _patience(self, waiting: Waiting) -> float:
        return max(waiting.arrived, self._since) + self._settings.switch_wait_s

    def _waiting_groups(self) -> list[Section]:
        return [s for s in self._queue.held() if s.gate[0] == "model" and s.gate[1] != self._active]

    def _look_for_target(self, now: float) -> None:
        """Whether somebody's patience is at its end; those that asked before may have left since."""
        self._switch_at = inf
        for section in self._waiting_groups():
            head = self._queue.best_of(section, now)[4].entries[0][2]
            if self._patience(head) < self._switch_at:
                self._switch_at, first = self._patience(head), str(section.gate[1])
                self._target = first if self._switch_at <= now else None

    def _activate(self, group: str, now: float) -> None:
        if self._active is not None and group != self._active:
            self._warm.pop(self._active, None)  # its place is taken
        self._active, self._since, self._target = group, now, None
        self._switch_at = now + self._settings.switch_wait_s

    def check(self, running: dict[RequestId, Running]) -> None:
        """Raise AssertionError unless groups that must not run together do not, and every gate has its reason."""
        counts: dict[str, int] = {}
        for run in running.values():
            counts[run.group] = counts.get(run.group, 0) + 1
        assert counts == self._counts, "running requests of a group miscounted"
        if self._settings.exclusive_groups:
            assert not set(counts) - {self._active}, "two groups run at once"
        for group, rid in self._pioneers.items():
            assert running[rid].group == group and running[rid].filling, "a pioneer that is none"
        for section in self._queue.held():
            assert section.gate[0] != "cold" or section.gate[1] in self._pioneers, "cold without a pioneer"

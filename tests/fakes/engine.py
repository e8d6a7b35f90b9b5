"""The fake runtime's machine room: slots, the deferred queue, the prefix cache and the step loop.

Theory of operation. A job is one sequence. ``submit`` puts it at the end of an unbounded deferred queue and every
change wakes the step loops. A loop owns all slots (``shared_step``) or one; each round it frees cancelled jobs, starts
deferred ones, builds a batch (one token per decoding slot plus up to ``n_batch`` prompt tokens), checks that the KV
cells of the batch exist, sleeps for as long as the batch takes, and then hands the results to the jobs. So whatever
happens during a batch (a cancel, above all) takes effect after it, as in llama.cpp. An idle loop sleeps on an event:
with Trio's autojump clock an idle fake does not keep time running.

A job's results go into an unbounded channel: a slow reader delays nobody, also as in llama.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import trio
from attrs import define, field

from . import tokens as T
from .script import RuntimeConfig

OVERFLOW = "Context size has been exceeded."


@define(eq=False)
class Job:
    """One sequence to be generated. ``limit`` is the most tokens it may produce.

    ``paced``: its tokens come when :meth:`Engine.produce` is called, not from the step loop.
    Events in ``results``: ``("start", slot)``, ``("progress", processed)``, ``("token", piece)``, ``("end", reason)``,
    ``("error", message)``.
    """

    prompt: list[int]
    limit: int
    index: int = 0
    id_slot: int | None = None
    stop_at: int | None = None
    hang_at: int | None = None
    paced: bool = False
    cache_prompt: bool = True
    says: list[str] = field(factory=list)  # first of all, whatever the model would say
    busy_after_close: float = 0.0
    task: int = 0
    slot: Slot | None = None
    cached: int = 0
    processed: int = 0
    generated: int = 0
    text: list[str] = field(factory=list)
    state: int = 0
    cancelled: bool = False
    over: bool = False
    prefill_s: float = 0.0
    decode_s: float = 0.0
    send: Any = None
    results: Any = None
    released: trio.Event = field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        self.send, self.results = trio.open_memory_channel[tuple[str, Any]](math.inf)

    @property
    def prefilled(self) -> bool:
        return self.processed >= len(self.prompt)

    @property
    def runnable(self) -> bool:
        hung = self.hang_at is not None and self.prefilled and self.generated >= self.hang_at
        return not (self.over or self.cancelled or self.paced or hung)


@define(eq=False)
class Slot:
    """A server slot. ``kv`` are the token ids whose KV it holds; ``busy_until`` keeps it processing after a close."""

    id: int
    n_ctx: int
    kv: list[int] = field(factory=list)
    job: Job | None = None
    last: Job | None = None
    used_at: float = -1.0
    busy_until: float | None = None
    locked: bool = False

    @property
    def busy(self) -> bool:
        return self.job is not None or self.busy_until is not None or self.locked


def common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])


@define(eq=False)
class Engine:
    """Slots and what runs in them. ``kills`` counts overflows of the unified pool, each of which ends every job."""

    config: RuntimeConfig
    slots: list[Slot] = field(factory=list)
    deferred: list[Job] = field(factory=list)
    deferred_max: int = 0
    in_flight_max: int = 0
    kills: int = 0
    tasks: int = 0
    wedged: bool = False
    totals: dict[str, float] = field(factory=dict)
    _wake: trio.Event = field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        c = self.config
        per_slot = c.n_ctx if c.unified else c.n_ctx // c.slots
        self.slots = [Slot(i, per_slot) for i in range(c.slots)]
        self.totals = dict.fromkeys(("prompt", "cached", "prompt_s", "predicted", "predicted_s", "steps"), 0)

    # --- what the front desk calls; all synchronous ---

    @property
    def running(self) -> list[Job]:
        return [slot.job for slot in self.slots if slot.job is not None]

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.deferred)

    @property
    def cells(self) -> int:
        return sum(len(slot.kv) for slot in self.slots)

    def submit(self, job: Job) -> None:
        job.task, self.tasks = self.tasks, self.tasks + 1
        job.state = T.prompt_hash(job.prompt)
        self.deferred.append(job)
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        self.dispatch()
        self.wake()
        self.deferred_max = max(self.deferred_max, len(self.deferred))

    def cancel(self, job: Job) -> None:
        """The client is gone. A running job gives its slot back at the end of the current step."""
        if job in self.deferred:
            # llama.cpp keeps a deferred job and drops it once launched; nobody can tell, except by the queue depth
            job.cancelled = True
        elif not job.over:
            in_step = job.runnable
            job.cancelled = True
            if not in_step:
                self._sweep()
        self.wake()

    def produce(self, job: Job) -> bool:
        """One more token of a paced job; False when it has ended."""
        if job.over or job.slot is None:
            return False
        if not job.prefilled:
            self._prefill(job, len(job.prompt) - job.processed)
        if not self._room(1, [job]):
            return False
        self._decode(job)
        return not job.over

    def finish(self, job: Job) -> None:
        """End a paced job whose script decided so."""
        if not job.over:
            self._end(job, "stop")

    def clear(self) -> None:
        """Forget everything, as a restart does. Running jobs end with an error."""
        for job in [*self.running, *self.deferred]:
            self._fail(job, "server restarted")
        self.deferred.clear()
        for slot in self.slots:
            slot.kv, slot.last, slot.busy_until, slot.used_at = [], None, None, -1.0

    def wake(self) -> None:
        self._wake.set()
        self._wake = trio.Event()

    # --- scheduling ---

    def dispatch(self) -> None:
        """Start every deferred job that finds a slot, first come first served."""
        for job in list(self.deferred):
            slot = self._choose(job)
            if slot is not None:
                self.deferred.remove(job)
                self._start(job, slot)
                self.wake()  # only when something started: two idle loops must not keep waking each other

    def _choose(self, job: Job) -> Slot | None:
        if job.id_slot is not None:
            slot = self.slots[job.id_slot % len(self.slots)]
            return None if slot.busy else slot
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        best = max(idle, key=lambda s: common_prefix(s.kv, job.prompt))
        if self.config.cache_model and common_prefix(best.kv, job.prompt) > 0.1 * len(job.prompt):
            return best
        return min(idle, key=lambda s: s.used_at)

    def _start(self, job: Job, slot: Slot) -> None:
        if job.cancelled:
            job.over = True
            job.released.set()
            return
        reuse = self.config.cache_model and job.cache_prompt
        # at least one prompt token is always evaluated again: its logits are needed
        job.cached = min(common_prefix(slot.kv, job.prompt), max(0, len(job.prompt) - 1)) if reuse else 0
        job.processed, job.slot = job.cached, slot
        slot.kv, slot.job, slot.last = job.prompt[: job.cached], job, job
        job.send.send_nowait(("start", slot.id))
        job.send.send_nowait(("progress", job.processed))

    def _sweep(self) -> None:
        """Free the slots of cancelled jobs and of those whose time after the close is over."""
        now = trio.current_time()
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                job = slot.job
                self._release(job)
                if job.busy_after_close:
                    slot.busy_until = now + job.busy_after_close
            if slot.busy_until is not None and now >= slot.busy_until:
                slot.busy_until = None
        self.dispatch()

    # --- the step loop ---

    async def run(self) -> None:
        groups = [self.slots] if self.config.shared_step else [[slot] for slot in self.slots]
        async with trio.open_nursery() as nursery:
            for group in groups:
                nursery.start_soon(self._loop, group)

    async def _loop(self, group: list[Slot]) -> None:
        while True:
            self._sweep()
            wake = self._wake
            jobs = [slot.job for slot in group if slot.job is not None and slot.job.runnable]
            if not jobs or self.wedged:
                until = [slot.busy_until for slot in group if slot.busy_until is not None]
                with trio.move_on_at(min(until, default=math.inf)):
                    await wake.wait()
                continue
            await self._step(jobs)

    async def _step(self, jobs: list[Job]) -> None:
        c = self.config
        decoding = [job for job in jobs if job.prefilled]
        filling, budget = [], c.n_batch
        for job in jobs:
            part = min(budget, len(job.prompt) - job.processed)
            if not job.prefilled and part > 0:
                filling.append((job, part))
                budget -= part
        need = len(decoding) + sum(part for _, part in filling)
        if not self._room(need, jobs):
            return
        decode_s = 1 / c.decode_rate if decoding else 0.0
        fill_s = sum(part for _, part in filling) / c.prefill_rate
        await trio.sleep(decode_s + fill_s)
        while self.wedged:
            await self._wake.wait()
        self.totals["steps"] += 1
        for job in decoding:
            job.decode_s += decode_s + fill_s
            if not (job.cancelled or job.over):
                self._decode(job)
        for job, part in filling:
            job.prefill_s += decode_s + fill_s
            if not (job.cancelled or job.over):
                self._prefill(job, part)
                if job.prefilled and job.hang_at != 0:
                    self._decode(job)

    def _room(self, need: int, jobs: list[Job]) -> bool:
        """Make sure that the unified pool has ``need`` more cells; running out ends *every* running request."""
        if not self.config.unified:
            return True
        idle = sorted((s for s in self.slots if s.job is None and s.kv and not s.locked), key=lambda s: s.used_at)
        while self.cells + need > self.config.n_ctx and idle:
            idle.pop(0).kv = []
        if self.cells + need <= self.config.n_ctx:
            return True
        self.kills += 1
        for job in self.running:
            slot = job.slot
            self._fail(job, OVERFLOW)
            if slot is not None:
                slot.kv = []
        self.dispatch()
        return False

    def _prefill(self, job: Job, part: int) -> None:
        assert job.slot is not None
        job.slot.kv.extend(job.prompt[job.processed : job.processed + part])
        job.processed += part
        job.send.send_nowait(("progress", job.processed))

    def _decode(self, job: Job) -> None:
        """Sample one token. The last sampled token is not in the KV, as in llama.cpp."""
        assert job.slot is not None
        slot = job.slot
        if job.generated:
            slot.kv.append(T.piece_id(job.text[-1]))
        piece = job.says.pop(0) if job.says else T.next_piece(job.state)
        job.state = T.fold(job.state, T.piece_id(piece))
        job.generated += 1
        job.text.append(piece)
        job.send.send_nowait(("token", piece))
        if job.stop_at is not None and job.generated >= job.stop_at:
            self._end(job, "stop")
        elif job.generated >= job.limit or len(job.prompt) + job.generated >= slot.n_ctx:
            self._end(job, "length")

    # --- ends ---

    def _end(self, job: Job, reason: str) -> None:
        self._release(job)
        job.send.send_nowait(("end", reason))
        self.dispatch()

    def _fail(self, job: Job, message: str) -> None:
        self._release(job)
        job.send.send_nowait(("error", message))

    def _release(self, job: Job) -> None:
        job.over = True
        t = self.totals
        t["prompt"] += job.processed - job.cached
        t["cached"] += job.cached
        t["prompt_s"] += job.prefill_s
        t["predicted"] += job.generated
        t["predicted_s"] += job.decode_s
        if job.slot is not None and job.slot.job is job:
            job.slot.job, job.slot.used_at = None, trio.current_time()
        job.released.set()

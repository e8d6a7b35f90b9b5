"""The fake runtime's machine room: slots, the deferred queue, the prefix cache and the step loop.

Theory of operation. A job is one sequence. ``submit`` puts it at the end of an unbounded deferred queue and every
change wakes the step loops. A loop owns all slots (``shared_step``) or one; each round it frees cancelled jobs, starts
deferred ones, builds a batch (one token per decoding slot plus up to ``n_batch`` prompt tokens), checks that the KV
cells of the batch exist, sleeps for as long as the batch takes, and then hands the results to the jobs. So whatever
happens during a batch (a cancel, above all) takes effect after it, as in llama.cpp. An idle loop sleeps on an event:
with Trio's autojump clock an idle fake does not keep time running.

A job's results go into an unbounded channel: a slow reader delays nobody, also as in llama.cpp.

Slots are given as llama.cpp gives them (read in its source, provoked on the real server). What is pinned to a busy slot
is deferred, and so is a slot action. A slot that comes free wakes one deferred task, the first that names it or else
the first of all; if that one waits for another slot, the free one stays idle (T1). With the RAM cache on, a pinned task
exchanges the KV of its slot *before* it is found to be busy, under the request that runs there (T0): ``corruptions``
counts those, ``busy_pins`` all requests pinned to a slot at work. A slot action holds up everything (``held``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import trio
from attrs import define, field

from . import tokens as T
from .ramcache import RamCache, common_prefix
from .script import RuntimeConfig

OVERFLOW = "Context size has been exceeded."


@define(eq=False)
class Job:
    """One sequence to be generated. ``limit`` is the most tokens it may produce.

    ``paced``: its tokens come when :meth:`Engine.produce` is called, not from the step loop. ``media``: it has images.
    ``corrupted``: its KV was exchanged under it, or was never its own: what it says from then on is wrong.
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
    media: bool = False
    corrupted: bool = False
    pinned_busy: bool = False
    eos: bool = True
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
class Action:
    """A slot action. ``start`` is called, once, when the slot is free; whoever it starts calls ``Engine.acted``.
    ``id_slot`` is as asked for: it wraps around."""

    id_slot: int
    start: Callable[[Slot], None]
    dropped: Callable[[], None]
    hang_at: None = None


@define(eq=False)
class Slot:
    """A server slot. ``kv`` are the token ids whose KV it holds; ``busy_until`` keeps it processing after a close.
    ``hollow``: restored, but of no use to the next request. ``wrong``: restored from a file of another model."""

    id: int
    n_ctx: int
    kv: list[int] = field(factory=list)
    job: Job | None = None
    last: Job | None = None
    used_at: float = -1.0
    busy_until: float | None = None
    hollow: bool = False
    wrong: bool = False
    media: bool = False

    @property
    def busy(self) -> bool:
        return self.job is not None or self.busy_until is not None

    def hold(self, kv: list[int], *, hollow: bool = False, wrong: bool = False) -> None:
        self.kv, self.hollow, self.wrong, self.media = kv, hollow, wrong, False


@define(eq=False)
class Engine:
    """Slots and what runs in them. ``kills`` counts overflows of the unified pool, each of which ends every job."""

    config: RuntimeConfig
    slots: list[Slot] = field(factory=list)
    deferred: list[Job | Action] = field(factory=list)
    ram: RamCache = field(factory=RamCache)
    deferred_max: int = 0
    actions_deferred: int = 0
    corruptions: int = 0
    busy_pins: int = 0
    held: int = 0
    used_at: float = 0.0
    in_flight_max: int = 0
    kills: int = 0
    tasks: int = 0
    wedged: bool = False
    totals: dict[str, float] = field(factory=dict)
    _wake: trio.Event = field(factory=trio.Event)
    _inbox: list[Job | Action] = field(factory=list)
    _freed_meanwhile: list[Slot] = field(factory=list)

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
    def waiting(self) -> list[Job]:
        return [task for task in (*self.deferred, *self._inbox) if isinstance(task, Job)]

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def cells(self) -> int:
        return sum(len(slot.kv) for slot in self.slots)

    @property
    def asleep(self) -> bool:
        """Whether nothing was asked of it for so long that it has put the model away."""
        after = self.config.sleep_idle_s
        return after is not None and not self.in_flight and trio.current_time() >= self.used_at + after

    def submit(self, job: Job) -> None:
        job.task, self.tasks = self.tasks, self.tasks + 1
        job.state = T.prompt_hash(job.prompt)
        self.in_flight_max = max(self.in_flight_max, self.in_flight + 1)
        self.act(job)

    def act(self, task: Job | Action) -> None:
        """Take a request or a slot action: it begins, or is deferred."""
        self.used_at = trio.current_time()
        if self.held:
            self._inbox.append(task)
        elif not self._place(task):
            self.deferred.append(task)
            self.actions_deferred += isinstance(task, Action)
            self.deferred_max = max(self.deferred_max, sum(isinstance(each, Job) for each in self.deferred))
        self.wake()

    def acted(self) -> None:
        """A slot action is over. What came meanwhile is taken up in order."""
        self.held -= 1
        self.used_at = trio.current_time()
        while not self.held and (self._freed_meanwhile or self._inbox):
            if self._freed_meanwhile:
                self._freed(self._freed_meanwhile.pop(0))
            else:
                self.act(self._inbox.pop(0))
        self.wake()

    async def at_leisure(self) -> None:
        """Wait while a slot action holds up the main loop."""
        while self.held:
            await self._wake.wait()

    def cancel(self, job: Job) -> None:
        """The client is gone. A running job gives its slot back at the end of the current step."""
        if job in self.deferred or job in self._inbox:
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
        tasks, self.deferred, self._inbox = [*self.deferred, *self._inbox], [], []
        for task in [*self.running, *tasks]:
            if isinstance(task, Job):
                self._fail(task, "server restarted")
            else:
                task.dropped()
        self.forget()

    def forget(self) -> None:
        """Every cache is empty."""
        self.ram = RamCache()
        for slot in self.slots:
            slot.hold([])
            slot.last, slot.busy_until, slot.used_at = None, None, -1.0

    def wake(self) -> None:
        self._wake.set()
        self._wake = trio.Event()

    # --- which slot ---

    def slot(self, number: int) -> Slot:
        """Numbers wrap around."""
        return self.slots[number % len(self.slots)]

    def _place(self, task: Job | Action) -> bool:
        """Begin with a task if its slot is free."""
        if isinstance(task, Action):
            slot = self.slot(task.id_slot)
            if not slot.busy:
                self.held += 1
                task.start(slot)
            return not slot.busy
        chosen = self._choose(task)
        if chosen is None or chosen.busy:
            return False
        self._start(task, chosen)
        return True

    def _choose(self, job: Job) -> Slot | None:
        """llama.cpp's choice. A slot asked for by number may be busy, and its KV may be exchanged on the way."""
        c, likeness, best, exchange = self.config, 0.0, None, False
        for slot in self.slots:
            if slot.busy or not slot.kv or not c.cache_model or not c.slot_prompt_similarity:
                continue
            alike = common_prefix(slot.kv, job.prompt) / max(1, len(job.prompt))
            if alike > max(likeness, c.slot_prompt_similarity) and job.id_slot in (None, slot.id):
                likeness, best = alike, slot
        if job.id_slot is not None:
            best = self.slot(job.id_slot)
            self.busy_pins += best.busy
            job.pinned_busy |= best.busy
        if best is not None:  # by likeness, or by number: then the likeness to a busy slot counts as none
            lost = bool(best.kv) and likeness * len(job.prompt) / len(best.kv) < 0.5
            exchange = lost and bool(c.slot_prompt_similarity)
        else:
            idle = [slot for slot in self.slots if not slot.busy]
            best, exchange = min(idle, key=lambda s: s.used_at, default=None), True
        if best is not None and exchange and c.cache_ram:
            self._exchange(best, job.prompt)
        return best

    def _exchange(self, slot: Slot, prompt: list[int]) -> None:
        """Put the slot's KV into the RAM cache and take out what fits the prompt better, also under a running job."""
        self.ram.save(slot.kv)
        found = self.ram.take(slot.kv, prompt)
        if found is None:
            return
        slot.hold(found)
        if slot.job is not None:
            self.corruptions += 1
            slot.job.corrupted = True
            slot.job.state = T.prompt_hash(found)

    def _start(self, job: Job, slot: Slot) -> None:
        c = self.config
        reuse = c.cache_model and job.cache_prompt and not slot.hollow
        # at least one prompt token is always evaluated again: its logits are needed
        job.cached = min(common_prefix(slot.kv, job.prompt), max(0, len(job.prompt) - 1)) if reuse else 0
        if slot.wrong and job.cached:
            job.corrupted, job.state = True, T.fold(job.state, 0)
        job.processed, job.slot = job.cached, slot
        slot.hold(job.prompt[: job.cached], wrong=slot.wrong and job.cached > 0)
        slot.job, slot.last, slot.media = job, job, job.media
        if c.cache_ram and (c.unified if c.cache_idle_slots is None else c.cache_idle_slots):
            for other in self.slots:
                if not other.busy:
                    self.ram.save(other.kv)
                    other.hold([])
        job.send.send_nowait(("start", slot.id))
        job.send.send_nowait(("progress", job.processed))
        self.wake()

    def _freed(self, slot: Slot) -> None:
        """A slot came free: one deferred task is taken up, if it can be."""
        self.used_at = trio.current_time()
        if self.held:
            self._freed_meanwhile.append(slot)
            return
        while self.deferred:
            mine = (i for i, task in enumerate(self.deferred) if isinstance(task, Job) and task.id_slot == slot.id)
            task = self.deferred.pop(next(mine, 0))
            if isinstance(task, Job) and task.cancelled:
                task.over = True
                task.released.set()
                continue
            if not self._place(task):
                self.deferred.append(task)
            return

    def _sweep(self) -> None:
        """Free the slots of cancelled jobs and of those whose time after the close is over."""
        now = trio.current_time()
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                job = slot.job
                self._release(job)
                if job.busy_after_close:
                    slot.busy_until = now + job.busy_after_close
                else:
                    self._freed(slot)
            elif slot.busy_until is not None and now >= slot.busy_until:
                slot.busy_until = None
                self._freed(slot)

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
            if not jobs or self.wedged or self.held:
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
        while self.wedged or self.held:
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
        idle = sorted((s for s in self.slots if s.job is None and s.kv), key=lambda s: s.used_at)
        while self.cells + need > self.config.n_ctx and idle:
            idle.pop(0).hold([])
        if self.cells + need <= self.config.n_ctx:
            return True
        self.kills += 1
        freed = [slot for slot in self.slots if slot.job is not None]
        for job in self.running:
            self._fail(job, OVERFLOW)
        for slot in freed:
            slot.hold([])
        for slot in freed:
            self._freed(slot)
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
        ends = bool(self.config.ends_every) and job.eos and job.state % self.config.ends_every == 0
        if ends or (job.stop_at is not None and job.generated >= job.stop_at):
            self._end(job, "stop")
        elif job.generated >= job.limit or len(job.prompt) + job.generated >= slot.n_ctx:
            self._end(job, "length")

    # --- ends ---

    def _end(self, job: Job, reason: str) -> None:
        slot = job.slot
        self._release(job)
        job.send.send_nowait(("end", reason))
        if slot is not None:
            self._freed(slot)

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

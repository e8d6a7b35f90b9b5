"""Executes the ops of plans on a device: three streams, the pool, the slab, and the events between them.

Theory of operation. The planner has decided everything; here each op becomes one or two calls. *compute* encodes new
rows and attends; *copy* brings pages in; *save* takes new rows out. What an op of one stream needs from another is an
op itself (``Ready`` and ``Await``, ``Used`` and ``AfterUse``, ...), and becomes an event and a wait for it, so the host
never waits in a step.

Events are known by name (a kind and a number), and a name means its latest record, also that of an earlier step. One
that was found done is forgotten, and a wait for it is spared; a wait for a name that was never recorded is a mistake of
the plan.

Every ``sample_every``-th step is *sampled*: its fences carry times, and a few more events tell when a batch began and
when the computation would have been ready for it. The times are read in a later step, when they are there, so this
does not wait either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from attrs import define, field, frozen

from ..errors import StepError
from .launches import Drafts, Encodings, Io, Part
from .layout import STAGED, Layout
from .ops import (
    AfterSaved,
    AfterUse,
    AfterWritten,
    Attend,
    Await,
    AwaitSaved,
    Fold,
    Ready,
    Save,
    Saved,
    Upload,
    Used,
    Write,
    Written,
)
from .plan import Plan
from .tables import Loads, Steady

if TYPE_CHECKING:
    from .device import Bytes, Device, Event, Stream


Name: TypeAlias = tuple[str, int]
"""Of an event: its kind and its number."""


@define
class Counters:
    """What was done since the device was opened. Bytes and calls are those of KV pages and rows; what tells the kernels
    about a step counts as ``table_*``. ``launches_wide`` of the ``launches`` are on tensor cores. ``misses`` of
    ``samples`` batches came later than the kernel that needed them could have begun; ``copy_s``, ``exposed_s`` and
    ``step_s`` are sums over the sampled steps."""

    steps: int = 0
    steps_streamed: int = 0
    rows: int = 0
    in_bytes: int = 0
    in_calls: int = 0
    in_pages: int = 0
    out_bytes: int = 0
    out_calls: int = 0
    table_bytes: int = 0
    table_calls: int = 0
    launches: int = 0
    launches_wide: int = 0
    events: int = 0
    waits: int = 0
    waits_spared: int = 0
    host_waits: int = 0
    batches: int = 0
    cross_layer_prefetches: int = 0
    cross_step_prefetches: int = 0
    steps_sampled: int = 0
    samples: int = 0
    misses: int = 0
    copy_s: float = 0.0
    exposed_s: float = 0.0
    step_s: float = 0.0


@define(eq=False)
class _Batch:
    """When its first upload could begin, when it was there, and when the computation came to it."""

    begun: Event
    layer: int
    bytes: int = 0
    ready: Event | None = None
    asked: Event | None = None


@define(eq=False)
class _Sample:
    """Timed events of one step. ``open``: the latest batch of each name."""

    start: Event
    batches: list[_Batch] = field(factory=list)
    open: dict[int, _Batch] = field(factory=dict)
    end: Event | None = None


@frozen
class Figures:
    """A sampled step, read. Seconds; ``bytes_per_s`` of the fastest batch, which had nothing to wait for. ``pause_s``:
    from the last batch of one layer to the first of the next, when no cell comes free, on average; 0 if unknown."""

    batches: int
    misses: int
    bytes_per_s: float
    copy_s: float
    exposed_s: float
    step_s: float
    pause_s: float


class Executor:
    """Owns the pool, the slab and the streams. *Errors*: ``DeviceError``; after one of a step the device is lost.

    ``slab`` is the whole pinned memory, stagings included; pages are read and written there by the host only when the
    streams are quiet (``quiet``). ``tensor``: wide parts of a step attend on tensor cores; may change
    between steps.
    """

    def __init__(self, device: Device, layout: Layout, *, sample_every: int = 8) -> None:
        self.layout = layout
        self.tensor = False
        self.counters = Counters()
        self._device = device
        self._sample_every = sample_every
        self.pool = device.alloc(layout.pool_bytes)
        try:
            self.slab: Bytes = device.pinned(layout.host_bytes)
            self.compute, self.copy, self.save = (device.stream(name) for name in ("compute", "copy", "save"))
        except BaseException:
            device.free(self.pool)
            raise
        stagings = [self.slab[start : start + layout.staging_bytes] for start in map(layout.staging, (0, 1))]
        staged = min(layout.workspace(name).offset for name in STAGED)
        self._region = self.pool + staged
        self._loads = Loads(device, self.compute, self._region, (stagings[0], stagings[1]), self._loaded)
        self._steady: Steady | None = None
        self._io = Io()
        self._events: dict[Name, Event] = {}
        self._recorded: set[Name] = set()
        self._layer = -1  # whose computation is being enqueued
        self._sample: _Sample | None = None
        geometry = layout.geometry
        # Looked up for every copy, so computed once: bytes of a row and a page, and where planes begin.
        self._row_bytes = geometry.k_row_bytes, geometry.v_row_bytes
        self._page_bytes = geometry.k_page_bytes, geometry.v_page_bytes
        self._cells_at = self.pool + layout.k_cell(0), self.pool + layout.v_cell(0)
        self._planes_at = [(layout.k_host(layer, 0), layout.v_host(layer, 0)) for layer in range(geometry.layers)]
        self._encoded = Encodings(layout, self.pool)
        self._begun: set[int] = set()  # batches of which a part is enqueued, and the rest will be
        self._calls_before = 0

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin(self, plan: Plan, parts: tuple[Part, ...], scale: float) -> Figures | None:
        """Start a step; what an earlier, sampled step was like, once it is known."""
        figures = self._read_sample()
        self._prune()
        counters = self.counters
        if self._sample is None and counters.steps % self._sample_every == 0:
            self._sample = _Sample(self._device.record(self.compute, timed=True))
        counters.steps += 1
        counters.rows += sum(part.rows for part in parts)
        self._layer = -1
        self._encoded.next_step()
        self._tell(plan, parts, scale)
        self._calls_before = counters.in_calls
        self.run(plan.begin)
        return figures

    def _tell(self, plan: Plan, parts: tuple[Part, ...], scale: float) -> None:
        """The kernels' tables, or what is new in them."""
        geometry, steady = self.layout.geometry, self._steady
        if steady is not None and steady.fits(plan.attend, parts, geometry):
            self._loads.again(steady.words(parts), steady.places)
            return
        self._steady = None  # if this fails half-way
        drafts = Drafts(self.layout, self.pool, parts, scale, self._encoded, self.tensor)
        self._loads.begin(_of_layers(drafts, plan))
        self._steady = Steady.of(plan.attend, parts, geometry, self._loads, self._region)

    def append(self, plan: Plan, layer: int, k: int, v: int) -> None:
        self._layer = layer
        self._io.k, self._io.v = k, v
        self.run(plan.append[layer])

    def attend(self, plan: Plan, layer: int, q: int, out: int) -> None:
        self._io.q, self._io.out = q, out
        self.run(plan.attend[layer])

    def end(self, plan: Plan) -> None:
        self._layer = self.layout.geometry.layers
        self.run(plan.end)
        self.counters.steps_streamed += self.counters.in_calls > self._calls_before
        sample = self._sample
        if sample is not None and sample.end is None:
            sample.end = self._device.record(self.compute, timed=True)

    def abandon(self) -> None:
        """Forget a step: everything that was enqueued has run, or the device is lost anyway."""
        self.quiet()
        self._loads.clear()
        self._begun.clear()
        self._sample = self._steady = None

    def quiet(self) -> None:
        """Wait until nothing runs. Then pages of the slab may be read and written by the host."""
        self.counters.host_waits += 1
        self._device.synchronize()
        self._events.clear()

    def forget(self) -> None:
        """Drop what belongs to the driver, before the device is closed."""
        self._loads.clear()
        self._events.clear()
        self._sample = None

    # --- ops ----------------------------------------------------------------------------------------------------------

    def run(self, ops: Iterable[Any]) -> None:
        for op in ops:
            match op:
                case Upload():
                    self._upload(op)
                case Ready(batch):
                    self._arrived(batch)
                case AfterUse(use):
                    self._wait(self.copy, ("used", use))
                case AfterSaved(save):
                    self._wait(self.copy, ("saved", save))
                case Write():
                    self._launch("kv_write")
                case Written(layer):
                    self._record(self.compute, ("written", layer))
                case AfterWritten(layer):
                    self._wait(self.save, ("written", layer))
                case Save():
                    self._save_rows(op)
                case Saved(save):
                    self._record(self.save, ("saved", save))
                case AwaitSaved(save):
                    self._wait(self.compute, ("saved", save))
                case Await(batch):
                    self._await(batch)
                case Attend():
                    self._launch("kv_attend", "kv_wide")
                case Used(use):
                    self._record(self.compute, ("used", use))
                case Fold():
                    self._launch("kv_fold")
                case _:
                    raise StepError(f"the plan has an op that nobody knows: {op}")

    def _upload(self, op: Upload) -> None:
        sample = self._sampled()
        if op.batch not in self._begun:
            self._begun.add(op.batch)
            self.counters.batches += 1
            self.counters.cross_layer_prefetches += op.layer > max(self._layer, 0)
            self.counters.cross_step_prefetches += self._layer == self.layout.geometry.layers
            if sample is not None:
                batch = sample.open[op.batch] = _Batch(self._device.record(self.copy, timed=True), op.layer)
                sample.batches.append(batch)
        for page_bytes, cells_at, plane_at in zip(
                self._page_bytes, self._cells_at, self._planes_at[op.layer], strict=True):
            source, size = plane_at + op.page * page_bytes, op.count * page_bytes
            self._device.copy_in(self.copy, cells_at + op.cell * page_bytes, self.slab[source : source + size])
            self.counters.in_bytes += size
            self.counters.in_calls += 1
        self.counters.in_pages += op.count
        if sample is not None and op.batch in sample.open:
            sample.open[op.batch].bytes += op.count * sum(self._page_bytes)

    def _save_rows(self, op: Save) -> None:
        for row_bytes, page_bytes, cells_at, plane_at in zip(
                self._row_bytes, self._page_bytes, self._cells_at, self._planes_at[op.layer], strict=True):
            start, size = op.first_token * row_bytes, op.count * row_bytes
            target = plane_at + op.page * page_bytes + start
            self._device.copy_out(self.save, self.slab[target : target + size],
                                  cells_at + op.cell * page_bytes + start)
            self.counters.out_bytes += size
            self.counters.out_calls += 1

    def _launch(self, *kernels: str) -> None:
        """All launches of one op."""
        more = True
        while more:
            placed = self._loads.take(*kernels)
            draft = placed.draft
            self._device.launch(self.compute, draft.kernel, draft.grid, draft.block,
                                draft.args(placed.addresses, self._io), draft.shared_bytes)
            self.counters.launches += 1
            self.counters.launches_wide += draft.kernel.startswith("kv_wide")
            more = draft.more

    def _arrived(self, batch: int) -> None:
        self._begun.discard(batch)
        sample = self._sampled()
        event = self._record(self.copy, ("ready", batch), timed=sample is not None)
        if sample is not None and batch in sample.open:
            sample.open[batch].ready = event

    def _await(self, batch: int) -> None:
        sample = self._sampled()
        if sample is not None and batch in sample.open and sample.open[batch].asked is None:
            sample.open[batch].asked = self._device.record(self.compute, timed=True)
        self._wait(self.compute, ("ready", batch))

    def _record(self, stream: Stream, name: Name, timed: bool = False) -> Event:
        self.counters.events += 1
        event = self._device.record(stream, timed)
        self._events.pop(name, None)  # so that the dictionary stays in the order of recording
        self._events[name] = event
        self._recorded.add(name)
        return event

    def _wait(self, stream: Stream, name: Name) -> None:
        event = self._events.get(name)
        if event is not None:
            self.counters.waits += 1
            self._device.wait(stream, event)
        elif name in self._recorded:
            self.counters.waits_spared += 1
        else:
            raise StepError(f"the plan waits for {name[0]} {name[1]}, which nothing has recorded")

    def _prune(self) -> None:
        """Forget what has happened. Events of one kind are of one stream and happen in order: the oldest that has not
        happened ends the search among its kind."""
        pending = set()
        for name in list(self._events):
            if name[0] in pending:
                continue
            if self._device.query(self._events[name]):
                del self._events[name]
            else:
                pending.add(name[0])

    def _loaded(self, size: int, waited: bool) -> None:
        self.counters.table_bytes += size
        self.counters.table_calls += 1
        self.counters.host_waits += waited

    # --- samples ------------------------------------------------------------------------------------------------------

    def _sampled(self) -> _Sample | None:
        """The sample that the step at hand goes into; one of an earlier step may still wait to be read."""
        return self._sample if self._sample is not None and self._sample.end is None else None

    def _read_sample(self) -> Figures | None:
        sample = self._sample
        if sample is None or sample.end is None or not self._device.query(sample.end):
            return None
        self._sample = None
        between = self._device.elapsed_s
        copy_s = exposed_s = 0.0
        batches = misses = 0
        rate = 0.0
        pauses: list[float] = []
        last: _Batch | None = None
        for batch in sample.batches:
            if batch.ready is None or batch.asked is None:  # for the step after this one
                continue
            batches += 1
            took = between(batch.begun, batch.ready)
            rate = max(rate, batch.bytes / took if took > 0 else 0.0)
            copy_s += took
            late = between(batch.asked, batch.ready)
            exposed_s += max(0.0, late)
            misses += late > 0
            if last is not None and last.ready is not None and last.asked is not None and batch.layer > last.layer:
                since = min(between(last.asked, batch.asked), between(last.ready, batch.asked))
                pauses.append(since / (batch.layer - last.layer))
            last = batch
        pause_s = max(0.0, sum(pauses) / len(pauses)) if pauses else 0.0
        figures = Figures(batches, misses, rate, copy_s, exposed_s, between(sample.start, sample.end), pause_s)
        counters = self.counters
        counters.steps_sampled += 1
        counters.samples += figures.batches
        counters.misses += misses
        counters.copy_s += copy_s
        counters.exposed_s += exposed_s
        counters.step_s += figures.step_s
        return figures


def _of_layers(drafts: Drafts, plan: Plan) -> Iterator[Any]:
    for append, attend in zip(plan.append, plan.attend, strict=True):
        yield from drafts.layer((*append, *attend))

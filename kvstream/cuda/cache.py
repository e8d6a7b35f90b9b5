"""The KV cache itself: sequences, steps and pages, as plain calls that must all be made on one thread.

Theory of operation. Host memory has the truth. What is on the device is a frozen ``Residency``, and a step is: ask the
policy how much of each layer is to stay, let the planner say which ops that takes, and hand them to the executor as the
caller comes to each layer. ``begin_step`` does everything that can be refused before it changes anything: pages for the
new tokens are taken, the plan is made, and only then is something enqueued. So when memory runs out nothing is lost.
``end_step`` makes the new tokens part of their sequences and the plan's residency the current one.

Between steps sequences are forked, cut, dropped, saved and loaded. Whatever reads or writes host pages by the
processor waits for the device first (``quiet``); these calls are rare, and nothing else makes the host wait. Pages that
are given back are taken out of the residency before they can be given out again.

A step that was begun and cannot be ended is abandoned: its new pages are given back and the whole residency is
forgotten, because the plan's copies have overwritten cells in an order that only the finished plan describes. The host
still has every token of the steps that ended.

When the device fails it is lost, with all sequences: only ``close`` works then.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index as whole
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import asdict, frozen

from ..errors import ConfigError, DeviceError, DeviceMemoryError, StepError
from .arrays import Arrays, array_bytes
from .executor import Executor, Figures
from .launches import Part, parts_of, tensor_possible
from .layout import Geometry, plan_layout
from .numerics import check_numerics
from .plan import Plan, plan_step
from .policy import Feedback, Policy, Split
from .records import Opening, Saved, Stats
from .ring import Residency
from .sequences import Change, Sequences

if TYPE_CHECKING:
    from .device import Bytes, Device, Stream

log = logging.getLogger("kvstream.cuda")

MIB = 1 << 20
PAUSE_MIN = 0.8
"""Of a layer's time: for less a ring is not laid out, however much of the layer attends pages that pass. Chunks are not
infinitely small: with what was seen alone, simulated decode at 164K was 2 % slower."""
HALF_DONE = ("abandon_step", 0)
"""What is expected while operations are enqueued, and after that has failed: half of them cannot be done again."""


@frozen(eq=False)
class _Step:
    batch: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...]
    plan: Plan
    split: Split
    rows: int


class KVCache:
    """Sequences and their KV over one device. All calls on the thread that made ``device``; it owns the device.

    *Errors*: ``ConfigError`` from making it when the sizes do not fit, ``DeviceMemoryError`` when the memory is not
    there; then nothing is left allocated. Later ``StepError`` and ``DeviceMemoryError`` change nothing.
    """

    def __init__(self, device: Device, geometry: Geometry, opening: Opening) -> None:
        if opening.sample_every < 1:
            raise ConfigError(f"sample_every is {opening.sample_every}, it must be at least 1")
        own = array_bytes(geometry, opening.rows_max) if opening.arrays else 0
        self.geometry = geometry
        self.layout = plan_layout(geometry, opening.pool_bytes, opening.host_bytes, opening.rows_max,
                                  opening.sequences_max, opening.context_max, opening.table_slots, host_taken=own)
        self.device = device
        self._opening = opening
        self._scale = geometry.head_size**-0.5 if opening.scale is None else opening.scale
        self._executor = Executor(device, self.layout, sample_every=opening.sample_every)
        self._executor.tensor = opening.wide == "tensor" and tensor_possible(self.layout)
        if device.computes:
            wrong = check_numerics(device, self.layout, self._executor.pool, self._executor.slab,
                                   self._executor.compute, self._executor.tensor)
            if wrong is not None:
                log.warning("%s: %s; wide steps are computed without tensor cores, several times slower", device.name,
                            wrong)
                self._executor.tensor = False
        self._arrays = Arrays(device, self.layout, self._executor.compute, self._executor.pool, opening.arrays)
        self._sequences = Sequences(self.layout.host_pages, geometry.page_tokens)
        self._residency = self._nothing()
        self._policy = Policy.opened(self._cells_to_split(), geometry.layers)
        self._split: Split | None = None
        self._feedback = Feedback()
        self._repartitions = 0
        self._step: _Step | None = None
        self._expected: tuple[str, int] = ("", 0)
        self._failed: str | None = None
        self._host_bytes = self.layout.host_bytes + own
        self._say_what_is_active()

    @property
    def compute(self) -> Stream:
        """The stream on which inputs are read and results are written: whoever computes them enqueues there."""
        return self._executor.compute

    # --- sequences ----------------------------------------------------------------------------------------------------

    def create(self, tokens: int = 0) -> int:
        """A new sequence. ``tokens``: it begins with so many, whose KV is whatever lies in host memory; that is for
        measurements, which need a long context and not what it says."""
        with self._between_steps():
            if not 0 <= tokens <= self.layout.context_max:
                raise StepError(f"a sequence of {tokens} tokens: this cache was opened for {self.layout.context_max}")
            return self._sequences.create(tokens)

    def fork(self, sequence: int) -> int:
        with self._between_steps():
            if self._sequences[sequence].tokens % self.geometry.page_tokens:
                self._quiet()
            fork, change = self._sequences.fork(sequence)
            self._carry_out(change)
            return fork

    def truncate(self, sequence: int, tokens: int) -> None:
        with self._between_steps():
            if self._sequences.shares_end(sequence, tokens):
                self._quiet()
            self._carry_out(self._sequences.truncate(sequence, tokens))

    def drop(self, sequence: int) -> None:
        with self._between_steps():
            self._carry_out(self._sequences.drop(sequence))

    def tokens(self, sequence: int) -> int:
        return self._sequences[sequence].tokens

    def _carry_out(self, change: Change) -> None:
        """Whoever has something to copy has waited for the device before he changed anything: that may fail."""
        self._residency = self._residency.without(change.freed)
        for copy in change.copies:
            for layer in range(self.geometry.layers):
                for to, of in zip(self._rows(layer, copy.target, copy.tokens),
                                  self._rows(layer, copy.source, copy.tokens), strict=True):
                    to[:] = of

    # --- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, batch: Sequence[tuple[int, int]]) -> None:
        """(sequence, new tokens) of each sequence in the step. *Errors*: ``StepError``, ``DeviceMemoryError``: nothing
        has changed, and the same step can be tried again once there is room."""
        with self._between_steps():
            told = tuple((whole(sequence), whole(new)) for sequence, new in batch)
            self._check_batch(told)
            self._sequences.extend(told)
            try:
                step = self._planned(told)
            except BaseException:
                self._residency = self._residency.without(
                    self._sequences.shrink(sequence for sequence, _ in told))
                raise
            self._step, self._expected = step, HALF_DONE
            try:
                figures = self._executor.begin(step.plan, step.parts, self._scale)
            except BaseException as error:
                if not _means_lost(error):
                    self._give_back(step)
                raise
            self._expected = ("append", 0)
            if figures is not None:
                self._heard(figures)

    def append(self, layer: int, k: Any, v: Any) -> None:
        """New rows of a layer, [rows][kv_heads][head_size] f32: arrays, or addresses of device memory."""
        with self._in_step("append", layer) as step:
            addresses = self._arrays.rows_in(k, v, step.rows)
            self._expected = HALF_DONE
            self._executor.append(step.plan, layer, *addresses)
            self._expected = ("attend", layer)

    def attend(self, layer: int, q: Any, out: int = 0) -> Any:
        """Attention of the new rows, [rows][q_heads][head_size] f32. An array comes back for an array, an address for
        an address (``out``, or one inside the pool that the next layer overwrites); addresses are multiples of 16."""
        with self._in_step("attend", layer) as step:
            geometry = self.geometry
            values = step.rows * geometry.q_heads * geometry.head_size
            if out < 0:
                raise StepError(f"the result is to be at {out}, which is no address")
            q_at = self._arrays.queries_in(q, step.rows)
            if (q_at | out) % 16:
                raise StepError("queries and results must lie at multiples of 16 bytes")
            out_at = out or self._arrays.address("out")
            self._expected = HALF_DONE
            self._executor.attend(step.plan, layer, q_at, out_at)
            found = out_at if isinstance(q, int) else self._arrays.result(out_at, values).reshape(
                step.rows, geometry.q_heads, geometry.head_size)
            self._expected = ("append", layer + 1) if layer + 1 < geometry.layers else ("end_step", 0)
            return found

    def end_step(self) -> None:
        with self._in_step("end_step", 0) as step:
            self._expected = HALF_DONE
            self._executor.end(step.plan)
            self._residency = step.plan.residency
            self._sequences.commit(step.batch)
            self._step, self._expected = None, ("", 0)

    def abandon_step(self) -> None:
        """As if the step had not begun; the device holds no pages afterwards."""
        step = self._step
        if step is None:
            raise StepError("no step has been begun")
        with self._watched():
            self._give_back(step)

    def _give_back(self, step: _Step) -> None:
        self._executor.abandon()
        self._sequences.shrink(sequence for sequence, _ in step.batch)
        self._residency = self._nothing()
        self._step, self._expected = None, ("", 0)

    def _check_batch(self, batch: tuple[tuple[int, int], ...]) -> None:
        layout = self.layout
        rows = sum(new for _, new in batch)
        if not batch or any(new < 1 for _, new in batch):
            raise StepError("a step needs at least one sequence, and each at least one new token")
        if len({sequence for sequence, _ in batch}) < len(batch):
            raise StepError("a sequence is in the step twice")
        if len(batch) > layout.sequences_max or rows > layout.rows_max:
            raise StepError(f"a step of {len(batch)} sequences and {rows} new tokens: this cache was opened for "
                            f"{layout.sequences_max} and {layout.rows_max}")
        for sequence, new in batch:
            tokens = self._sequences[sequence].tokens + new
            if tokens > layout.context_max:
                raise StepError(f"sequence {sequence} would have {tokens} tokens: this cache was opened for "
                                f"{layout.context_max}")

    def _planned(self, batch: tuple[tuple[int, int], ...]) -> _Step:
        before = tuple((sequence, self._sequences[sequence].tokens, new) for sequence, new in batch)
        parts = parts_of(before, self.geometry.page_tokens)
        tables = {sequence: self._sequences[sequence].pages for sequence, _ in batch}
        active = len({page for pages in tables.values() for page in pages[:-1]})
        widest = max(new for _, new in batch)
        if self._opening.split is not None:
            split = self._opening.split(active)
        else:
            self._policy, split = self._policy.step(active, widest, self._feedback)
        if self._split is not None and split.layer_pages != self._split.layer_pages:
            self._repartitions += 1
        self._split = split
        plan = plan_step(self._residency, split, before, tables, self.geometry, table_slots=self.layout.table_slots)
        return _Step(batch, parts, plan, split, sum(new for _, new in batch))

    def _heard(self, figures: Figures) -> None:
        old = self._feedback
        busy = min(1.0, figures.copy_s / figures.step_s) if figures.step_s > 0 else 0.0
        # What the link carries while no cell comes free. Where that was not seen: in the time of a layer, without the
        # time in which the layer only waited for it.
        layer_s = max(0.0, figures.step_s - figures.exposed_s) / self.geometry.layers
        pause_s = max(figures.pause_s, PAUSE_MIN * layer_s) if figures.pause_s > 0 else layer_s
        lead = round(pause_s * figures.bytes_per_s / self.geometry.page_bytes)
        self._feedback = Feedback(old.samples + figures.batches, old.misses + figures.misses, busy, old.peak, lead)

    # --- pages --------------------------------------------------------------------------------------------------------

    def save(self, sequence: int) -> Saved:
        """A copy of a sequence's tokens in ordinary memory. The sequence stays as it is."""
        with self._between_steps():
            found = self._sequences[sequence]
            self._quiet()
            data = tuple(np.concatenate([np.zeros(0, np.uint8), *(
                rows for plane in (0, 1) for rows in self._runs(layer, plane, found.pages, found.tokens))])
                for layer in range(self.geometry.layers))
            return Saved(self.geometry, found.tokens, data)

    def load(self, saved: Saved) -> int:
        """A new sequence from saved pages. *Errors*: ``StepError`` for another geometry or too many tokens,
        ``DeviceMemoryError`` when the host has no pages for it."""
        with self._between_steps():
            geometry = self.geometry
            row_bytes = geometry.k_row_bytes + geometry.v_row_bytes
            if saved.geometry != geometry:
                raise StepError(f"these pages are of {saved.geometry}, this cache has {geometry}")
            if saved.tokens > self.layout.context_max:
                raise StepError(f"{saved.tokens} tokens were saved, this cache was opened for "
                                f"{self.layout.context_max}")
            if [part.nbytes for part in saved.data] != [saved.tokens * row_bytes] * geometry.layers:
                raise StepError(f"{saved.nbytes} bytes are not {saved.tokens} tokens of {geometry.layers} layers")
            if any(part.dtype != np.uint8 or part.ndim != 1 for part in saved.data):
                raise StepError("saved pages are arrays of bytes")
            self._quiet()
            sequence = self._sequences.create(saved.tokens)
            for layer, part in enumerate(saved.data):
                at = 0
                for plane in (0, 1):
                    for rows in self._runs(layer, plane, self._sequences[sequence].pages, saved.tokens):
                        rows[:] = part[at : at + rows.nbytes]
                        at += rows.nbytes
            return sequence

    def _runs(self, layer: int, plane: int, pages: Sequence[int], tokens: int) -> Iterator[Bytes]:
        """The rows of some pages in one plane of the slab (0: K, 1: V), page after page."""
        page_tokens = self.geometry.page_tokens
        for index, page in enumerate(pages):
            yield self._rows(layer, page, min(page_tokens, tokens - index * page_tokens))[plane]

    def _rows(self, layer: int, page: int, tokens: int) -> tuple[Bytes, Bytes]:
        """The first rows of a host page, K and V."""
        layout, slab = self.layout, self._executor.slab
        k, v = layout.k_host(layer, page), layout.v_host(layer, page)
        return (slab[k : k + tokens * self.geometry.k_row_bytes], slab[v : v + tokens * self.geometry.v_row_bytes])

    # --- state --------------------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        layout, held = self.layout, self._residency
        split = self._split
        return Stats(
            counters=asdict(self._executor.counters), cells=layout.cells,
            cells_held=sum(held.pages_held(layer) for layer in range(self.geometry.layers)),
            ring=split.ring if split else self._policy.ring, layer_pages=split.layer_pages if split else (),
            repartitions=self._repartitions, host_pages=layout.host_pages, host_pages_free=self._sequences.free,
            sequences=len(self._sequences), pool_bytes=layout.pool_bytes, host_bytes=self._host_bytes)

    def close(self) -> None:
        """Wait for the device and free everything. May be called twice, and after a failure."""
        self._step = None
        self._failed = self._failed or "the cache is closed"
        self._arrays.forget()
        self._executor.forget()
        self.device.close()

    def _nothing(self) -> Residency:
        return Residency.empty(self.geometry.layers, self.layout.host_pages, self.layout.cells)

    def _cells_to_split(self) -> int:
        """Every sequence of a step has a cell for its growing page in every layer; the rest is the policy's."""
        return max(1, self.layout.cells - self.geometry.layers * self.layout.sequences_max)

    def _quiet(self) -> None:
        self._executor.quiet()
        self._residency = self._residency.synchronized()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """When the device fails, everything does from then on."""
        if self._failed is not None:
            raise DeviceError(self._failed)
        try:
            yield
        except DeviceError as error:
            if _means_lost(error):
                self._failed = f"the device failed before: {error.message}"
            raise

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        with self._watched():
            if self._step is not None:
                raise StepError("a step is under way: end or abandon it first")
            yield

    @contextmanager
    def _in_step(self, call: str, layer: int) -> Iterator[_Step]:
        with self._watched():
            if self._step is None:
                raise StepError("no step has been begun")
            if (call, layer) != self._expected:
                wanted, at = self._expected
                if self._expected == HALF_DONE:
                    raise StepError("a call of this step failed half-way: it can only be abandoned")
                raise StepError(f"{call} of layer {layer} now? Next is {wanted} of layer {at}")
            yield self._step

    def _say_what_is_active(self) -> None:
        geometry, layout, policy = self.geometry, self.layout, self._policy
        log.info(
            "KV streaming is active on %s: pool %.1f MiB (%d cells of %d tokens, at first %d pages of each of %d "
            "layers resident and a ring of %d; workspaces %.1f MiB), pinned host memory %.1f MiB (%d pages, %d "
            "tokens), K %s, V %s, head size %d, %d query and %d KV heads, wide steps %s", self.device.name,
            layout.pool_bytes / MIB, layout.cells, geometry.page_tokens, policy.resident, geometry.layers, policy.ring,
            layout.workspace_bytes / MIB, self._host_bytes / MIB, layout.host_pages,
            layout.host_pages * geometry.page_tokens, geometry.k_type, geometry.v_type, geometry.head_size,
            geometry.q_heads, geometry.kv_heads,
            "on tensor cores (f16 products)" if self._executor.tensor else "exact (f32, as token by token)")


def _means_lost(error: BaseException) -> bool:
    """Whether nothing can be done with the device after this error but to close it."""
    return isinstance(error, DeviceError) and not isinstance(error, StepError | DeviceMemoryError)

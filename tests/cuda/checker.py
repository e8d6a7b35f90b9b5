"""An independent judge of plans: it carries them out on paper and knows nothing of how they were made.

Theory of operation. Every row of KV that is ever written gets a number of its own (its *version*), so that "the cell
holds row 5 of page 3 of layer 1 as it was written last" is one comparison. Operations are carried out in the order of
enqueueing, on versions instead of bytes: an upload copies versions from the host's rows to the cell's, a save copies
them back, an attend looks whether each row it may see has the version that was written last.

On the device they need not happen in that order. So each stream has a vector clock; a record stores it, a wait joins
the one that the latest record of that name stored, and nothing else orders two streams. Each row of each cell, and each
row of each page in host memory, remembers who touched it when. A read that is not ordered after the last write, or a
write that is not ordered after the last write and all reads since, is reported. When nothing is reported, every
schedule that the device may choose gives what the order of enqueueing gives, and that was checked.

What it also checks: every page of every sequence is attended exactly once per layer, in page order in the running form;
new rows are written once and saved once; events are recorded before they are waited for; copies stay within bounds; and
what the plan says is resident afterwards really is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from kvstream.cuda import ops
from kvstream.cuda.steady import Plan

STREAMS = ("compute", "copy", "save")
RECORDS = {ops.Ready: "batch", ops.Used: "use", ops.Saved: "save", ops.Written: "layer"}
WAITS = {ops.Await: ("batch", ops.Ready), ops.AfterUse: ("use", ops.Used), ops.AfterSaved: ("save", ops.Saved),
         ops.AwaitSaved: ("save", ops.Saved), ops.AfterWritten: ("layer", ops.Written)}
ON_COPY = (ops.Upload, ops.Ready, ops.AfterUse, ops.AfterSaved)
ON_SAVE = (ops.AfterWritten, ops.Save, ops.Saved)
NOBODY = -1


def is_event(op: ops.Op) -> bool:
    return type(op) in RECORDS or type(op) in WAITS


class Rows:
    """Rows somewhere in memory: their versions, and who touched them when."""

    def __init__(self, *shape: int) -> None:
        self.version = np.full(shape, NOBODY, np.int64)
        self.writer = np.full(shape, NOBODY, np.int64)
        self.written = np.zeros(shape, np.int64)
        self.read = np.zeros((*shape, len(STREAMS)), np.int64)


class Checker:
    """Give it every plan in the order of enqueueing, and what happens between them. ``faults`` says what was wrong."""

    def __init__(self, layers: int, host_pages: int, cells: int, page_tokens: int) -> None:
        self.layers, self.cells_count, self.page_tokens = layers, cells, page_tokens
        self.host, self.cells = Rows(layers, host_pages, page_tokens), Rows(cells, page_tokens)
        self.holder = np.full(cells, NOBODY, np.int64)
        self.truth = np.full((layers, host_pages, page_tokens), NOBODY, np.int64)
        self.live = np.zeros(host_pages, np.int64)  # rows of each page that mean something
        self.clock = {stream: [0, 0, 0] for stream in STREAMS}
        self.events: dict[tuple[type, int], list[int]] = {}
        self.versions = 0
        self.faults: list[str] = []
        self.where = ""

    # --- between steps ------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """The host waits for all streams."""
        everything = [max(clock[at] for clock in self.clock.values()) for at in range(3)]
        self.clock = {stream: list(everything) for stream in STREAMS}

    def host_writes(self, page: int, rows: int, source: int | None = None) -> None:
        """The host fills the first rows of a page in every layer, with new KV or from another page."""
        for layer in range(self.layers):
            for array, streams in ((self.host.read[layer, page], True), (self.host.written[layer, page], False)):
                newest = array.max(axis=0) if streams else array.max()
                seen = [min(clock[at] for clock in self.clock.values()) for at in range(3)]
                if (streams and (newest > seen).any()) or (not streams and newest > seen[2]):
                    self._fault(f"the host writes page {page} while a transfer may be using it")
            if source is None:
                values = np.arange(self.versions + 1, self.versions + 1 + rows)
                self.versions += rows
            else:
                values = self.truth[layer, source, :rows]
                if (self.host.version[layer, source, :rows] != values).any():
                    self._fault(f"page {source} of layer {layer} is copied before it was saved")
            self.truth[layer, page, :rows] = self.host.version[layer, page, :rows] = values
        self.live[page] = rows

    def truncated(self, page: int, rows: int) -> None:
        """Only the first rows of a page mean anything from now on; with 0 the page was given back."""
        self.live[page] = rows
        self.truth[:, page, rows:] = NOBODY
        if not rows:
            self.holder[np.isin(self.holder, self._key(np.arange(self.layers), page))] = NOBODY

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self, plan: Plan, batch: Sequence[tuple[int, int, int]], tables: Mapping[int, tuple[int, ...]]) -> None:
        self.batch = {sequence: (before, new) for sequence, before, new in batch}
        self.tables = tables
        self.row_of: list[tuple[int, int]] = [
            (sequence, before + at) for sequence, before, new in batch for at in range(new)]
        # Only what is copied ahead is waited for in a later step than it was recorded in.
        self.events = {key: clock for key, clock in self.events.items() if key[0] is ops.Ready}
        self._section("begin", plan.begin, None)
        if not len(plan.append) == len(plan.attend) == self.layers:
            self._fault("a layer is missing")
        for layer in range(self.layers):
            self.writes = np.zeros(len(self.row_of), np.int64)
            self.saves = np.zeros(len(self.row_of), np.int64)
            self.attended: dict[tuple[int, int], int] = {}
            self.waves: list[ops.Attend] = []
            self.folds = 0
            self._section(f"append[{layer}]", plan.append[layer], layer)
            if (self.writes != 1).any() or (self.saves != 1).any():
                self._fault(f"rows are written {self.writes} and saved {self.saves} times")
            self._section(f"attend[{layer}]", plan.attend[layer], layer)
            self._layer_done()
        self._section("end", plan.end, None)
        for sequence, before, new in batch:
            for index, page in enumerate(tables[sequence]):
                self.live[page] = max(self.live[page], min(self.page_tokens, before + new - index * self.page_tokens))
        self._residency(plan)

    def _layer_done(self) -> None:
        expected = {(sequence, index) for sequence, (before, new) in self.batch.items()
                    for index in range(-(-(before + new) // self.page_tokens))}
        wrong = {key: self.attended.get(key, 0) for key in expected | set(self.attended)
                 if key not in expected or self.attended.get(key) != 1}
        if wrong:
            self._fault(f"attended not once: {wrong}")
        kinds = {wave.fold for wave in self.waves}
        if (len(kinds) != 1 or [wave.wave for wave in self.waves] != list(range(len(self.waves)))
                or [wave.last for wave in self.waves] != [False] * (len(self.waves) - 1) + [True]):
            self._fault("the waves are not in order")
        if self.folds != (1 if kinds == {"table"} else 0):
            self._fault(f"{self.folds} folds for {kinds}")
        if kinds == {"running"}:
            order = [(sequence, index) for wave in self.waves for sequence, index, _ in wave.entries]
            for sequence in self.batch:
                indices = [index for mine, index in order if mine == sequence]
                if indices != sorted(indices):
                    self._fault(f"sequence {sequence} is not attended in page order: {indices}")
            for wave in self.waves:
                sequences = [sequence for sequence, _, _ in wave.entries]
                if len(list(groupby(sequences))) != len(set(sequences)):
                    self._fault("entries of a sequence are not together")

    def _residency(self, plan: Plan) -> None:
        self.where = "residency"
        seen: dict[int, tuple[int, int]] = {}
        for layer in range(self.layers):
            for page in range(self.truth.shape[1]):
                cell = plan.residency.cell(layer, page)
                if cell is None:
                    continue
                if cell in seen:
                    self._fault(f"cell {cell} holds {seen[cell]} and {(layer, page)}")
                seen[cell] = layer, page
                rows = int(self.live[page])
                if (self.cells.version[cell, :rows] != self.truth[layer, page, :rows]).any():
                    self._fault(f"cell {cell} does not hold page {page} of layer {layer}")

    # --- operations ---------------------------------------------------------------------------------------------------

    def _section(self, name: str, section: Iterable[ops.Op], layer: int | None) -> None:
        for at, op in enumerate(section):
            self.where = f"{name}[{at}] {op}"
            stream = "copy" if isinstance(op, ON_COPY) else "save" if isinstance(op, ON_SAVE) else "compute"
            clock = self.clock[stream]
            clock[STREAMS.index(stream)] += 1
            kind: Any = type(op)
            if kind in RECORDS:
                self.events[kind, getattr(op, RECORDS[kind])] = list(clock)
            elif kind in WAITS:
                field, record = WAITS[kind]
                stored = self.events.get((record, getattr(op, field)))
                if stored is None:
                    self._fault("waits for what was never recorded")
                else:
                    self.clock[stream] = [max(pair) for pair in zip(clock, stored, strict=True)]
            elif layer is None and not isinstance(op, ops.Upload):
                self._fault("has no place here")
            elif isinstance(op, ops.Upload):
                self._upload(op)
            elif getattr(op, "layer", None) != layer:
                self._fault("is of another layer")
            elif isinstance(op, ops.Write):
                self._write(op)
            elif isinstance(op, ops.Save):
                self._save(op)
            elif isinstance(op, ops.Attend):
                self._attend(op)
            else:
                self.folds += 1
                if not self.waves or not self.waves[-1].last:
                    self._fault("folds before the last wave")

    def _upload(self, op: ops.Upload) -> None:
        if not (1 <= op.count <= 96 and 0 <= op.cell <= self.cells_count - op.count
                and 0 <= op.page <= self.truth.shape[1] - op.count and 0 <= op.layer < self.layers):
            self._fault("is out of bounds")
            return
        into, source = slice(op.cell, op.cell + op.count), (op.layer, slice(op.page, op.page + op.count))
        self._touch("copy", self.host, source, write=False)
        self._touch("copy", self.cells, into, write=True)
        self.cells.version[into] = self.host.version[source]
        self.holder[into] = self._key(op.layer, op.page) + np.arange(op.count)

    def _write(self, op: ops.Write) -> None:
        for row, count, cell, first in op.rows:
            if not (count >= 1 and 0 <= row <= len(self.row_of) - count and 0 <= cell < self.cells_count):
                self._fault("is out of bounds")
                continue
            (sequence, token), (other, end) = self.row_of[row], self.row_of[row + count - 1]
            index = token // self.page_tokens
            if other != sequence or end // self.page_tokens != index or first != token % self.page_tokens:
                self._fault(f"rows {row} and on do not belong there")
                continue
            self.writes[row : row + count] += 1
            page, rows = self.tables[sequence][index], slice(first, first + count)
            # A cell that is given to another page is given as a whole: rows that come later will not ask again.
            mine = self.holder[cell] == self._key(op.layer, page)
            self._touch("compute", self.cells, (cell, rows if mine else slice(None)), write=True)
            self.holder[cell] = self._key(op.layer, page)
            fresh = np.arange(self.versions + 1, self.versions + 1 + count)
            self.versions += count
            self.cells.version[cell, rows] = self.truth[op.layer, page, rows] = fresh

    def _save(self, op: ops.Save) -> None:
        rows = slice(op.first_token, op.first_token + op.count)
        self._touch("save", self.cells, (op.cell, rows), write=False)
        self._touch("save", self.host, (op.layer, op.page, rows), write=True)
        if (self.cells.version[op.cell, rows] != self.truth[op.layer, op.page, rows]).any():
            self._fault("saves what is not in that cell")
        self.host.version[op.layer, op.page, rows] = self.cells.version[op.cell, rows]
        for at, (sequence, token) in enumerate(self.row_of):
            index, first = divmod(token, self.page_tokens)
            if self.tables[sequence][index] == op.page and op.first_token <= first < op.first_token + op.count:
                self.saves[at] += 1

    def _attend(self, op: ops.Attend) -> None:
        self.waves.append(op)
        if (self.writes != 1).any():
            self._fault("looks at rows that are not written")
        for sequence, index, cell in op.entries:
            before, new = self.batch.get(sequence, (0, 0))
            rows = min(self.page_tokens, before + new - index * self.page_tokens)
            if rows < 1 or index < 0 or not 0 <= cell < self.cells_count:
                self._fault(f"page {index} of sequence {sequence} is not in this step")
                continue
            self.attended[sequence, index] = self.attended.get((sequence, index), 0) + 1
            self._touch("compute", self.cells, (cell, slice(0, rows)), write=False)
            page = self.tables[sequence][index]
            if (self.cells.version[cell, :rows] != self.truth[op.layer, page, :rows]).any():
                self._fault(f"cell {cell} does not hold page {index} of sequence {sequence}, host page {page}")

    def _touch(self, stream: str, rows: Rows, where: Any, write: bool) -> None:
        me, clock = STREAMS.index(stream), self.clock[stream]
        known = np.array(clock)
        writer = rows.writer[where]
        late = (writer != NOBODY) & (writer != me) & (rows.written[where] > known[np.maximum(writer, 0)])
        if late.any():
            by = {STREAMS[at] for at in writer[late]}
            self._fault(f"{'overwrites' if write else 'reads'} what {', '.join(sorted(by))} may still be writing")
        if write:
            reads = rows.read[where] > known
            reads[..., me] = False
            if reads.any():
                by = {STREAMS[at] for at in np.nonzero(reads)[-1]}
                self._fault(f"overwrites what {', '.join(sorted(by))} may still be reading")
            rows.writer[where], rows.written[where] = me, clock[me]
            rows.read[where] = 0
        else:
            rows.read[(*where, ..., me) if isinstance(where, tuple) else (where, ..., me)] = clock[me]

    def _key(self, layer: Any, page: int) -> Any:
        return layer * self.truth.shape[1] + page

    def _fault(self, text: str) -> None:
        self.faults.append(f"{self.where}: {text}")

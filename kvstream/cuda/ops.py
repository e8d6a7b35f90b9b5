"""The frozen operations of a step's plan: what is put on which stream, in which order.

Theory of operation. Three streams run beside each other: *compute* (the caller's kernels and ours), *copy* (host to
device) and *save* (device to host). A plan is a sequence of these values. Whoever carries it out puts each one on its
stream (``STREAM`` says which) in exactly the order of the plan, and adds nothing: no fence, no synchronisation.

Events have names, small integers that are used again and again: ``Ready(3)`` records the event called 3 of the copy
stream, ``Await(3)`` makes compute wait for it. As in CUDA a wait means *the latest record of that name that was
enqueued before the wait*. So a record may reuse its event object, or take a fresh one each time; both are right. Each
kind of record has names of its own: ``Ready(3)``, ``Used(3)``, ``Saved(3)`` and ``Written(3)`` are four different
events. A ``Ready`` may be waited for in the next step or later, the others are in the same plan as their waits.

A token's place inside its page is called its row here: token ``t`` of a sequence is row ``t % page_tokens`` of page
number ``t // page_tokens`` of that sequence.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from attrs import frozen

Stream: TypeAlias = Literal["compute", "copy", "save"]
Folding: TypeAlias = Literal["table", "running"]
Entry: TypeAlias = tuple[int, int, int]
"""(sequence, index of the page in that sequence, cell that holds it)"""

PAGES_PER_COPY_MAX: Final = 96  # a wave: its pages are awaited together, so shorter copies would gain nothing


@frozen(slots=True)
class Upload:
    """copy: host pages ``page .. page+count-1`` of ``layer`` into cells ``cell .. cell+count-1``: one copy for K, one
    for V. ``batch`` names the ``Ready`` that follows the last upload of its group."""

    layer: int
    page: int
    cell: int
    count: int
    batch: int


@frozen(slots=True)
class Ready:
    """copy: record. All uploads so far are done when it is reached."""

    batch: int


@frozen(slots=True)
class AfterUse:
    """copy: wait for ``Used(use)``; the cells overwritten next were last read or written before it."""

    use: int


@frozen(slots=True)
class AfterSaved:
    """copy: wait for ``Saved(save)``; rows of the pages uploaded next, or what was in the cells, are in host memory."""

    save: int


@frozen(slots=True)
class Write:
    """compute: new rows into the tails. Each part is (first row of the step's k and v, how many, cell, first row in the
    page)."""

    layer: int
    rows: tuple[tuple[int, int, int, int], ...]


@frozen(slots=True)
class Written:
    """compute: record, after the ``Write`` of a layer."""

    layer: int


@frozen(slots=True)
class AfterWritten:
    """save: wait for ``Written(layer)``."""

    layer: int


@frozen(slots=True)
class Save:
    """save: rows ``first_token .. first_token+count-1`` of the page in ``cell`` to the same rows of host page ``page``
    of ``layer``: one copy for K, one for V."""

    layer: int
    cell: int
    first_token: int
    count: int
    page: int


@frozen(slots=True)
class Saved:
    """save: record."""

    save: int


@frozen(slots=True)
class AwaitSaved:
    """compute: wait for ``Saved(save)``; rows that are overwritten next were still on their way to the host (a verify
    step whose drafts were rejected writes the same rows again)."""

    save: int


@frozen(slots=True)
class Await:
    """compute: wait for ``Ready(batch)``."""

    batch: int


@frozen(slots=True)
class Attend:
    """compute: the queries of the step over the pages of ``entries``. Waves of a layer count from 0.

    ``table``: entries in any order, partials into the table, a ``Fold`` follows. ``running``: the entries of a sequence
    come in page order, within a wave and over the waves; the wave marked ``last`` writes the output of every row.
    Entries stay the same object from step to step as long as nothing changes, so their encoding can be kept.
    """

    layer: int
    wave: int
    entries: tuple[Entry, ...]
    fold: Folding
    last: bool


@frozen(slots=True)
class Used:
    """compute: record."""

    use: int


@frozen(slots=True)
class Fold:
    """compute: fold the table of a layer in page order into the output of every row."""

    layer: int


Op: TypeAlias = (
    Upload | Ready | AfterUse | AfterSaved | Write | Written | AfterWritten | Save | Saved | AwaitSaved | Await | Attend
    | Used | Fold
)

STREAM: Final = MappingProxyType({
    Write: "compute", Written: "compute", Await: "compute", AwaitSaved: "compute", Attend: "compute", Used: "compute",
    Fold: "compute",
    Upload: "copy", Ready: "copy", AfterUse: "copy", AfterSaved: "copy",
    AfterWritten: "save", Save: "save", Saved: "save",
})
"""The stream of each kind of operation."""

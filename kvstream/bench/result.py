"""Everything a run has to say, as one value: the terminal, the JSON file and the plot show the same."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from .figures import Group, group_of
from .plan import Load
from .record import Record, Run
from .slo import Slo
from .target import Target
from .verdict import Comparison, Saturation, about, compare, compared, remarks, saturation

EXIT_SERVED, EXIT_NOTHING, EXIT_SATURATED, EXIT_STOPPED = 0, 1, 4, 130


@frozen
class TargetResult:
    """``classes`` has an entry per class, or per turn of it; empty when there is only one. ``short``: the answers that
    ended early, when the latencies of the whole are those of the full ones."""

    target: Target
    records: Sequence[Record]
    whole: Group
    classes: dict[str, Group]
    short: Group | None
    rounds: tuple[Group, ...]
    saturation: Saturation | None


@frozen
class Result:
    load: Load
    slo: Slo
    run: Run
    targets: tuple[TargetResult, ...]
    comparisons: tuple[Comparison, ...]
    remarks: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """130 stopped; 1 a target served nothing; 4 an open loop offered more than was served; else 0."""
        if self.run.partial:
            return EXIT_STOPPED
        if any(not target.whole.served for target in self.targets):
            return EXIT_NOTHING
        if any(target.saturation is not None and target.saturation.saturated for target in self.targets):
            return EXIT_SATURATED
        return EXIT_SERVED


def result_of(load: Load, slo: Slo, targets: Sequence[Target], run: Run) -> Result:
    """Also of a run that was stopped."""
    found = tuple(_of_target(load, slo, target, run) for target in targets)
    groups = {one.target.label: one.whole for one in found}
    base = targets[0].label
    comparisons = tuple(compare(run, base, target.label, slo) for target in targets[1:])
    open_loop = {one.target.label: one.saturation for one in found if one.saturation is not None}
    records = {one.target.label: one.records for one in found}
    sentences = [about(label, group) for label, group in groups.items()]
    for comparison in comparisons:
        sentences += compared(comparison, groups, slo)
    return Result(load, slo, run, found, comparisons, tuple(remarks(load, groups, records, open_loop)),
                  tuple(sentences))


def _of_target(load: Load, slo: Slo, target: Target, run: Run) -> TargetResult:
    records = run.records(target.label)
    wall_s = run.wall_s(target.label)
    whole = group_of(records, wall_s, slo)
    by_class: dict[str, list[Record]] = {}
    for record in records:
        by_class.setdefault(class_of(load, record), []).append(record)
    classes = {name: group_of(by_class[name], wall_s, slo) for name in sorted(by_class)} if len(by_class) > 1 else {}
    short = None
    if whole.short and whole.latencies_of == "full":
        short = group_of([record for record in records if record.outcome == "short"], wall_s, slo)
    blocks = [block for block in run.blocks if block.target == target.label]
    rounds = tuple(group_of(block.records, block.wall_s, slo) for block in blocks)
    return TargetResult(target, records, whole, classes, short, rounds,
                        saturation(blocks) if load.is_open and records else None)


def class_of(load: Load, record: Record) -> str:
    """The name of the group that a request is shown in."""
    parts = [record.kind] if len(load.kinds) > 1 else []
    if load.turns > 1:
        parts.append(f"turn {record.turn + 1}")
    return ", ".join(parts) or record.kind

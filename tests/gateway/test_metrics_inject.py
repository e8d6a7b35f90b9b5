"""The metrics of hard inject: each event moves what it should and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstream.gateway.metrics import Metrics
from kvstream.gateway.metrics_inject import InjectMeter

EVENTS: list[tuple[Callable[[InjectMeter], None], dict[str, float]]] = [
    (lambda m: m.admitted("forked"), {'inject_admissions_total{how="forked"}': 1}),
    (lambda m: m.saved("fork", ok=True, bytes=7, seconds=0.5),
     {'inject_saves_total{outcome="ok",why="fork"}': 1, 'inject_save_bytes_total{why="fork"}': 7,
      'inject_save_seconds_total{why="fork"}': 0.5}),
    (lambda m: m.saved("evict", ok=False, bytes=7), {'inject_saves_total{outcome="failed",why="evict"}': 1}),
    (lambda m: m.restored(ok=True, bytes=9, seconds=0.25),
     {'inject_restores_total{outcome="ok"}': 1, "inject_restore_bytes_total": 9, "inject_restore_seconds_total": 0.25}),
    (lambda m: m.restored(ok=False, bytes=9), {'inject_restores_total{outcome="failed"}': 1}),
    (lambda m: m.cache_seen("restored", promised=100, found=40),
     {'inject_promised_tokens_total{by="restored"}': 100, 'inject_kept_tokens_total{by="restored"}': 40}),
    # more than promised is found where the promise was in whole pages; it keeps no more than the promise
    (lambda m: m.cache_seen("reused", promised=100, found=117),
     {'inject_promised_tokens_total{by="reused"}': 100, 'inject_kept_tokens_total{by="reused"}': 100}),
    (lambda m: m.restore_ineffective(), {"restore_ineffective_total": 1}),
    (lambda m: m.slots_lost("foreign"), {'inject_slots_lost_total{why="foreign"}': 1}),
    (lambda m: m.prompt_read(cached=3, computed=4),
     {'runtime_prompt_tokens_total{part="cached",source="reported"}': 3,
      'runtime_prompt_tokens_total{part="computed",source="reported"}': 4}),
    (lambda m: m.preempted("swap"), {'preemptions_total{how="swap"}': 1}),
    (lambda m: m.preempted_resumed(), {"preempted_resumed_total": 1}),
    (lambda m: m.store(files=3, bytes=4096), {"inject_store_files": 3, "inject_store_bytes": 4096}),
    (lambda m: m.evicted("quota"), {'inject_store_evictions_total{why="quota"}': 1}),
    (lambda m: m.mode("hard"), {'inject_mode{mode="hard"}': 1}),
]


@pytest.mark.parametrize(("event", "moved"), EVENTS, ids=lambda value: next(iter(value), "") if isinstance(
    value, dict) else "")
async def test_an_event_moves_its_own_figures_and_no_other(event: Callable[[InjectMeter], None],
                                                     moved: dict[str, float]) -> None:
    metrics = Metrics()
    event(metrics.inject.lane("here"))
    assert _nonzero(metrics) == moved


async def test_there_is_one_mode_at_a_time_and_lanes_are_apart() -> None:
    metrics = Metrics()
    here, there = metrics.inject.lane("here"), metrics.inject.lane("there")
    here.mode("hard")
    here.mode("soft")
    there.mode("hard-unpinned")
    value = metrics.registry.get_sample_value
    assert [value("kvstream_inject_mode", {"backend": "here", "mode": mode}) for mode in ("hard", "soft")] == [0, 1]
    assert value("kvstream_inject_mode", {"backend": "there", "mode": "hard-unpinned"}) == 1


def _nonzero(metrics: Metrics) -> dict[str, float]:
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.labels.get("backend") == "here" and sample.value and not sample.name.endswith("_created"):
                rest = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items())
                                if name != "backend")
                found[sample.name.removeprefix("kvstream_") + (f"{{{rest}}}" if rest else "")] = sample.value
    return found

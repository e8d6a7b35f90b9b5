"""The ``/status`` document: one JSON snapshot of queue, seats, pages, prefixes and backend. No prompt, key or body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .. import __version__
from ..core.snapshot import RunningView, Snapshot, TierPages, WaitingView
from ..core.types import RequestId
from .engine import Engine
from .router import Lane
from .status_inject import inject_json

RUNNING_SHOWN_MAX = 256
MODELS_SHOWN_MAX = 100


def status_json(lanes: Sequence[Lane], now: float) -> dict[str, Any]:
    """The snapshot at Trio time ``now``; ages in seconds, sizes in pages, tokens or bytes as named.

    ``lanes`` has a snapshot of each lane. What stands beside it is that of the first, which is often the only one.
    """
    each = [_lane(lane, now) for lane in lanes]
    return {"version": __version__} | each[0] | {"lanes": each}


def _lane(lane: Lane, now: float) -> dict[str, Any]:
    engine = lane.engine
    snapshot = engine.scheduler.snapshot(now)
    backend = engine.watcher.backend
    return {
        "name": lane.name,
        "models": lane.shown[:MODELS_SHOWN_MAX],
        "state": "draining" if engine.closing else engine.state,
        "backend": {
            "kind": engine.adapter.kind, "url": public_url(engine.adapter.base_url), "state": backend.state,
            "since_s": round(now - backend.since, 3), "detail": backend.detail,
            "instance": backend.capacity.instance if backend.capacity else None,
        },
        "capacity": _capacity(engine, snapshot),
        "seats": {"total": snapshot.seats.total, "used": snapshot.seats.used, "draining": snapshot.seats.draining},
        "pages": {pages.tier.value: _pages(pages) for pages in snapshot.pages},
        "queue": {
            "length": snapshot.waiting_total, "bytes": snapshot.waiting_bytes, "held": dict(snapshot.held),
            "narrowed_to": snapshot.limit,
            "requests": [
                _waiting(engine, w) for w in snapshot.waiting],
        },
        "running": [_running(engine, r) for r in snapshot.running[:RUNNING_SHOWN_MAX]],
        "prefixes": {"nodes": snapshot.prefix_nodes, "tokens": snapshot.prefix_tokens},
        "estimator": {"chars_per_token": round(engine.counter.estimator.chars_per_token, 3),
                      "units_per_token": round(engine.counter.estimator.units_per_token, 3),
                      "samples": engine.counter.estimator.samples},
        "breaker": engine.guard.status(now),
        "drift": engine.drifts.status(now),
        "options_alternate": engine.load_options.status(),
        "prefix_hygiene": engine.hygiene.status(),
        "counters": _counters(snapshot),
        "inject": {**inject_json(*engine.inject.status(now), snapshot, engine.name_of),
                   "totals": engine.inject.totals(engine.streams.values())},
    }


def ready_json(lanes: Sequence[Lane]) -> tuple[dict[str, Any], bool]:
    """(what ``/ready`` says, whether it is ready): as soon as one lane is."""
    states = {lane.name: "draining" if lane.engine.closing else lane.engine.state for lane in lanes}
    good = any(lane.engine.ready for lane in lanes)
    return {"status": "ready" if good else next(iter(states.values())), "lanes": states}, good


def public_url(url: str) -> str:
    """A URL without user and password, should somebody have put them there."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _capacity(engine: Engine, snapshot: Snapshot) -> dict[str, Any] | None:
    limits, report = snapshot.limits, engine.watcher.backend.capacity
    if limits is None:
        return None
    return {
        "mode": limits.mode.value, "seats": limits.seats, "pages": limits.pages, "page_tokens": limits.page_tokens,
        "request_tokens_max": limits.request_tokens_max, "shares_prefix": limits.shares_prefix,
        "source": limits.source, "notes": list(report.notes) if report else [],
    }


def _pages(pages: TierPages) -> dict[str, int]:
    return {"total": pages.total, "free": pages.free, "held": pages.held, "cached": pages.cached,
            "promised": pages.promised, "overdrawn": pages.overdrawn}


def _running(engine: Engine, view: RunningView) -> dict[str, Any]:
    stream = engine.streams.get(view.rid)
    return {
        "id": engine.name_of(view.rid), "state": "draining" if view.draining else "running",
        "phase": stream.phase if stream else None, "age_s": round(view.age_s, 3), "tokens": view.tokens,
        "produced": stream.tokens if stream else None, "pages": view.pages, "cached": view.tokens_cached,
        "priority": stream.priority.name.lower() if stream else None, "counted": _counted(engine, view.rid),
    }


def _waiting(engine: Engine, view: WaitingView) -> dict[str, Any]:
    """Whoever gave way says so, whatever keeps him from going on; ``produced`` is what his client has already."""
    row = {"id": engine.name_of(view.rid), "position": view.position, "age_s": round(view.age_s, 3),
           "tokens": view.tokens, "priority": view.priority.name.lower(), "counted": _counted(engine, view.rid),
           "why": view.why}
    stream = engine.streams.get(view.rid)
    return row | {"why": "preempted", "produced": stream.tokens} if stream is not None and stream.preempted else row


def _counted(engine: Engine, rid: RequestId) -> str | None:
    stream = engine.streams.get(rid)
    return stream.count_source.value if stream else None


def _counters(snapshot: Snapshot) -> dict[str, Any]:
    counters = snapshot.counters
    return {
        "admitted": counters.admitted, "ended": counters.ended, "truncated": counters.truncated,
        "backfilled": counters.backfilled, "held": dict(counters.held), "pages_evicted": counters.pages_evicted,
        "prefix_tokens_accounted": counters.prefix_tokens_accounted,
        "refused": {why.value: count for why, count in counters.refused.items()},
    }

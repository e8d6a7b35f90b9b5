"""Prometheus metrics, in a registry of our own. Only this and ``metrics_inject`` know prometheus-client.

Labels have few, fixed values: routes from our table, outcomes and phases from enums. Never a model name, a client or a
number that a client chose. Waits of refused requests count too, and histograms reach 300 s, because a queue does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ..core.breaker import Circuit
from ..core.types import HOLDS
from ..errors import KVStreamError
from .metrics_inject import InjectMeters
from .stream import outcome_of, outcome_of_refusal

if TYPE_CHECKING:
    from ..core.snapshot import Snapshot
    from .engine import Engine
    from .stream import Stream

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0)
BACKEND_STATES = ("starting", "up", "loading", "sleeping", "down", "failed", "wedged")


class Metrics:
    """Every metric of one process. All names start with ``kvstream_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lanes = _LaneGauges()
        self.registry.register(self._lanes)
        self._counters()
        self._histograms()
        self.inject = InjectMeters(self.registry)
        self.open_connections = Gauge("kvstream_open_connections", "Open client connections.", registry=self.registry)
        self.config_ok = Gauge("kvstream_config_ok", "0 while the configuration file is one that cannot be used.",
                               registry=self.registry)
        self.config_ok.set(1)

    def _counters(self) -> None:
        r = self.registry
        self.requests = Counter(
            "kvstream_requests", "Requests by route and how they ended.", ["route", "outcome"], registry=r)
        self.refused = Counter(
            "kvstream_refused", "Requests refused before they reached the backend.", ["reason"], registry=r)
        self.cancelled = Counter(
            "kvstream_cancelled", "Requests whose client left, by where they were.", ["phase"], registry=r)
        self.backend_errors = Counter(
            "kvstream_backend_errors", "Failures of the backend by kind.", ["kind"], registry=r)
        self.tokens_in = Counter("kvstream_prompt_tokens", "Prompt tokens of requests sent upstream.", registry=r)
        self.tokens_out = Counter("kvstream_answer_tokens", "Answer tokens received.", registry=r)
        self.prefix_accounted = Counter(
            "kvstream_prefix_tokens_accounted", "Prompt tokens that the page tables expected in the cache.", registry=r)
        self.prefix_verified = Counter(
            "kvstream_prefix_tokens_verified", "Prompt tokens that the backend reported as cached.", registry=r)
        self.counted = Counter("kvstream_prompts_counted", "Prompts by how they were counted.", ["source"], registry=r)
        self.failovers = Counter(
            "kvstream_failovers", "Requests that a refused connection moved to another backend.", registry=r)
        self.coalesced = Counter(
            "kvstream_coalesced", "Requests that shared the call of one that was running.", registry=r)
        self.cached = Counter(
            "kvstream_response_cache", "Deterministic requests by whether their answer was kept.", ["result"],
            registry=r)
        self.cache_bytes = Gauge("kvstream_response_cache_bytes", "Bytes of answers kept.", registry=r)
        self.slots_capped = Counter(
            "kvstream_slots_not_idle", "Cancelled requests whose slot was given up waiting for.", registry=r)
        self.wedged = Counter(
            "kvstream_wedged", "Times a backend was found to compute nothing while requests ran.", registry=r)
        self.busy_retries = Counter(
            "kvstream_busy_retries", "Times a busy backend was asked again for the same request.", registry=r)
        self.unfinished = Counter(
            "kvstream_unfinished_streams", "Streams that ended in [DONE] without a finish_reason.", registry=r)

    def _histograms(self) -> None:
        r = self.registry
        self.ttft = Histogram("kvstream_ttft_seconds", "Arrival to first text, reasoning or tool token.", ["route"],
                              buckets=SECONDS, registry=r)
        self.itl = Histogram("kvstream_inter_token_seconds", "Mean time between answer tokens of a request.",
                             buckets=TOKEN_SECONDS, registry=r)
        self.queue_wait = Histogram("kvstream_queue_wait_seconds", "Time in the queue, also of those refused or gone.",
                                    ["outcome"], buckets=SECONDS, registry=r)
        self.duration = Histogram("kvstream_request_seconds", "Arrival to last byte of served requests.", ["route"],
                                  buckets=SECONDS, registry=r)
        self.drain_seconds = Histogram("kvstream_slot_drain_seconds", "Cancel to idle slot.", buckets=SECONDS,
                                       registry=r)

    def watch(self, engine: Engine) -> None:
        """Add an engine to the gauges that are read off snapshots at scrape time; ``backend`` is its lane's name."""
        self._lanes.engines.append(engine)

    def unwatch(self, engine: Engine) -> None:
        """The lane is gone."""
        self._lanes.engines.remove(engine)

    # --- what the engine reports --------------------------------------------------------------------------------------

    def admitted(self, stream: Stream) -> None:
        assert stream.lease is not None and stream.granted is not None
        self.queue_wait.labels("admitted").observe(stream.granted - stream.arrived)
        self.prefix_accounted.inc(stream.lease.tokens_cached)
        self.counted.labels(stream.count_source.value).inc()

    def ended(self, stream: Stream, error: KVStreamError | None) -> None:
        """Book a request that is over. ``served`` only after its last event."""
        assert stream.ended is not None
        route, outcome = stream.request.route, outcome_of(stream, error)
        self.requests.labels(route, outcome).inc()
        if stream.lease is None:
            self.queue_wait.labels(outcome).observe(stream.ended - stream.arrived)
        if outcome == "cancelled":
            self.cancelled.labels(stream.phase).inc()
        elif outcome == "refused":
            self.refused.labels(error.code if error else "").inc()
        elif outcome == "upstream_error" and error is not None:
            self.backend_errors.labels(error.code).inc()
        elif outcome == "served":
            self.duration.labels(route).observe(stream.ended - stream.arrived)
            self.unfinished.inc(stream.unfinished)
        self._tokens(stream, route)

    def turned_away(self, route: str, error: KVStreamError) -> None:
        """Book a request that was refused before it had a place in the queue."""
        outcome = outcome_of_refusal(error)
        self.requests.labels(route, outcome).inc()
        if outcome == "refused":
            self.refused.labels(error.code).inc()

    def passed(self, route: str, outcome: str = "served") -> None:
        """Book a call that needed no seat and was answered, or whose client left."""
        self.requests.labels(route, outcome).inc()

    def shared(self, route: str, outcome: str) -> None:
        """Book a request that had no call of its own: one of several with one answer, or one from the cache."""
        self.requests.labels(route, outcome).inc()

    def sharing(self) -> dict[str, int]:
        """How many requests had no call of their own so far, for ``/status``."""
        def count(counter: Counter) -> int:
            return sum(int(s.value) for m in counter.collect() for s in m.samples if s.name.endswith("_total"))

        return {"coalesced": count(self.coalesced), "cached": count(self.cached.labels("hit"))}

    def _tokens(self, stream: Stream, route: str) -> None:
        usage = stream.usage
        if stream.answered:
            self.tokens_in.inc(usage.prompt if usage else stream.tokens_prompt)
        tokens = usage.completion if usage else stream.tokens
        self.tokens_out.inc(tokens)
        if usage and usage.cached:
            self.prefix_verified.inc(usage.cached)
        if stream.first_token is not None and stream.last_token is not None:
            self.ttft.labels(route).observe(stream.first_token - stream.arrived)
            if tokens > 1:
                self.itl.observe((stream.last_token - stream.first_token) / (tokens - 1))

    def drained(self, seconds: float, *, capped: bool) -> None:
        self.drain_seconds.observe(seconds)
        self.slots_capped.inc(capped)

    def exposition(self) -> bytes:
        return generate_latest(self.registry)


class _LaneGauges(Collector):
    """Gauges from the lanes' snapshots: taken when somebody scrapes, not on every step."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def collect(self) -> Iterable[Metric]:
        from trio import current_time

        now = current_time()
        lanes = [(engine.name, engine.scheduler.snapshot(now)) for engine in self.engines]
        yield from _gauges(lanes)
        state = _family("kvstream_backend_state", "1 for the state the backend is in.", "state")
        circuit = _family("kvstream_breaker_state", "1 for the state the breaker is in.", "state")
        swapped = _family("kvstream_swapped_out", "Preempted requests whose state is in a file now.")
        for engine in self.engines:
            swapped.add_metric([engine.name], sum(stream.swapped_out for stream in engine.streams.values()))
            for name in BACKEND_STATES:
                state.add_metric([engine.name, name], float(engine.backend_state == name))
            for each in Circuit:
                circuit.add_metric([engine.name, each.value], float(engine.guard.circuit is each))
        yield state
        yield circuit
        yield swapped


def _gauges(lanes: Sequence[tuple[str, Snapshot]]) -> Iterable[Metric]:
    pages = _family("kvstream_pages", "KV pages by tier and state.", "tier", "state")
    seats = _family("kvstream_seats", "Places in the running batch by state.", "state")
    length = _family("kvstream_queue_length", "Requests waiting.")
    size = _family("kvstream_queue_bytes", "Bytes of waiting request bodies.")
    kept = _family("kvstream_prefix_tokens", "Prompt tokens kept for reuse.")
    held = _family("kvstream_queue_held", "Requests that wait for more than a seat.", "why")
    ever = CounterMetricFamily(
        "kvstream_held", "Requests that had to wait for more than a seat.", labels=["backend", "why"])
    for name, snapshot in lanes:
        for tier in snapshot.pages:
            for state in ("total", "free", "held", "cached", "promised", "overdrawn"):
                pages.add_metric([name, tier.tier.value, state], getattr(tier, state))
        for state in ("total", "used", "draining"):
            seats.add_metric([name, state], getattr(snapshot.seats, state))
        length.add_metric([name], snapshot.waiting_total)
        size.add_metric([name], snapshot.waiting_bytes)
        kept.add_metric([name], snapshot.prefix_tokens)
        for why in HOLDS:
            held.add_metric([name, why], snapshot.held.get(why, 0))
            ever.add_metric([name, why], snapshot.counters.held.get(why, 0))
    return (pages, seats, length, size, kept, held, ever)


def _family(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, labels=["backend", *labels])

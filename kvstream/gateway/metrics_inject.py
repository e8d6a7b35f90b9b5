"""The metrics of hard inject: one method per event, called by whoever carries it out.

What can be compared with the server's own counters: ``kvstream_runtime_prompt_tokens_total`` counts every prompt that
the runtime read to its end for us, once per call: a client's request, the first pass of one that is read before it is
answered (both passes, since the server counts both), the continuation of a preempted one, and the self-check. ``part``
is ``computed`` or ``cached``, as llama.cpp's ``prompt_tokens_total`` and ``prompt_tokens_cached_total``. ``source`` is
``reported`` where the runtime told, which it does at the end of an answer; an answer that was broken off after its
first token is counted by what was expected of the cache (``expected``). A prompt that was broken off before its first
token is counted by neither side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import field, frozen
from prometheus_client import CollectorRegistry, Counter, Gauge

from ..core.types import SaveWhy
from .saving import Gone, OffKind

MODES: Final = ("hard", "hard-unpinned", "soft")
SOURCES: Final = ("reported", "expected")
HOWS: Final = ("reused", "restored", "forked", "cold", "unpinned")

How = Literal["reused", "restored", "forked", "cold", "unpinned"]
"""How a request was admitted: into the slot that holds its prefix, after a restore, the same from what another request
had just read for it, into a slot that has nothing of it, or without a slot of its own."""

By = Literal["restored", "reused"]
"""Where promised tokens were to come from: a file, or the slot itself."""


class InjectMeters:
    """The families, in one registry; :meth:`lane` fills in whose they are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvstream_{name}", text, ["backend", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"kvstream_{name}", text, ["backend", *labels], registry=registry)

        self.mode = gauge("inject_mode", "1 for how the runtime's slots are used.", "mode")
        self.admissions = counter("inject_admissions", "Admitted requests by where their prompt was found.", "how")
        self.saves = counter("inject_saves", "Slots saved to files.", "why", "outcome")
        self.save_bytes = counter("inject_save_bytes", "Bytes of KV saved.", "why")
        self.save_seconds = counter("inject_save_seconds", "Time that saves took.", "why")
        self.restores = counter("inject_restores", "Files restored into slots.", "outcome")
        self.restore_bytes = counter("inject_restore_bytes", "Bytes of KV restored.")
        self.restore_seconds = counter("inject_restore_seconds", "Time that restores took.")
        self.promised = counter("inject_promised_tokens", "Prompt tokens promised to be in the runtime's cache.", "by")
        self.kept = counter("inject_kept_tokens", "Of those promised, the ones that the runtime found there.", "by")
        self.ineffective = counter(
            "restore_ineffective", "Restores that said they worked, after which the prompt was computed all the same.")
        self.lost = counter("inject_slots_lost", "Times what the slots hold was forgotten.", "why")
        self.prompt_tokens = counter(
            "runtime_prompt_tokens", "Prompt tokens of calls that the runtime read to the end.", "part", "source")
        self.preemptions = counter("preemptions", "Running requests that gave way.", "how")
        self.resumed = counter("preempted_resumed", "Preempted requests that went on.")
        self.store_bytes = gauge("inject_store_bytes", "Bytes of saved KV on disk.")
        self.store_files = gauge("inject_store_files", "Files of saved KV.")
        self.saving_off = counter(
            "inject_saving_off", "Times saving was switched off for a while, by what was wrong with the disk.", "why")
        self.saving = gauge("inject_saving", "0 while nothing is saved for the disk's sake.")
        self.evictions = counter("inject_store_evictions", "Files of saved KV deleted, by why.", "why")

    def lane(self, name: str) -> InjectMeter:
        """Those of one backend."""
        return InjectMeter(self, name)


@frozen
class InjectMeter:
    """What happens on one lane. Bytes and seconds are as the runtime tells them; no method waits or fails."""

    _of: InjectMeters = field(repr=False)
    _name: str

    def mode(self, mode: str) -> None:
        """How the slots are used from now on."""
        for each in MODES:
            self._of.mode.labels(self._name, each).set(each == mode)

    def admitted(self, how: How) -> None:
        self._of.admissions.labels(self._name, how).inc()

    def saved(self, why: SaveWhy, *, ok: bool, bytes: int = 0, seconds: float = 0.0) -> None:
        """A save ended; one that was thrown away for holding too little is not ``ok``."""
        self._of.saves.labels(self._name, why, _outcome(ok)).inc()
        self._of.save_seconds.labels(self._name, why).inc(max(0.0, seconds))
        if ok:
            self._of.save_bytes.labels(self._name, why).inc(bytes)

    def restored(self, *, ok: bool, bytes: int = 0, seconds: float = 0.0) -> None:
        """A restore ended, as the runtime tells it; whether it had an effect is seen later."""
        self._of.restores.labels(self._name, _outcome(ok)).inc()
        self._of.restore_seconds.labels(self._name).inc(max(0.0, seconds))
        if ok:
            self._of.restore_bytes.labels(self._name).inc(bytes)

    def cache_seen(self, by: By, *, promised: int, found: int) -> None:
        """The runtime told how much of a promise it kept."""
        self._of.promised.labels(self._name, by).inc(promised)
        self._of.kept.labels(self._name, by).inc(min(promised, found))

    def restore_ineffective(self) -> None:
        self._of.ineffective.labels(self._name).inc()

    def slots_lost(self, why: Literal["restart", "sleep", "missed", "foreign"]) -> None:
        self._of.lost.labels(self._name, why).inc()

    def prompt_read(self, *, cached: int, computed: int, source: Literal["reported", "expected"] = "reported") -> None:
        """One call's prompt was read to its end; see the module. Once per call, not per request."""
        self._of.prompt_tokens.labels(self._name, "cached", source).inc(max(0, cached))
        self._of.prompt_tokens.labels(self._name, "computed", source).inc(max(0, computed))

    def preempted(self, how: Literal["swap", "recompute"]) -> None:
        self._of.preemptions.labels(self._name, how).inc()

    def preempted_resumed(self) -> None:
        self._of.resumed.labels(self._name).inc()

    def store(self, *, files: int, bytes: int) -> None:
        """What the store holds now."""
        self._of.store_files.labels(self._name).set(files)
        self._of.store_bytes.labels(self._name).set(bytes)

    def saving(self, off: OffKind | None) -> None:
        """Saving went off, and why; or (None) it works again."""
        self._of.saving.labels(self._name).set(off is None)
        if off is not None:
            self._of.saving_off.labels(self._name, off).inc()

    def totals(self) -> dict[str, Any]:
        """What was counted of this lane since the start, for people: the figures of the metrics."""
        of = self._of
        saves = self._by(of.saves, "why", outcome="ok")
        return {
            "admissions": dict.fromkeys(HOWS, 0) | self._by(of.admissions, "how"),
            "saves": saves, "saves_failed": sum(self._by(of.saves, "why", outcome="failed").values()),
            "saved_bytes": self._by(of.save_bytes, "why"),
            "restores": {"ok": 0, "failed": 0} | self._by(of.restores, "outcome"),
            "tokens_promised": sum(self._by(of.promised, "by").values()),
            "tokens_kept": sum(self._by(of.kept, "by").values()),
            "preemptions": {"swap": 0, "recompute": 0} | self._by(of.preemptions, "how"),
            "resumed": sum(self._by(of.resumed, "backend").values()),
        }

    def _by(self, counter: Counter, label: str, **only: str) -> dict[str, int]:
        wanted: Mapping[str, str] = {"backend": self._name, **only}
        return {sample.labels[label]: int(sample.value) for family in counter.collect() for sample in family.samples
                if sample.name.endswith("_total") and wanted.items() <= sample.labels.items()}

    def evicted(self, why: Gone) -> None:
        """A file was deleted: for room, because it was damaged, for a longer one, as another model's, or because it has
        done its work."""
        self._of.evictions.labels(self._name, why).inc()


def _outcome(ok: bool) -> str:
    return "ok" if ok else "failed"

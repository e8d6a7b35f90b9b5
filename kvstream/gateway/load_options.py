"""Requests for one model whose options take turns: each change makes the runtime load the whole model anew. Pure.

Two programs with different ``num_ctx`` before one Ollama are enough (case 35): every request then costs a load, and
nobody is told. So it is counted here, as requests come, whether or not they are kept apart afterwards.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from attrs import define

MODELS_MAX = 64  # the one longest not asked for is forgotten
CHANGES_MIN = 2  # there and back: one change alone is somebody's new setting
NONE = "none"


@define
class _Seen:
    """What one model was asked with. ``before`` is the other set of options, None as long as there was one only."""

    options: str
    before: str | None = None
    changes: int = 0
    requests: int = 1


class LoadOptionsWatch:
    """See the module."""

    def __init__(self) -> None:
        self._grouped = False  # requests with different options are kept apart
        self._models: OrderedDict[str, _Seen] = OrderedDict()

    def look(self, key: str, options: str) -> None:
        """A request came: ``Adapter.load_key`` and ``load_options`` of it."""
        model = key.removesuffix(f" {options}")
        self._grouped = self._grouped or (bool(options) and key != model)
        seen = self._models.get(model)
        if seen is None:
            self._models[model] = _Seen(options)
            if len(self._models) > MODELS_MAX:
                self._models.popitem(last=False)
            return
        self._models.move_to_end(model)
        seen.requests += 1
        if options != seen.options:
            seen.before, seen.options = seen.options, options
            seen.changes += 1

    def status(self) -> list[dict[str, Any]]:
        """For ``/status``: the models whose options alternate, the worst first."""
        worst = sorted(self._models.items(), key=lambda item: -item[1].changes)
        return [self._row(model, seen) for model, seen in worst if seen.changes >= CHANGES_MIN]

    def _row(self, model: str, seen: _Seen) -> dict[str, Any]:
        pair = sorted((seen.options or NONE, seen.before or NONE))
        cure = ("they are served group after group" if self._grouped else
                "each change reloads the model; let the clients agree, or set backend.group_by_load_key = true")
        return {
            "model": model, "options": pair, "changes": seen.changes, "requests": seen.requests,
            "warning": f"options alternate for {model}: {pair[0]} and {pair[1]}, {seen.changes} times in "
                       f"{seen.requests} requests; {cure}"}

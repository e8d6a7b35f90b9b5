"""Prefix hygiene of one lane: which request the page keys see, which one the runtime gets, and what was found out.

By default nothing that travels is changed: the page keys are made from a copy in which the values of
``prefix.volatile`` are constants, and the runtime gets the client's own bytes. Only ``prefix.normalize`` rewrites what
is sent. See ``core.volatile`` for how, ``core.hygiene`` for the diagnosis.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
from attrs import frozen

from ..adapters.base import ProxyRequest
from ..core.hygiene import Finding, Prompt, RecentPrompts
from ..core.volatile import replaced

SHOWN_MAX = 5


@frozen
class HygieneSettings:
    """See the section ``[prefix]`` of the configuration."""

    volatile: tuple[str, ...] = ("anthropic_cch",)
    normalize: tuple[str, ...] = ()
    diagnose: bool = True


class PrefixHygiene:
    """See the module."""

    def __init__(self, settings: HygieneSettings) -> None:
        self._settings = settings
        self._recent = RecentPrompts()

    def canonical(self, request: ProxyRequest) -> ProxyRequest:
        """The request as the page keys see it."""
        return _with_constants(request, self._settings.volatile)

    def normalized(self, request: ProxyRequest) -> ProxyRequest:
        """The request as the runtime gets it; the same object unless ``prefix.normalize`` changed something."""
        return _with_constants(request, self._settings.normalize)

    def look(self, request: ProxyRequest, client: str, tokens: int) -> None:
        """Compare a prompt with recent ones of the same client and model."""
        if self._settings.diagnose:
            self._recent.look((client, request.model), Prompt.read(request.view), tokens)

    def status(self) -> dict[str, Any]:
        """For ``/status``: the few worst findings. No client is named, of a prompt only the changed run is shown."""
        findings = self._recent.findings()
        return {
            "volatile": list(self._settings.volatile), "normalize": list(self._settings.normalize),
            "diagnose": self._settings.diagnose, "findings_total": len(findings),
            "findings": [_finding(found) for found in findings[:SHOWN_MAX]],
        }


def _with_constants(request: ProxyRequest, names: tuple[str, ...]) -> ProxyRequest:
    body = replaced(request.body, names) if names else None
    if body is None:
        return request
    return attrs.evolve(request, body=body, view=json.loads(body))


def _finding(found: Finding) -> dict[str, Any]:
    return {
        "text": found.sentence, "kind": found.kind, "where": found.where, "byte": found.byte,
        "excerpt": found.excerpt, "pattern": found.pattern or None, "model": found.model,
        "requests": found.requests, "tokens_lost": found.tokens_lost, "tokens_lost_total": found.tokens_lost_total,
        "remedy": remedy(found.kind, found.pattern),
    }


def remedy(kind: str, pattern: str) -> str:
    """What a person can do about a finding."""
    if kind != "diverges":
        return "send the tools in one order, with their keys in one order"
    if pattern:
        return f'set prefix.normalize = ["{pattern}"], or move the value to the end of the prompt'
    return "move the value that changes to the end of the prompt"

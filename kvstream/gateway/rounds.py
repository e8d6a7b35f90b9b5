"""Asking a runtime several things, of which the later ones depend on the answers to the earlier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..adapters.base import HttpCall, HttpReply
from ..errors import KVStreamError
from .ports import Upstream

Replies = Mapping[str, HttpReply | None]


async def ask_rounds(upstream: Upstream, calls: Callable[[Replies], Sequence[tuple[str, HttpCall]]], *,
                     timeout_s: float) -> dict[str, HttpReply | None]:
    """Ask what ``calls`` names, until it names nothing that was not asked. None stands for no answer within
    ``timeout_s`` seconds. *Errors*: none. *Cancellation*: safe."""
    replies: dict[str, HttpReply | None] = {}
    while asked := [(name, call) for name, call in calls(replies) if name not in replies]:
        for name, call in asked:
            try:
                replies[name] = await upstream.request(call, timeout_s=timeout_s)
            except KVStreamError:
                replies[name] = None
    return replies

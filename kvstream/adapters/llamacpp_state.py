"""What llama.cpp's status answers tell: ``/props``, ``/slots`` and the size of a saved empty slot."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from .base import HttpReply
from .chunks import as_count

_PROBE_BYTES_FIXED = 28


@frozen
class Props:
    """What ``/props`` tells: slots, tokens of context per slot, build, and whether the model sleeps."""

    slots: int
    context: int
    build: str
    sleeping: bool
    marker: str = ""  # drawn anew by every process: it tells a restart, with or without --metrics

    @classmethod
    def read(cls, reply: HttpReply | None) -> Props | None:
        data = reply.json() if reply is not None and reply.status == 200 else None
        if not isinstance(data, dict):
            return None
        settings = data.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
        slots = data.get("total_slots")
        if not (isinstance(slots, int) and slots > 0 and isinstance(context, int) and context > 0):
            return None
        marker = str(data.get("media_marker") or "")
        return cls(slots, context, str(data.get("build_info", "")), data.get("is_sleeping") is True, marker)

    @property
    def process(self) -> str:
        """What cannot change while a server process lives."""
        return f"{self.build} {self.slots}x{self.context} {self.marker}"

    def instance(self, metrics: HttpReply | None) -> str:
        """Changes when the server was restarted; without ``--metrics`` only when its build changed."""
        started = metrics.headers.get("process-start-time-unix", "") if metrics is not None else ""
        return f"{self.build}@{started}"


def slots_of(reply: HttpReply | None) -> list[dict[str, Any]] | None:
    """The rows of ``/slots``; None when the server does not show them (501 with ``--no-slots``)."""
    data = reply.json() if reply is not None and reply.status == 200 else None
    if not isinstance(data, list):
        return None
    return [row for row in data if isinstance(row, dict) and isinstance(row.get("id"), int)]


def work_of(reply: HttpReply | None) -> tuple[tuple[int, ...], ...] | None:
    """What the working slots have done: (slot, task, prompt tokens read, tokens made) of each."""
    slots = slots_of(reply)
    if slots is None:
        return None
    found = []
    for row in slots:
        if row.get("is_processing") is True:
            token = row.get("next_token")
            token = token[0] if isinstance(token, list) and token else token
            made = as_count(token.get("n_decoded")) if isinstance(token, dict) else 0
            read = as_count(row.get("n_prompt_tokens_processed"))
            if read or made:  # a slot that was given a task has computed nothing yet
                found.append((row["id"], as_count(row.get("id_task")), read, made))
    return tuple(found)


def empty_slot(reply: HttpReply | None) -> int | None:
    """An idle slot that holds nothing, the surest first: one that says 0 tokens, then one never used.

    A slot that a file was restored into looks never used until its first task; saving it is harmless, and the answer
    then names its tokens and is not taken.
    """
    idle = [row for row in slots_of(reply) or () if row.get("is_processing") is False]
    for row in idle:
        if row.get("n_prompt_tokens") == 0:
            return int(row["id"])
    for row in reversed(idle):
        if "n_prompt_tokens" not in row:
            return int(row["id"])
    return None


def idle_slot(reply: HttpReply | None) -> int | None:
    """The idle slot that holds the least."""
    idle = [row for row in slots_of(reply) or () if row.get("is_processing") is False]
    least = min(idle, key=lambda row: as_count(row.get("n_prompt_tokens")), default=None)
    return None if least is None else int(least["id"])


def erased(reply: HttpReply | None) -> bool:
    """Whether a slot was emptied as asked."""
    return reply is not None and reply.status == 200


def streams_of(probe: HttpReply | None, slots: int | None = None) -> int | None:
    """The number of KV streams that a saved empty slot shows, or None. With ``slots`` it must be 1 or that.

    28 bytes, and for each cache of KV 4 and 4 a stream. A model with a sliding window has two caches (measured). One
    cache is tried first: with 3 slots, 44 bytes are 3 streams in one, or 1 in each of two, which is rarer by far.
    """
    data = probe.json() if probe is not None and probe.status == 200 else None
    if not isinstance(data, dict) or data.get("n_saved") != 0:
        return None
    written = data.get("n_written")
    if not isinstance(written, int):
        return None
    for caches in (1, 2):
        streams, odd = divmod(written - _PROBE_BYTES_FIXED - 4 * caches, 4 * caches)
        if streams > 0 and not odd and (slots is None or streams in (1, slots)):
            return streams
    return None

"""What the fake runtime saw and did, with times. Tests assert on this, not on sleeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio
from attrs import define, field, frozen


@frozen
class FakeRequest:
    """One request as it came in. ``headers`` has lower-case names (the last duplicate wins), ``header_list`` all."""

    method: str
    target: str
    header_list: tuple[tuple[str, str], ...] = ()
    body: bytes = field(default=b"", repr=lambda b: f"{len(b)} bytes")
    json: Any = field(default=None, repr=False)

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def headers(self) -> Mapping[str, str]:
        return {name.lower(): value for name, value in self.header_list}


@define(eq=False)
class Entry:
    """The life of one request. Times are ``trio.current_time()``; None means "has not happened".

    ``closed_at``: the client closed before the answer ended (``closed_by_reset`` when it was an RST).
    ``ended_at``: the answer ended, properly or by our own fault injection; ``outcome`` says how.
    ``released_at``: the slot was free again. ``jobs`` are its sequences in the machine room. ``corrupted``: what it
    said became wrong, since its KV was exchanged while it ran or came from another model. ``pinned_busy``: it named a
    slot at work, which nobody must.
    """

    index: int
    request: FakeRequest
    connection: int
    received_at: float
    inference: bool = False
    headers_at: float | None = None
    first_byte_at: float | None = None
    closed_at: float | None = None
    closed_by_reset: bool = False
    ended_at: float | None = None
    released_at: float | None = None
    outcome: str = ""
    status: int = 0
    slot: int | None = None
    task: int | None = None
    bytes_out: int = 0
    tokens_out: int = 0
    jobs: Sequence[Any] = field(default=(), repr=False)
    writes: list[tuple[float, int]] = field(factory=list, repr=False)

    @property
    def body_hash(self) -> str:
        return hashlib.sha256(self.request.body).hexdigest()

    @property
    def corrupted(self) -> bool:
        return any(job.corrupted for job in self.jobs)

    @property
    def pinned_busy(self) -> bool:
        return any(job.pinned_busy for job in self.jobs)

    @property
    def open(self) -> bool:
        return self.closed_at is None and self.ended_at is None

    @property
    def prompt(self) -> str:
        """The last message's text or the prompt: what a test recognises the request by."""
        view = self.request.json
        if not isinstance(view, Mapping):
            return ""
        messages = view.get("messages")
        if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
            content = messages[-1].get("content")
            return content if isinstance(content, str) else ""
        prompt = view.get("prompt")
        return prompt if isinstance(prompt, str) else ""


@define(eq=False)
class Journal:
    """Every connection and every request, in order of arrival.

    ``connects`` holds ``(connection, time)``, ``disconnects`` ``(connection, time, how)``.
    """

    entries: list[Entry] = field(factory=list)
    connects: list[tuple[int, float]] = field(factory=list)
    disconnects: list[tuple[int, float, str]] = field(factory=list)
    _changed: trio.Event = field(factory=trio.Event)

    @property
    def calls(self) -> list[Entry]:
        """Only the inference requests."""
        return [entry for entry in self.entries if entry.inference]

    @property
    def open_now(self) -> list[Entry]:
        """Inference requests whose client is still there and whose answer has not ended."""
        return [entry for entry in self.calls if entry.open]

    @property
    def corrupted(self) -> list[Entry]:
        """Inference requests whose answer went wrong unseen."""
        return [entry for entry in self.calls if entry.corrupted]

    @property
    def prompts(self) -> list[str]:
        """The prompts of the inference requests in order of arrival."""
        return [entry.prompt for entry in self.calls]

    def closed_at(self, i: int) -> float | None:
        """When the client of the i-th inference request closed it early."""
        return self.calls[i].closed_at

    def paths(self, path: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.request.path == path]

    def connected(self) -> int:
        number = len(self.connects)
        self.connects.append((number, trio.current_time()))
        self.touch()
        return number

    def disconnected(self, connection: int, how: str) -> None:
        self.disconnects.append((connection, trio.current_time(), how))
        self.touch()

    def record(self, request: FakeRequest, connection: int, inference: bool) -> Entry:
        entry = Entry(len(self.entries), request, connection, trio.current_time(), inference)
        self.entries.append(entry)
        self.touch()
        return entry

    def touch(self) -> None:
        """Something changed: wake those in :meth:`until`."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, true: Callable[[Journal], object]) -> None:
        """Wait until ``true(journal)``. Wrap in ``trio.fail_after`` to bound it."""
        while not true(self):
            await self._changed.wait()

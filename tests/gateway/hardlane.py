"""A lane with hard inject for tests: settings, and what must be true on the wire whatever happened."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import trio

from kvstream.adapters.base import CapacityQuery
from kvstream.gateway.engine import EngineSettings
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.ports import Upstream
from tests.fakes.journal import Entry
from tests.fakes.runtime import FakeRuntime
from tests.gateway.lane import Lane, open_lane, settings

PAGE = 16
HERE = "http://127.0.0.1:9"  # on this machine, so its model's file can be looked at; nobody listens, the fake answers


def hard(tmp_path: Path, *, inject: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None,
         **changes: Any) -> EngineSettings:
    """Settings of a lane that uses slots, with its files below ``tmp_path``; what is worth a file is short."""
    (tmp_path / "slots").mkdir(exist_ok=True)
    told = InjectSettings(dir=str(tmp_path / "slots"), state_dir=str(tmp_path / "state"), **(inject or {}))
    return settings(
        inject=told, query=CapacityQuery(page_tokens=PAGE, host_pages=100_000),
        scheduler={"save_tokens_min": 64, "leader_tokens": 64, "read_first_s": 0.1, **(scheduler or {})}, **changes)


def knobs(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Those of the runtime: real slot files, small ones, and a model whose file is here, so that its files outlive
    it."""
    (tmp_path / "slots").mkdir(exist_ok=True)
    model = tmp_path / "model.gguf"
    if not model.exists():
        model.write_bytes(b"GGUF")
    return {"model_path": str(model), "slots_dir": str(tmp_path / "slots"), "cell_bytes": 256, **more}


@contextmanager
def no_threads() -> Iterator[None]:
    """Work on files is done at once instead of in a thread: a virtual clock does not wait for threads, it jumps."""
    async def at_once(work: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return work(*args)

    with mock.patch("trio.to_thread.run_sync", at_once), mock.patch("trio._path.run_sync", at_once):
        yield


@asynccontextmanager
async def open_hard(tmp_path: Path, told: EngineSettings | None = None, *,
                    wrap: Callable[[Upstream], Upstream] | None = None, **more: Any) -> AsyncIterator[Lane]:
    """A running lane that uses slots; ``more`` are knobs of the runtime."""
    with no_threads():
        async with open_lane(told or hard(tmp_path), wrap=wrap, base_url=HERE, **knobs(tmp_path, **more)) as lane:
            yield lane


def slot_of(entry: Entry) -> int | None:
    """The slot that a call names, in its body or, as a slot action, in its path."""
    found = re.match(r"/slots/(-?\d+)$", entry.request.path)
    if found is not None:
        return int(found[1])
    named = entry.request.json.get("id_slot") if isinstance(entry.request.json, dict) else None
    return named if isinstance(named, int) else None


def actions(runtime: FakeRuntime, action: str) -> list[Entry]:
    """The slot actions of one kind."""
    return [e for e in runtime.journal.entries if e.request.path.startswith("/slots/")
            and e.request.query == f"action={action}"]


def pinned(runtime: FakeRuntime) -> list[Entry]:
    return [entry for entry in runtime.journal.calls if slot_of(entry) is not None]


def check_wire(runtime: FakeRuntime) -> None:
    """T0, and what goes with it: no call names a slot that is at work, none waits in the runtime, all ids are real."""
    assert runtime.busy_pins == 0, "a request was pinned to a slot at work"
    assert runtime.corruptions == 0 and not runtime.journal.corrupted
    assert runtime.engine.actions_deferred == 0, "a slot action met a slot at work"
    assert not any(entry.pinned_busy for entry in runtime.journal.calls)
    named = {slot for entry in runtime.journal.entries if (slot := slot_of(entry)) is not None}
    assert named <= set(range(len(runtime.engine.slots))), f"slots named: {sorted(named)}"

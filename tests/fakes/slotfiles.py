"""``POST /slots/{id}?action=save|restore|erase`` of the fake: KV files kept in a dict of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import trio

from . import wire as W
from .journal import FakeRequest

if TYPE_CHECKING:
    from .engine import Slot
    from .runtime import FakeRuntime

CELL_BYTES = 23056  # SmolLM2-135M: 23 040 bytes of KV and 16 of bookkeeping per token


async def slot_action(runtime: FakeRuntime, r: FakeRequest, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and JSON value of the answer. Waits, as llama.cpp does, while the slot is processing."""
    config, engine = runtime.config, runtime.engine
    if not config.slot_save or config.restore_mode == "501":
        text = "This server does not support slots action. Start it with `--slot-save-path`"
        return 501, W.error(501, text, "not_supported_error")
    try:
        slot = engine.slots[int(r.path.removeprefix("/slots/")) % len(engine.slots)]
    except ValueError:
        return 400, W.error(400, "Invalid slot ID", "invalid_request_error")
    action = parse_qs(r.query).get("action", [""])[0]
    name = body.get("filename")
    if action in ("save", "restore") and not (isinstance(name, str) and name and "/" not in name):
        return 400, W.error(400, "Invalid filename", "invalid_request_error")
    while slot.busy:
        await (slot.job.released.wait() if slot.job is not None else trio.sleep(0.01))
    if action == "save":
        return await _save(runtime, slot, str(name))
    if action == "restore":
        return await _restore(runtime, slot, str(name))
    if action == "erase":
        erased, slot.kv = len(slot.kv), []
        return 200, {"id_slot": slot.id, "n_erased": erased}
    return 400, W.error(400, "Invalid action", "invalid_request_error")


async def _locked_sleep(runtime: FakeRuntime, slot: Slot, seconds: float) -> None:
    slot.locked = True
    try:
        await trio.sleep(seconds)
    finally:
        slot.locked = False
        runtime.engine.dispatch()


async def _save(runtime: FakeRuntime, slot: Slot, name: str) -> tuple[int, Any]:
    await _locked_sleep(runtime, slot, runtime.config.save_s)
    runtime.files[name] = list(slot.kv)
    streams = 1 if runtime.config.unified else runtime.config.slots
    size = 32 + 4 * streams  # an empty slot; with tokens also 24 bytes per layer and 16 more
    if slot.kv:
        size += 16 + 24 * 30 + len(slot.kv) * CELL_BYTES
    timings = {"save_ms": runtime.config.save_s * 1000}
    return 200, {"id_slot": slot.id, "filename": name, "n_saved": len(slot.kv), "n_written": size, "timings": timings}


async def _restore(runtime: FakeRuntime, slot: Slot, name: str) -> tuple[int, Any]:
    await _locked_sleep(runtime, slot, runtime.config.restore_s)
    kv = runtime.files.get(name)
    if kv is None or len(kv) > slot.n_ctx or runtime.config.restore_mode in ("400_version", "400_size"):
        slot.kv = []  # a failed restore wipes the slot
        text = "Unable to restore slot: No available space in KV cache or invalid slot save file"
        return 400, W.error(400, text, "invalid_request_error")
    slot.kv = [] if runtime.config.restore_mode == "noop_200" else list(kv)
    timings = {"restore_ms": runtime.config.restore_s * 1000}
    size = 48 + len(kv) * CELL_BYTES
    return 200, {"id_slot": slot.id, "filename": name, "n_restored": len(kv), "n_read": size, "timings": timings}

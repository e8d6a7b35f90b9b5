"""``POST /slots/{id}?action=save|restore|erase`` of the fake.

A save, restore or erase of a busy slot is deferred and happens even if its client has left. A file is written straight
to its name: whoever looks at it half way sees half of it. A failed restore leaves the slot empty.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from zlib import crc32

import trio
from attrs import define, field

from . import wire as W
from .engine import Action, Slot
from .journal import FakeRequest
from .script import RuntimeConfig

if TYPE_CHECKING:
    from .runtime import FakeRuntime

LAYERS = 30  # of SmolLM2-135M
_BAD_NAME = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]|\.\.|^ |[ .]$')

NO_RESTORE = "Unable to restore slot: No available space in KV cache or invalid slot save file"
Reply = tuple[int, Any]


async def slot_action(runtime: FakeRuntime, r: FakeRequest, body: dict[str, Any]) -> Reply:
    """The status and JSON value of the answer. Waits, as llama.cpp does, while the slot is processing."""
    config = runtime.config
    if not config.slot_save or config.restore_mode == "501":
        text = "This server does not support slots action. Start it with `--slot-save-path`"
        return 501, W.error(501, text, "not_supported_error")
    number = re.match(r"-?\d+", r.path.removeprefix("/slots/"))
    if number is None:
        return 400, W.error(400, "Invalid slot ID", "invalid_request_error")
    action = parse_qs(r.query).get("action", [""])[0]
    if action not in ("save", "restore", "erase"):
        return 400, W.error(400, "Invalid action", "invalid_request_error")
    name = body.get("filename")
    if action != "erase" and not (isinstance(name, str) and valid_name(name)):
        return 400, W.error(400, "Invalid filename", "invalid_request_error")
    work = _Work(runtime, action, int(number[0]), str(name))
    runtime.engine.act(Action(work.id_slot, work.begin, work.drop))
    await work.done.wait()
    return work.reply


def valid_name(name: str) -> bool:
    return 0 < len(name.encode()) <= 255 and not _BAD_NAME.search(name)


@define(eq=False)
class _Work:
    """One action, in the runtime's own nursery: its client may leave."""

    runtime: FakeRuntime
    action: str
    id_slot: int
    name: str
    reply: Reply = (503, W.error(503, "Loading model", "unavailable_error"))
    done: trio.Event = field(factory=trio.Event)

    def begin(self, slot: Slot) -> None:
        assert self.runtime._nursery is not None
        self.runtime._nursery.start_soon(self._run, slot)

    def drop(self) -> None:
        self.done.set()

    async def _run(self, slot: Slot) -> None:
        try:
            if self.action == "save":
                self.reply = await self._save(slot)
            elif self.action == "restore":
                self.reply = await self._restore(slot)
            else:
                erased = len(slot.kv)
                slot.hold([])
                self.reply = 200, {"id_slot": self.id_slot, "n_erased": erased}
        finally:
            self.runtime.engine.acted()
            self.done.set()

    async def _save(self, slot: Slot) -> Reply:
        c, files = self.runtime.config, Files(self.runtime)
        if c.mmproj == "all" or (c.mmproj and slot.media):
            return 501, W.error(501, "This feature is not supported by multimodal", "not_supported_error")
        written = await files.write(self.name, list(slot.kv))
        if written is None:
            return 500, W.error(500, "Unable to save slot", "server_error")
        timings = {"save_ms": c.save_s * 1000}
        return 200, {"id_slot": self.id_slot, "filename": self.name, "n_saved": len(slot.kv), "n_written": written,
                     "timings": timings}

    async def _restore(self, slot: Slot) -> Reply:
        c, engine = self.runtime.config, self.runtime.engine
        await trio.sleep(c.restore_s)
        found = None if c.restore_mode in ("400_version", "400_size") else Files(self.runtime).read(self.name)
        slot.hold([])  # also when it fails
        if found is None or len(found[0]) > slot.n_ctx or (c.unified and engine.cells + len(found[0]) > c.n_ctx):
            return 400, W.error(400, NO_RESTORE, "invalid_request_error")
        kv, wrong = found
        slot.hold(kv, hollow=c.restore_mode == "noop_200" and len(kv) > c.window, wrong=wrong)
        return 200, {"id_slot": self.id_slot, "filename": self.name, "n_restored": len(kv),
                     "n_read": file_bytes(c, len(kv)), "timings": {"restore_ms": c.restore_s * 1000}}


# --- the files ---


def file_bytes(config: RuntimeConfig, tokens: int) -> int:
    """The size of a file."""
    streams = 1 if config.unified else config.slots
    return 32 + 4 * streams + (16 + 24 * LAYERS + tokens * config.cell_bytes if tokens else 0)


def file_head(config: RuntimeConfig, kv: list[int]) -> bytes:
    """The beginning of a file: magic, version, the words of what follows up to the KV, the ids, no media, the number of
    KV streams. Then, in place of what the real server writes, the model's fingerprint, so that a restore of another
    model's file can go wrong unseen, as it does."""
    payload = [0xFFFFFFFF, 1, len(kv), *kv, 0]
    streams = 1 if config.unified else config.slots
    words = [4, len(payload), *payload, streams]
    return b"qsgg" + struct.pack(f"<{len(words)}I", *words) + (_fingerprint(config) if kv else b"")


def _fingerprint(config: RuntimeConfig) -> bytes:
    return struct.pack("<I", crc32(config.model.encode()))


@define
class Files:
    """The slot files of a runtime, real ones or not."""

    runtime: FakeRuntime

    @property
    def config(self) -> RuntimeConfig:
        return self.runtime.config

    async def write(self, name: str, kv: list[int]) -> int | None:
        """Bytes written; None: there was no room for all of them. Takes ``save_s``."""
        c, size = self.config, file_bytes(self.config, len(kv))
        room = c.disk_bytes - sum(n for other, n in self._sizes().items() if other != name)
        if not c.slots_dir:
            await trio.sleep(c.save_s)
            if size > room:
                self.runtime.files.pop(name, None)
                return None
            self.runtime.files[name] = kv
            return size
        head = file_head(c, kv)
        whole = head + bytes(max(0, size - len(head)))
        path, end = Path(c.slots_dir, name), min(size, max(0, int(min(room, size))))
        path.write_bytes(whole[: end // 2])
        await trio.sleep(c.save_s)
        path.write_bytes(whole[:end])
        return size if end == size else None

    def _sizes(self) -> dict[str, int]:
        if self.config.slots_dir:
            return {path.name: path.stat().st_size for path in Path(self.config.slots_dir).iterdir() if path.is_file()}
        return {name: file_bytes(self.config, len(kv)) for name, kv in self.runtime.files.items()}

    def read(self, name: str) -> tuple[list[int], bool] | None:
        """The ids of a file, and whether its KV is not what this model would have computed; None: cannot be loaded."""
        c = self.config
        if not c.slots_dir:
            kv = self.runtime.files.get(name)
            return None if kv is None else (list(kv), False)
        try:
            data = Path(c.slots_dir, name).read_bytes()
            magic, version, _words, one, inner, count = struct.unpack_from("<4s5I", data)
            kv = list(struct.unpack_from(f"<{count}I", data, 24))
            streams = struct.unpack_from("<I", data, 28 + 4 * count)[0]
        except (OSError, struct.error):
            return None
        right = (magic, version, one, inner) == (b"qsgg", 4, 0xFFFFFFFF, 1) and len(data) == file_bytes(c, count)
        if not right or streams != (1 if c.unified else c.slots):
            return None
        return kv, bool(kv) and data[32 + 4 * count :].rstrip(b"\0") != _fingerprint(c).rstrip(b"\0")

"""Records the answers to slot calls: ``python tests/record_slots.py``; see ``record.py``.

Each is the answer to a call of the adapter itself, ``slot_odd_*`` to one that it would not make.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvstream.adapters import LlamaCppBackend
from kvstream.adapters.base import HttpCall
from tests.record import perform, save, server

IDS = tuple(range(1000, 1040))
NAMES = {"bad": "../a.kv", "missing": "missing.kv", "folder": "folder.kv"}


def odd(path: str, body: object = None) -> HttpCall:
    return HttpCall("POST", path, (), b"" if body is None else json.dumps(body).encode())


def read(base: str, ids: tuple[int, ...], slot: int) -> httpx.Response:
    return perform(base, LlamaCppBackend(base).slots.read_prompt(ids, slot))  # type: ignore[union-attr]


def record_read(base: str, case: str, ids: tuple[int, ...], slot: int) -> None:
    call = LlamaCppBackend(base).slots.read_prompt(ids, slot)  # type: ignore[union-attr]
    save(case, perform(base, call), {"route": "/completion", "body": json.loads(call.body)})


def record_calls(base: str, folder: Path) -> None:
    slots = LlamaCppBackend(base).slots
    assert slots is not None
    record_read(base, "slot_read_prompt", IDS, 1)
    record_read(base, "slot_read_prompt_again", IDS, 1)
    save("slot_save", perform(base, slots.save(1, "a.kv")), None)
    save("slot_restore", perform(base, slots.restore(2, "a.kv")), None)
    save("slot_look_restored", perform(base, slots.look()), None, "slot 2 holds a restored file and does not say so")
    save("slot_erase", perform(base, slots.erase(2)), None)
    save("slot_save_empty", perform(base, slots.save(3, "b.kv")), None)
    save("slot_save_wrapped", perform(base, slots.save(9, "b.kv")), None, "slot 9 of four is slot 1")
    save("slot_save_bad_name", perform(base, slots.save(1, NAMES["bad"])), None)
    (folder / NAMES["folder"]).mkdir()
    save("slot_save_failed", perform(base, slots.save(1, NAMES["folder"])), None, "the name is that of a folder")
    save("slot_restore_missing", perform(base, slots.restore(1, NAMES["missing"])), None)
    (folder / "cut.kv").write_bytes((folder / "a.kv").read_bytes()[:5000])
    save("slot_restore_cut", perform(base, slots.restore(1, "cut.kv")), None)
    record_read(base, "slot_read_prompt_wiped", IDS, 1)
    record_read(base, "error_slot_read_prompt_too_long", IDS * 60, 1)
    save("slot_lora", perform(base, HttpCall("GET", "/lora-adapters")), None)
    save("slot_odd_no_body", perform(base, odd("/slots/1?action=save")), None)
    save("slot_odd_no_name", perform(base, odd("/slots/1?action=save", {})), None)
    save("slot_odd_id", perform(base, odd("/slots/abc?action=save", {"filename": "b.kv"})), None)
    save("slot_odd_action", perform(base, odd("/slots/1?action=dance", {"filename": "b.kv"})), None)


def record_sleep(base: str) -> None:
    for _ in range(200):
        answer = perform(base, HttpCall("GET", "/props"))
        if answer.json().get("is_sleeping"):
            save("reply_props_sleeping", answer, None)
            return
        time.sleep(0.1)
    print("reply_props_sleeping: it did not fall asleep; keeping the old transcript")


def main() -> None:
    with tempfile.TemporaryDirectory() as saves:
        common = {"n_parallel": 4, "n_ctx": 8192, "cache_ram_mib": 0}
        with server(slot_save_path=f"{saves}/", n_batch=128, n_ubatch=128, **common) as base:
            record_calls(base, Path(saves))
        with server(slot_save_path=f"{saves}/", sleep_idle_seconds=1, **common) as base:
            record_sleep(base)
    with server(n_parallel=4, n_ctx=8192, cache_ram_mib=0) as base:
        slots = LlamaCppBackend(base).slots
        assert slots is not None
        save("slot_no_save_path", perform(base, slots.save(1, "a.kv")), None)
        save("slot_restore_no_save_path", perform(base, slots.restore(1, "a.kv")), None)
        save("slot_erase_no_save_path", perform(base, slots.erase(1)), None)


if __name__ == "__main__":
    main()

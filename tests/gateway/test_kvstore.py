"""The store of saved KV: what is kept is offered, what is wrong never is, and no disk can harm a request."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.slot_calls import Identity, SlotDone
from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import SaveSpec
from kvstream.errors import StoreError
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.kvfiles import DATA, Disk
from kvstream.gateway.kvstore import KvStore

IDENTITY = Identity("0123456789abcdef", {"model": "../../x/y:latest", "ctx": "4096"}, 4096, 4)
PAGE = 16


def kv_file(ids: list[int], fill: int = 7, token_bytes: int = 64) -> bytes:
    """What llama.cpp writes, with few bytes of KV."""
    payload = struct.pack(f"<3I{len(ids)}I", 0xFFFFFFFF, 1, len(ids), *ids)
    return b"qsgg" + struct.pack("<2I", 4, len(payload) // 4) + payload + bytes([fill]) * (token_bytes * len(ids))


def spec_of(ids: list[int], *, tokens: int | None = None, known: int | None = None, model: str = "m",
            why: Any = "evict") -> SaveSpec:
    """To save a slot that holds ``ids``, of which the first ``known`` are known."""
    keys = page_keys(ids[:known], PAGE, salt(model))
    return SaveSpec(f"{IDENTITY.digest}{keys[-1].digest.hex()}.kv", keys, len(ids) if tokens is None else tokens, why)


def ids_of(seed: int, count: int = 100) -> list[int]:
    return [(seed * 1000 + n) % 50_000 for n in range(count)]


def store_at(folder: Path | None, state: Path | None = None, *, identity: Identity = IDENTITY, disk: Disk | None = None,
             wall: float | None = None, page_tokens: int = PAGE, **settings: Any) -> KvStore:
    more = {} if wall is None else {"wall": lambda: wall}
    return KvStore(folder, state or Path("/nowhere"), identity, InjectSettings(**settings), disk=disk,
                   page_tokens=page_tokens, **more)  # type: ignore[arg-type]


async def save(store: KvStore, folder: Path, ids: list[int], *, seconds: float = 0.01, data: bytes | None = None,
               done: dict[str, Any] | None = None, **of: Any) -> Any:
    """As the runtime does it: the file, and what it says of it."""
    spec = spec_of(ids, **of)
    data = kv_file(ids) if data is None else data
    (folder / store.temporary(spec.name, len(data))).write_bytes(data)
    said = {"slot": 0, "tokens": len(ids), "bytes": len(data), "seconds": seconds, **(done or {})}
    return await store.keep(spec, SlotDone(**said))


async def reopened(folder: Path, **more: Any) -> tuple[KvStore, dict[str, Any]]:
    store = store_at(folder, **more)
    return store, {prefix.name: prefix for prefix in await store.load()}


# --- keeping and offering ---------------------------------------------------------------------------------------------


async def test_what_is_kept_is_offered_after_a_restart(tmp_path: Path) -> None:
    ids = ids_of(1)
    store = store_at(tmp_path)
    assert await store.load() == []
    kept = await save(store, tmp_path, ids, known=64)
    assert kept.keys == page_keys(ids, PAGE, salt("m")), "the file told what the answer added"
    assert (kept.tokens, kept.bytes) == (100, len(kv_file(ids)))
    file = await store.offer(kept.name)
    assert (tmp_path / file).read_bytes() == kv_file(ids) and DATA.fullmatch(file)
    assert (tmp_path / file).stat().st_mode & 0o777 == 0o600
    store.close()
    store, found = await reopened(tmp_path)
    again = found[kept.name]
    assert (again.keys, again.tokens, again.bytes) == (kept.keys, kept.tokens, kept.bytes)
    assert (tmp_path / await store.offer(kept.name)).read_bytes() == kv_file(ids)
    store.forget(kept.name)
    store.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_name_that_is_none_reaches_no_file(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    for name in ("../../x.kv", "a.json", "", "A.kv", "a" * 81 + ".kv", "a\0.kv", "ü.kv", "a.kv\n"):
        with pytest.raises(StoreError):
            store.temporary(name)
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", [{"tokens": 0}, {"tokens": 99}, {"bytes": 5}])
async def test_case_51_less_than_was_promised_is_not_kept(tmp_path: Path, said: dict[str, int]) -> None:
    store = store_at(tmp_path)
    await store.load()
    with pytest.raises(StoreError):
        await save(store, tmp_path, ids_of(1), done=said)
    assert store.view().files == 0 and not list(tmp_path.glob("*.kv"))
    with trio.fail_after(5):
        await save(store, tmp_path, ids_of(1))
    store.close()

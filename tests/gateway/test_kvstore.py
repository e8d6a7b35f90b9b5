"""The store of saved KV: what is kept is offered, what is wrong never is, and no disk can harm a request."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from kvstream.adapters.slot_calls import Identity, SlotDone
from kvstream.core.tokens import page_keys, salt
from kvstream.core.types import SaveSpec
from kvstream.errors import StoreError
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.kvfiles import DATA, Disk
from kvstream.gateway.kvstore import KvStore
from kvstream.gateway.manifest import Manifest, ManifestError
from kvstream.gateway.metrics import Metrics

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
             wall: float | None = None, page_tokens: int = PAGE, meter: Any = None,
             **settings: Any) -> KvStore:
    more = {} if wall is None else {"wall": lambda: wall}
    return KvStore(folder, state or Path("/nowhere"), identity, InjectSettings(**settings), disk=disk, meter=meter,
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


@pytest.mark.parametrize("remote", [False, True])
async def test_the_state_of_a_request_that_died_with_its_process_is_nobodys_prefix(
        tmp_path: Path, remote: bool) -> None:
    """A crash leaves the file of one that gave way. A new run's request has the same number: the name must be free."""
    (state := tmp_path / "state").mkdir()
    folder = None if remote else tmp_path / "kv"
    (written := tmp_path / "kv").mkdir()
    store = store_at(folder, state)
    await store.load()
    prefix = await save(store, written, ids_of(1))
    spec = evolve(spec_of(ids_of(2)), name=f"s{IDENTITY.digest}x7.kv", why="swap")
    data = kv_file(ids_of(2))
    (written / store.temporary(spec.name, len(data))).write_bytes(data)
    await store.keep(spec, SlotDone(slot=0, tokens=100, bytes=len(data), seconds=0.01))
    assert {found.name for found in await store.load()} == {prefix.name, spec.name}, "its own process still has it"
    if not remote:  # another KVStream in the same folder neither offers nor deletes it
        other, found = await reopened(written)
        assert set(found) == {prefix.name}
        assert await store.offer(spec.name)
        other.close()
    store.close()
    store = store_at(folder, state)
    assert {found.name for found in await store.load()} == {prefix.name}
    left = [path.name for path in (state if remote else written).rglob("s*x7*")]
    assert not left and (remote or len(list(written.glob("*.kv"))) == 1)
    store.close()


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
    with trio.fail_after(60):
        await save(store, tmp_path, ids_of(1))
    store.close()


async def test_case_51_a_file_that_holds_other_tokens_than_was_thought_is_not_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    with pytest.raises(StoreError, match="other tokens"):
        await save(store, tmp_path, ids_of(1), data=kv_file(ids_of(2)))
    odd = b"not a file that we can read" * 300  # then the runtime's word is all there is
    kept = await save(store, tmp_path, ids_of(1), data=odd, known=64)
    assert len(kept.keys) == 4
    store.close()


async def test_a_picture_ends_what_is_known(tmp_path: Path) -> None:
    ids = [*ids_of(1, 40), *[0xFFFFFFFF] * 20, *ids_of(2, 40)]
    store = store_at(tmp_path)
    await store.load()
    kept = await save(store, tmp_path, ids, known=16)
    assert kept.keys == page_keys(ids[:40], PAGE, salt("m"))
    store.close()


async def test_saving_the_same_again_replaces_it(tmp_path: Path) -> None:
    ids = ids_of(1)
    store = store_at(tmp_path)
    await store.load()
    first = await save(store, tmp_path, ids)
    longer = ids + ids_of(2, 5)  # the same full pages, so the same name
    second = await save(store, tmp_path, longer, known=96)
    assert first.name == second.name and second.tokens == 105
    assert (tmp_path / await store.offer(first.name)).read_bytes() == kv_file(longer)
    assert len(list(tmp_path.glob("*.kv"))) == 1
    with pytest.raises(StoreError):  # what fails afterwards costs nothing
        await save(store, tmp_path, ids, done={"bytes": 3})
    assert (tmp_path / await store.offer(first.name)).read_bytes() == kv_file(longer)
    store.close()


async def test_a_file_is_told_by_why_it_goes(tmp_path: Path) -> None:
    metrics = Metrics()
    store = store_at(tmp_path, meter=metrics.inject.lane("a"))
    await store.load()
    ids = ids_of(1)
    short, longer, other = [(await save(store, tmp_path, which)).name for which in (ids, ids + ids_of(2), ids_of(3))]
    store.forget(short)
    store.forget(other)
    store.forget(longer)
    counts = {why: metrics.registry.get_sample_value(
        "kvstream_inject_store_evictions_total", {"backend": "a", "why": why}) for why in ("replaced", "quota")}
    assert counts == {"replaced": 1, "quota": 2}
    store.close()


async def test_times_are_on_the_schedulers_clock(tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    store = store_at(tmp_path, wall=1000.0)
    await store.load()
    names = [(await save(store, tmp_path, ids_of(n))).name for n in (1, 2)]
    store.close()
    await trio.sleep(50)
    store = store_at(tmp_path, wall=1300.0)
    found = {prefix.name: prefix for prefix in await store.load()}
    assert found[names[0]].used_at == pytest.approx(trio.current_time() - 300)
    store.used(names[0])
    store.used(names[0])
    store.close()
    store = store_at(tmp_path, wall=1310.0)
    found = {prefix.name: prefix for prefix in await store.load()}
    assert (found[names[0]].hits, found[names[1]].hits) == (2, 0)
    assert found[names[0]].used_at == pytest.approx(trio.current_time() - 10)
    store.close()
    _, found = await reopened(tmp_path, wall=500.0)  # a clock that was set back
    assert all(prefix.used_at == trio.current_time() for prefix in found.values())


# --- wrong files ------------------------------------------------------------------------------------------------------


async def kept_one(folder: Path, ids: list[int]) -> tuple[str, Path]:
    """Its name, and its data file, in a store that is closed."""
    store = store_at(folder)
    await store.load()
    name = (await save(store, folder, ids)).name
    file = folder / await store.offer(name)
    store.close()
    return name, file


@pytest.mark.parametrize("tenth", range(10))
async def test_case_51_a_truncated_file_is_not_offered(tmp_path: Path, tenth: int) -> None:
    name, file = await kept_one(tmp_path, ids_of(1))
    data = file.read_bytes()
    file.write_bytes(data[:len(data) * tenth // 10])
    store, found = await reopened(tmp_path)
    assert found == {} and list(tmp_path.glob("*.kv*")) == []
    with pytest.raises(StoreError):
        await store.offer(name)
    store.close()


@pytest.mark.parametrize("tenth", range(10))
async def test_case_51_truncated_while_we_run(tmp_path: Path, tenth: int) -> None:
    store = store_at(tmp_path)
    await store.load()
    name = (await save(store, tmp_path, ids_of(1))).name
    file = tmp_path / await store.offer(name)
    data = file.read_bytes()
    file.write_bytes(data[:len(data) * tenth // 10])
    with pytest.raises(StoreError):
        await store.offer(name)
    assert store.view().files == 0 and store.view().dropped == 1 and list(tmp_path.glob("*.kv*")) == []
    store.close()


@pytest.mark.parametrize("at", [0, 3, 9, 30, 200, 3000, 6000, -1])
async def test_case_51_a_flipped_bit_is_found_at_the_first_use(tmp_path: Path, at: int) -> None:
    name, file = await kept_one(tmp_path, ids_of(1))
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    before = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that rots tells nobody
    store, found = await reopened(tmp_path)
    assert set(found) == {name}
    with pytest.raises(StoreError, match="checksum"):
        await store.offer(name)
    assert list(tmp_path.glob("*.kv*")) == []
    store.close()
    assert (await reopened(tmp_path))[1] == {}


async def test_case_51_rewritten_with_the_same_size_while_we_run(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    name = (await save(store, tmp_path, ids_of(1))).name
    file = tmp_path / await store.offer(name)
    file.write_bytes(kv_file(ids_of(1), fill=8))
    with pytest.raises(StoreError, match="checksum"):
        await store.offer(name)
    store.close()


async def test_a_file_that_was_only_touched_is_still_good(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    name = (await save(store, tmp_path, ids_of(1))).name
    file = tmp_path / await store.offer(name)
    file.touch()
    assert await store.offer(name) == file.name
    store.close()


@pytest.mark.parametrize("other", [
    Identity("fedcba9876543210"), Identity("0123456789abcdee", {"ctx": "8192"}), Identity("", {"kv": "q8_0"})])
async def test_case_51_another_identity_is_never_offered(tmp_path: Path, other: Identity) -> None:
    name, file = await kept_one(tmp_path, ids_of(1))
    store, found = await reopened(tmp_path, identity=other)
    assert found == {} and file.exists() and store.view().other_bytes == len(kv_file(ids_of(1)))
    with pytest.raises(StoreError):
        await store.offer(name)
    store.close()
    assert set((await reopened(tmp_path))[1]) == {name}, "it is there when that model comes back"


async def test_pages_of_another_size_are_not_offered(tmp_path: Path) -> None:
    name, file = await kept_one(tmp_path, ids_of(1))
    assert (await reopened(tmp_path, page_tokens=32))[1] == {} and file.exists()
    assert set((await reopened(tmp_path, page_tokens=0))[1]) == {name}


async def test_what_the_runtime_restored_is_compared(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    kept = [await save(store, tmp_path, ids_of(n)) for n in (1, 2)]
    assert store.restored(kept[0].name, SlotDone(1, 100, kept[0].bytes))
    assert not store.restored(kept[1].name, SlotDone(1, 90, kept[1].bytes))
    assert store.view().files == 1 and not store.restored("none.kv", SlotDone(1, 90))
    store.close()
    assert [prefix.hits for prefix in (await reopened(tmp_path))[1].values()] == [1]


# --- manifests --------------------------------------------------------------------------------------------------------


async def test_case_50_the_manifest_holds_what_the_name_does_not(tmp_path: Path) -> None:
    facts = {"model": "../../x/y:latest", "session": "a\0b" + "x" * 300, "alias": "日本\ud800語", "long": "x" * 10**6}
    odd = Identity("0123456789abcdef", {**facts, **{f"f{n}": "x" for n in range(1000)}})
    store = store_at(tmp_path, identity=odd)
    await store.load()
    kept = await save(store, tmp_path, ids_of(1), model="../../x/y:latest\0" + "ü" * 300)
    store.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 2 and all(name.isascii() and "/" not in name and len(name) < 120 for name in names)
    manifest = next(tmp_path.glob("*.json"))
    said = json.loads(manifest.read_text("utf-8"))
    assert {name: said["identity_facts"][name] for name in ("model", "session", "alias")} == {
        name: facts[name] for name in ("model", "session", "alias")}
    assert manifest.stat().st_size < 10**6 and manifest.stat().st_mode & 0o777 == 0o600
    assert set((await reopened(tmp_path, identity=odd))[1]) == {kept.name}


async def test_any_flipped_byte_of_a_manifest_is_noticed(tmp_path: Path) -> None:
    await kept_one(tmp_path, ids_of(1))
    data = next(tmp_path.glob("*.json")).read_bytes()
    whole = Manifest.load(data)
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        try:
            found = Manifest.load(bytes(broken))
        except ManifestError:
            continue
        assert found == whole, f"byte {at}: {broken[max(0, at - 20):at + 20]!r}"  # a blank is none of our business


@pytest.mark.parametrize("junk", [
    b"", b"{", b"null", b"[]", b"[" * 100_000, b"\xff\xfe", b'{"kvstream": 1}', b'{"kvstream": "1", "check": 3}',
    b'{"kvstream": 1, "ids": ' + b"9" * 5000 + b"}", b"\0" * 4096])
async def test_a_manifest_that_is_none_goes_with_its_file(tmp_path: Path, junk: bytes) -> None:
    _, file = await kept_one(tmp_path, ids_of(1))
    next(tmp_path.glob("*.json")).write_bytes(junk)
    other, _ = await kept_one(tmp_path, ids_of(2))
    assert set((await reopened(tmp_path))[1]) == {other} and not file.exists()


async def test_a_huge_manifest_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstream.gateway.kvshelf.MANIFEST_BYTES_MAX", 10_000)
    _, file = await kept_one(tmp_path, ids_of(1))
    with next(tmp_path.glob("*.json")).open("ab") as manifest:
        manifest.write(b" " * 20_000)
    assert (await reopened(tmp_path))[1] == {} and not file.exists()


async def test_a_manifest_of_a_later_version_is_left_alone(tmp_path: Path) -> None:
    _, file = await kept_one(tmp_path, ids_of(1))
    next(tmp_path.glob("*.json")).write_bytes(b'{"kvstream": 2}')
    assert (await reopened(tmp_path))[1] == {} and file.exists()


async def test_a_manifest_that_cannot_be_read_now_costs_nothing(tmp_path: Path) -> None:
    class Shy(Disk):
        def read(self, path: Path, limit: int, offset: int = 0) -> bytes:
            raise PermissionError(13, "Permission denied")

    name, _ = await kept_one(tmp_path, ids_of(1))
    store, found = await reopened(tmp_path, disk=Shy())
    assert found == {}
    store.close()
    assert set((await reopened(tmp_path))[1]) == {name}


async def test_what_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    theirs = ["a.kv", "a.bin", "kvs.kv", "kvt.kv", "notes.json", "kvstream.toml", "KVT0123456701234567.kv", "x.kv.tmp"]
    for name in theirs:
        (tmp_path / name).write_text("x", "utf-8")
    (tmp_path / "kvt01234567012345.kv").mkdir()
    (tmp_path / "kvs00x01234567012345.kv").symlink_to(tmp_path / "a.kv")
    await kept_one(tmp_path, ids_of(1))
    store, found = await reopened(tmp_path)
    store.forget(next(iter(found)))
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {
        *theirs, "kvt01234567012345.kv", "kvs00x01234567012345.kv"}

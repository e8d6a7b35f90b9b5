"""The store when things go wrong around it: a crash or an error at every single operation, full and slow disks, other
processes in the same directory, a directory that only the runtime sees."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvstream.adapters.slot_calls import Identity, SlotDone
from kvstream.errors import StoreError
from kvstream.gateway.filelock import Owner, bury, lock_path
from kvstream.gateway.inject_settings import InjectSettings
from kvstream.gateway.kvfiles import Disk
from kvstream.gateway.kvplace import open_store, remote_state_dir
from kvstream.gateway.kvstore import KvStore
from kvstream.gateway.slot_ports import SlotsFound
from tests.gateway.test_kvstore import IDENTITY, ids_of, kv_file, reopened, save, spec_of, store_at

SIZE = len(kv_file(ids_of(1)))


class Crash(BaseException):
    """The process is gone at this point."""


class Faulty(Disk):
    """Every operation counts; ``fault(number, name, after)`` may raise before it is done, and after it."""

    def __init__(self, fault: Callable[[int, str, bool], None]) -> None:
        self.count = 0
        self.fault = fault

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name in ("count", "fault"):
            return found

        def operation(*args: Any) -> Any:
            self.count += 1
            number = self.count
            self.fault(number, name, False)
            result = found(*args)
            self.fault(number, name, True)
            return result

        return operation


def crash_at(number: int, after: bool) -> Callable[[int, str, bool], None]:
    def fault(count: int, name: str, done: bool) -> None:
        if count > number or (count == number and done >= after):
            raise Crash

    return fault


def die(store: KvStore) -> None:
    """What the kernel does when a process ends: its locks go, its files stay."""
    owner = getattr(store._shelf, "_owner", None) or getattr(store._shelf, "_lock", None)
    if owner is not None:
        os.close(owner.fd if isinstance(owner, Owner) else owner)
    store._closed = True


class Story:
    """A life of a store, and what must be true after any end of it. ``kept`` has what ``keep`` gave back, ``maybe``
    what else may be there."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.maybe: dict[str, set[bytes]] = {}

    async def save(self, store: KvStore, folder: Path, ids: list[int], known: int | None = None) -> None:
        name = spec_of(ids, known=known).name
        self.maybe.setdefault(name, set()).add(kv_file(ids))
        await save(store, folder, ids, known=known)
        self.kept[name] = kv_file(ids)

    def forget(self, store: KvStore, name: str) -> None:
        self.maybe[name].add(self.kept.pop(name))
        store.forget(name)
        del self.maybe[name]

    async def live(self, store: KvStore, folder: Path) -> None:
        await store.load()
        await self.save(store, folder, ids_of(1))
        await self.save(store, folder, ids_of(2))
        with contextlib.suppress(StoreError):
            await store.offer(spec_of(ids_of(1)).name)
        store.used(spec_of(ids_of(1)).name)
        await self.save(store, folder, ids_of(1) + ids_of(7, 4), known=96)  # the same name again
        await self.save(store, folder, ids_of(3))
        if spec_of(ids_of(2)).name in self.kept:
            self.forget(store, spec_of(ids_of(2)).name)
        name = store.temporary(spec_of(ids_of(4)).name, SIZE)
        (folder / name).write_bytes(kv_file(ids_of(4))[:1000])
        await store.load()
        store.abandon(spec_of(ids_of(4)).name)
        await self.save(store, folder, ids_of(5))
        store.close()

    async def check(self, folder: Path) -> None:
        store, found = await reopened(folder)
        for name, data in self.kept.items():
            assert name in found, "it was kept, and is lost"
            assert name in self.maybe or data
        for name in found:
            data = (folder / await store.offer(name)).read_bytes()
            assert data in {self.kept.get(name), *self.maybe.get(name, ())}
            assert len(data) == found[name].bytes
        assert len(list(folder.glob("kvs*.kv"))) == len(found) == len(list(folder.glob("*.json")))
        assert not list(folder.glob("kvt*")) and not list(folder.glob("*.tmp")), "leftovers"
        store.close()
        assert not list(folder.glob("*.lock"))


async def operations() -> int:
    disk = Faulty(lambda *_: None)
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        await Story().live(store_at(Path(folder), disk=disk), Path(folder))
    return disk.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_crash_at_any_step_offers_nothing_wrong_and_loses_nothing(tmp_path: Path, after: bool) -> None:
    steps = await operations()
    assert steps > 50
    for number in range(1, steps + 1):
        folder = tmp_path / str(number)
        folder.mkdir()
        story, store = Story(), store_at(folder, disk=Faulty(crash_at(number, after)))
        with contextlib.suppress(Crash):
            await story.live(store, folder)
        die(store)
        try:
            await story.check(folder)
        except AssertionError as error:
            raise AssertionError(f"after a crash at operation {number}: {error}") from error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
async def test_an_error_at_any_step_is_one_error_and_no_more(tmp_path: Path, code: int) -> None:
    class Patient(Story):
        async def save(self, store: KvStore, folder: Path, ids: list[int], known: int | None = None) -> None:
            with contextlib.suppress(StoreError):
                await super().save(store, folder, ids, known=known)

        async def live(self, store: KvStore, folder: Path) -> None:
            with contextlib.suppress(StoreError):
                await super().live(store, folder)

    for number in range(1, await operations() + 1):
        folder = tmp_path / str(number)
        folder.mkdir()

        def fault(count: int, name: str, done: bool, number: int = number) -> None:
            if count == number and not done:
                raise OSError(code, os.strerror(code))

        disk = Faulty(fault)
        story, store = Patient(), store_at(folder, disk=disk)
        await story.live(store, folder)
        store.close()
        store, found = await reopened(folder)
        for name in found:
            assert (folder / await store.offer(name)).read_bytes() in story.maybe.get(name, {story.kept.get(name)})
        store.close()


# --- full, read-only, slow --------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "kvstream.store")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "kvstream-test", str(folder)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_case_52_a_full_disk(small_disk: Path, autojump_clock: Any, warnings: Callable[[], list[str]]) -> None:
    store = store_at(small_disk)
    await store.load()
    await save(store, small_disk, ids_of(1))
    spec = spec_of(ids_of(2))
    with (small_disk / store.temporary(spec.name)).open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(65536))  # as llama-server does, which then says 500 and leaves what it wrote
    store.failed(spec.name, "Unable to save slot")
    assert not store.saving and len(warnings()) == 1 and "full" in warnings()[0]
    assert store.view().offs["full"] == 1 and "full" in store.view().off
    assert await store.offer(spec_of(ids_of(1)).name), "what there is can be used"
    with pytest.raises(StoreError, match="off for another 60 s"):
        store.temporary(spec.name)
    assert len(list(small_disk.glob("*.kv"))) == 1, "the partial file is gone"
    await trio.sleep(61)
    (small_disk / "somebody").write_bytes(bytes(900 * 1024))
    with pytest.raises(StoreError, match="MiB left"):
        store.temporary(spec.name, 4 * 2**20)
    assert len(warnings()) == 1, "the same is not said twice"
    (small_disk / "somebody").unlink()
    await trio.sleep(121)
    await save(store, small_disk, ids_of(2))
    assert store.saving and not store.view().off
    store.close()


async def test_case_52_a_full_disk_when_the_manifest_is_written(
        tmp_path: Path, autojump_clock: Any, warnings: Callable[[], list[str]]) -> None:
    class Full(Disk):
        def write(self, path: Path, data: bytes) -> None:
            super().write(path, data[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    store = store_at(tmp_path, disk=Full())
    await store.load()
    with pytest.raises(StoreError, match="free some space"):
        await save(store, tmp_path, ids_of(1))
    assert not store.saving and len(warnings()) == 1 and not list(tmp_path.glob("*kv*json*"))
    assert not list(tmp_path.glob("*.kv")) and not list(tmp_path.glob("*.tmp"))
    store.close()


async def test_a_directory_in_which_nothing_can_be_created(
        tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]],
) -> None:
    def refuse(folder: Path) -> Owner:
        raise OSError(errno.EROFS, "Read-only file system")

    store = store_at(tmp_path)
    await store.load()
    name = (await save(store, tmp_path, ids_of(1))).name
    store.close()
    monkeypatch.setattr(Owner, "claim", refuse)
    store, found = await reopened(tmp_path)
    assert set(found) == {name} and await store.offer(name), "reading is enough to use what is there"
    assert not store.saving and len(warnings()) == 1 and "Read-only" in warnings()[0]
    with pytest.raises(StoreError):
        store.temporary(name)
    await trio.sleep(100)
    with pytest.raises(StoreError, match="Read-only"):
        store.temporary(name)
    store.forget(name)
    store.close()


async def test_a_directory_that_is_not_there(
        tmp_path: Path, autojump_clock: Any, warnings: Callable[[], list[str]]) -> None:
    store = store_at(tmp_path / "gone")
    assert await store.load() == [] and not store.saving and len(warnings()) == 1
    store.close()


async def test_case_52_a_slow_disk(tmp_path: Path, autojump_clock: Any, warnings: Callable[[], list[str]]) -> None:
    store = store_at(tmp_path)
    await store.load()
    kept = await save(store, tmp_path, ids_of(1), seconds=5.0)
    assert not store.saving and await store.offer(kept.name), "it is there, so it is kept"
    assert len(warnings()) == 1 and "inject.slow_save_s" in warnings()[0]
    pauses = []
    for n in range(2, 12):
        began = trio.current_time()
        while not store.saving:
            await trio.sleep(10)
        pauses.append(trio.current_time() - began)
        await save(store, tmp_path, ids_of(n), seconds=5.0)
    assert pauses[:3] == [60, 120, 240] and pauses[-1] == 3600 and len(warnings()) == 1
    await trio.sleep(3601)
    await save(store, tmp_path, ids_of(20))
    await save(store, tmp_path, ids_of(21), seconds=5.0)
    assert len(warnings()) == 2, "it worked in between, so this is news"
    store.close()


async def test_three_failures_in_a_row_are_enough(tmp_path: Path, autojump_clock: Any) -> None:
    store = store_at(tmp_path)
    await store.load()
    for n in range(3):
        assert store.saving
        name = spec_of(ids_of(n)).name
        store.temporary(name)
        store.failed(name, "Unable to save slot")
    assert not store.saving and "Unable to save slot" in store.view().off
    store.close()


# --- quota ------------------------------------------------------------------------------------------------------------


async def test_case_52_other_models_files_go_first_and_before_the_write(tmp_path: Path) -> None:
    other = Identity("fedcba9876543210")
    for n in range(3):
        store = store_at(tmp_path, identity=other, wall=1000.0 + n)
        await store.load()
        await save(store, tmp_path, ids_of(n))
        store.close()
    store = store_at(tmp_path, wall=2000.0, disk_bytes_max=3 * SIZE)
    await store.load()
    assert store.view().other_bytes == 3 * SIZE
    store.temporary(spec_of(ids_of(5)).name, SIZE)
    assert store.view().other_bytes == 2 * SIZE and len(list(tmp_path.glob("kvs*.kv"))) == 2
    await save(store, tmp_path, ids_of(6))
    store.abandon(spec_of(ids_of(5)).name)
    store.close()
    _, found = await reopened(tmp_path, identity=other)
    assert [prefix.name for prefix in found.values()] == [spec_of(ids_of(2)).name], "the longest unused went"


async def test_our_own_are_not_given_up_behind_the_schedulers_back(tmp_path: Path) -> None:
    store = store_at(tmp_path, disk_bytes_max=2 * SIZE)
    await store.load()
    for n in (1, 2):
        await save(store, tmp_path, ids_of(n))
    with pytest.raises(StoreError, match="disk_bytes_max"):
        store.temporary(spec_of(ids_of(3)).name, SIZE)
    file = store.temporary(spec_of(ids_of(3)).name)  # nobody knew how large it would be
    (tmp_path / file).write_bytes(kv_file(ids_of(3)))
    with pytest.raises(StoreError, match="disk_bytes_max"):
        await store.keep(spec_of(ids_of(3)), SlotDone(0, 100, SIZE))
    assert len(list(tmp_path.glob("*.kv"))) == 2 and store.saving
    store.forget(spec_of(ids_of(1)).name)
    await save(store, tmp_path, ids_of(3))
    store.close()


async def test_a_quota_that_was_lowered(tmp_path: Path) -> None:
    for n in range(4):
        store = store_at(tmp_path, wall=1000.0 + n)
        await store.load()
        await save(store, tmp_path, ids_of(n))
        store.close()
    _, found = await reopened(tmp_path, disk_bytes_max=2 * SIZE)
    assert set(found) == {spec_of(ids_of(n)).name for n in (2, 3)} and len(list(tmp_path.glob("*.kv"))) == 2


# --- others in the directory ------------------------------------------------------------------------------------------


async def test_two_at_once_in_one_directory(tmp_path: Path) -> None:
    one, two = store_at(tmp_path), store_at(tmp_path)
    await one.load()
    spec = spec_of(ids_of(1))
    writing = one.temporary(spec.name, SIZE)
    (tmp_path / writing).write_bytes(kv_file(ids_of(1))[:500])
    await two.load()
    assert (tmp_path / writing).exists(), "somebody is at it"
    await save(two, tmp_path, ids_of(1))
    (tmp_path / writing).write_bytes(kv_file(ids_of(1), fill=9))
    await one.keep(spec, SlotDone(0, 100, SIZE))
    three, found = await reopened(tmp_path)
    assert set(found) == {spec.name}
    assert (tmp_path / await three.offer(spec.name)).read_bytes() == kv_file(ids_of(1), fill=9), "the last one counts"
    assert (tmp_path / await two.offer(spec.name)).read_bytes() == kv_file(ids_of(1)), "each has its own"
    one.forget(spec.name)
    with pytest.raises(StoreError):
        await three.offer(spec.name)
    for store in (one, two, three):
        store.close()
    assert (await reopened(tmp_path))[1] == {} and not list(tmp_path.glob("*.kv"))


def test_a_lock_tells_the_living_from_the_dead(tmp_path: Path) -> None:
    owner = Owner.claim(tmp_path)
    assert not bury(tmp_path, owner.token) and lock_path(tmp_path, owner.token).exists()
    os.close(owner.fd)
    assert bury(tmp_path, owner.token) and list(tmp_path.iterdir()) == []
    assert bury(tmp_path, "01234567"), "one without a lock is dead"


def test_a_lock_file_that_is_swept_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstream.gateway import filelock

    real, tokens = filelock.try_lock, []

    def late(fd: int) -> bool:
        if not tokens:
            tokens.extend(tmp_path.iterdir())
            tokens[0].unlink()
        return real(fd)

    monkeypatch.setattr(filelock, "try_lock", late)
    owner = Owner.claim(tmp_path)
    assert owner.path.exists() and owner.path != tokens[0]
    owner.release()


async def test_a_save_that_comes_after_nobody_waited_any_more(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    spec = spec_of(ids_of(1))
    file = store.temporary(spec.name)
    store.abandon(spec.name)
    (tmp_path / file).write_bytes(kv_file(ids_of(1)))  # deferred by the runtime, until its slot was free
    assert store.temporary(spec.name) != file
    store.close()
    assert list(tmp_path.glob("*.kv")) == []


async def test_loading_again_leaves_alone_what_is_being_saved(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    spec = spec_of(ids_of(1))
    (tmp_path / store.temporary(spec.name)).write_bytes(kv_file(ids_of(1)))
    assert await store.load() == []  # the backend was restarted, or so it seemed
    kept = await store.keep(spec, SlotDone(0, 100, SIZE))
    assert [prefix.name for prefix in await store.load()] == [kept.name]
    store.close()


async def test_cancelled_while_it_is_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.load()
    for when in range(8):
        spec = spec_of(ids_of(when))
        (tmp_path / store.temporary(spec.name)).write_bytes(kv_file(ids_of(when)))
        with trio.CancelScope() as scope:
            async def cancel(scope: trio.CancelScope = scope, when: int = when) -> None:
                for _ in range(when):
                    await trio.lowlevel.checkpoint()
                scope.cancel()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cancel)
                await store.keep(spec, SlotDone(0, 100, SIZE))
        store.abandon(spec.name)
        assert len(list(tmp_path.glob("kvs*.kv"))) == len(list(tmp_path.glob("*.json"))) == store.view().files
        assert not list(tmp_path.glob("kvt*"))
    store.close()


# --- a directory that only the runtime sees ---------------------------------------------------------------------------


async def remote_save(store: KvStore, seed: int) -> str:
    spec = spec_of(ids_of(seed))
    file = store.temporary(spec.name, SIZE)
    await store.keep(spec, SlotDone(0, 100, SIZE, 0.01))
    return file


async def test_names_on_a_remote_disk_are_used_in_turn(tmp_path: Path) -> None:
    times = iter(range(1000))
    store = KvStore(None, tmp_path, IDENTITY, InjectSettings(files_max=4), wall=lambda: 1000.0 + next(times))
    assert await store.load() == [] and not store.is_local
    files = [await remote_save(store, n) for n in range(4)]
    assert len(set(files)) == 4 and all(name.startswith("kvr") and len(name) == 20 for name in files)
    assert await store.offer(spec_of(ids_of(0)).name) == files[0]
    store.used(spec_of(ids_of(0)).name)
    assert await remote_save(store, 4) == files[1], "the longest unused"
    with pytest.raises(StoreError):
        await store.offer(spec_of(ids_of(1)).name)
    store.forget(spec_of(ids_of(3)).name)
    assert await remote_save(store, 5) == files[3]
    store.close()
    store = store_at(None, tmp_path, files_max=4)
    assert {prefix.name for prefix in await store.load()} == {spec_of(ids_of(n)).name for n in (0, 2, 4, 5)}
    assert await store.offer(spec_of(ids_of(4)).name) == files[1]
    assert not store.restored(spec_of(ids_of(4)).name, SlotDone(0, 99, SIZE)), "all that can be checked from here"
    store.close()


async def test_a_remote_file_is_forgotten_before_it_is_written_over(tmp_path: Path) -> None:
    store = store_at(None, tmp_path, files_max=1)
    await store.load()
    file = await remote_save(store, 1)
    assert store.temporary(spec_of(ids_of(2)).name) == file
    die(store)  # while the runtime writes
    store = store_at(None, tmp_path, files_max=1)
    assert await store.load() == []
    store.close()


async def test_a_remote_name_that_may_still_be_written_is_not_used_again(tmp_path: Path) -> None:
    store = store_at(None, tmp_path, files_max=2)
    await store.load()
    first = store.temporary(spec_of(ids_of(1)).name)
    store.abandon(spec_of(ids_of(1)).name)
    assert await remote_save(store, 2) != first and await remote_save(store, 3) != first
    store.close()


async def test_two_with_one_remote_runtime_use_different_names(tmp_path: Path) -> None:
    one, two = (store_at(None, tmp_path, files_max=2) for _ in range(2))
    await one.load()
    await two.load()
    assert not {await remote_save(one, n) for n in range(2)} & {await remote_save(two, n) for n in range(2)}
    one.close()
    two.close()
    one = store_at(None, tmp_path, files_max=2)
    assert len(await one.load()) == 2
    one.close()


async def test_case_50_an_address_names_no_folder(tmp_path: Path) -> None:
    settings = InjectSettings(state_dir=str(tmp_path))
    folders = {remote_state_dir(settings, url) for url in ("http://../../x", "http://a\0b", "http://" + "x" * 3000)}
    assert len(folders) == 3 and all(folder.parent == tmp_path / "remote" for folder in folders)


async def test_where_the_self_check_saw_a_file_is_where_they_are(tmp_path: Path) -> None:
    settings = InjectSettings(state_dir=str(tmp_path / "state"))
    found = SlotsFound("hard", None, identity=IDENTITY, slots_dir_hint=str(tmp_path))
    assert open_store(found, settings, "http://h:1", page_tokens=16).is_local
    store = open_store(SlotsFound("hard", None, identity=IDENTITY), settings, "http://h:1", page_tokens=16)
    assert not store.is_local and await store.load() == []
    store.close()

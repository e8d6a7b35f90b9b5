"""Measuring a sweep, on a device that only stands in for a GPU: what is tried, what is told, what is left behind."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvstream.bench import kvgpu, kvplot
from kvstream.bench.kv import Sweep, run_sweep
from kvstream.bench.kvborrow import Busy
from kvstream.bench.kvcard import CALL_S, LAYER, WAVE_S
from kvstream.bench.kvfiles import RESULTS, TABLE
from kvstream.bench.kvgpu import About, Gpu, Machine, find_pool, largest
from kvstream.bench.kvmeasure import measure
from kvstream.bench.kvmodel import FITTED_TO, MODELS, PROFILES, TOKENS, Model
from kvstream.bench.kvpoint import BASELINES, MEASURED, MIB, TRIED, Point, Setup, layout_in
from kvstream.bench.kvsim import simulate
from kvstream.cuda.device import Device
from kvstream.cuda.fake_device import FakeDevice, Launch, Memory, Speeds
from kvstream.cuda.types import KVType
from kvstream.errors import ConfigError, DeviceError, DeviceMemoryError

MODEL = Model("tiny", 3, 2, 4, 64, weights_mib=2)
ASKED = Setup(None, MODEL, KVType.Q8_0, KVType.Q4_0, page_tokens=32, decode_tokens=48, ubatch_tokens=64, margin_mib=0,
              pool_step_mib=1)
QUIET: Any = lambda *told: None  # noqa: E731


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many points each picture had, instead of pictures."""
    drawn: list[int] = []
    monkeypatch.setattr(kvplot, "write_pictures", lambda folder, points, *_, **__: drawn.append(len(points)))
    return drawn


class Card(FakeDevice):
    """``limit``: bytes of the largest allocation there is, whatever ``memory`` says. ``launches``: how many
    launches succeed; after one that did not, nothing does. ``interrupt``: it is Ctrl-C that comes then."""

    def __init__(self, mib: int = 8, limit: int = 1 << 50, launches: int = 1 << 50, interrupt: bool = False) -> None:
        speeds = Speeds(in_bytes_per_s=4e9, copy_s=1e-6, kernel_s=_kernel_s)
        super().__init__(None, speeds=speeds, memory_bytes=mib * MIB)
        self.limit, self.launches, self.interrupt = limit, launches, interrupt
        self.failed = self.closed = False

    def alloc(self, size: int) -> int:
        if size > self.limit:
            raise DeviceMemoryError(f"allocate {size} bytes of device memory: planted")
        return super().alloc(size)

    def launch(self, *args: Any, **more: Any) -> None:
        self.launches -= 1
        if self.launches < 0:
            if self.interrupt:
                raise KeyboardInterrupt
            self.failed = True
        self._sound()
        super().launch(*args, **more)

    def synchronize(self, *args: Any) -> None:
        self._sound()
        super().synchronize(*args)

    def _sound(self) -> None:
        if self.failed:
            raise DeviceError("launch: an illegal address")

    def close(self) -> None:
        self.failed, self.closed = False, True
        super().close()


def _kernel_s(launch: Launch) -> float:
    if not launch.kernel.startswith("kv_attend"):
        return 1e-6
    k_pages, v_pages = launch.args[1:3]
    return 1e-6 + 0.5e-6 * (v_pages - k_pages) / 8


class Cards:
    """Opens what it is given, in order, the last again and again, and remembers them."""

    def __init__(self, *makers: Callable[[], Card]) -> None:
        self.makers, self.opened = list(makers), list[Card]()

    def machine(self, available: int | None = None) -> Machine:
        return Machine(self._open, lambda device: device.host_s, lambda: available)  # type: ignore[attr-defined]

    def _open(self, setup: Setup) -> Card:
        make = self.makers.pop(0) if len(self.makers) > 1 else self.makers[0]
        self.opened.append(make())
        return self.opened[-1]

    def all_closed(self) -> bool:
        return all(card.closed for card in self.opened)


def point(cards: Cards, setup: Setup = ASKED, prompt: int = 4096, say: Any = QUIET) -> Point:
    return measure(cards.machine(), About("card", 8.0), setup, prompt, QUIET, say)


# --- the largest pool -------------------------------------------------------------------------------------------------


@given(low=st.integers(1, 40), more=st.integers(0, 3000), limit=st.integers(0, 3100))
def test_the_largest_is_found(low: int, more: int, limit: int) -> None:
    high, tried = low + more, list[int]()

    def works(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert largest(works, low, high) == (min(high, limit) if limit >= low else None)
    assert len(set(tried)) == len(tried) <= 26 and all(low <= number <= high for number in tried)


@pytest.mark.parametrize(("mib", "reserve", "margin", "limit", "pool", "tries"), [
    (16, 0, 0, None, 7, 1),    # all that is of use
    (8, None, 0, None, 5, 1),  # beside 2 MiB of weights and what is in use besides
    (8, None, 1, None, 4, 1),
    (8, 0, 3, None, 4, 1),
    (8, 0, 0, 2, 2, 5),        # what memory() says is not to be had: 7, 1, 2, 4, 3
    (8, 0, 0, 3, 3, 5),
    (8, 0, 0, 5, 5, 6),        # 7, 1, 2, 4, 5, 6
])
def test_the_pool_is_the_largest_that_memory_allows(mib: int, reserve: float | None, margin: float, limit: int | None,
                                                    pool: int, tries: int) -> None:
    cards = Cards(lambda: Card(mib, 1 << 50 if limit is None else limit * MIB + MIB // 2))
    setup = evolve(ASKED, reserve_mib=reserve, margin_mib=margin)
    with Gpu(cards.machine(), setup, layout_in(setup, 8240, 1 << 40)) as gpu:
        before = gpu.free_bytes()
        assert find_pool(gpu, 8240, QUIET) == (pool, tries) and gpu.free_bytes() == before
    assert cards.all_closed() and len(cards.opened) == 1


def test_a_pool_that_breaks_the_device_is_a_pool_that_does_not_work() -> None:
    """A launch fails for want of memory: the device is lost, and a fresh one goes on looking."""
    cards = Cards(lambda: Card(launches=0), Card)
    setup = evolve(ASKED, reserve_mib=0)
    with Gpu(cards.machine(), setup, layout_in(setup, 8240, 1 << 40)) as gpu:
        found, tries = find_pool(gpu, 8240, QUIET)
    assert found == 6 and tries > 1 and len(cards.opened) == 2 and cards.all_closed()


def test_the_margin_is_free_after_the_steps() -> None:
    """A device that takes a MiB for itself as soon as there is a pool: 8 are there, 6 are left for it."""
    class Greedy(Card):
        def memory(self) -> tuple[int, int]:
            free, total = super().memory()
            return (free - MIB if free < 6 * MIB else free), total

    setup = evolve(ASKED, reserve_mib=0, margin_mib=0.5)
    with Gpu(Cards(Greedy).machine(), setup, layout_in(setup, 12288, 1 << 40)) as gpu:
        assert find_pool(gpu, 12288, QUIET)[0] == 6


def test_a_size_that_was_asked_for_is_not_made_smaller() -> None:
    said: list[str] = []
    with pytest.raises(DeviceMemoryError, match="allocate"):
        point(Cards(Card), evolve(ASKED, pool_mib=7), prompt=12288, say=said.append)
    assert not said


@pytest.mark.parametrize(("setup", "available", "words"), [
    (evolve(ASKED, reserve_mib=7.6), None, "no pool works: 1 MiB are the least for this context, and beside 8 MiB"),
    (evolve(ASKED, reserve_mib=None, margin_mib=6), None, "beside 2 MiB in the place of tiny and a margin of 6 MiB"),
    (evolve(ASKED, reserve_mib=9), None, "9 MiB in the place of tiny do not fit into the 8 MiB that are free"),
    (ASKED, MIB, "3 MiB of pinned host memory, and this machine has 1 MiB"),
])
def test_no_room_is_told(setup: Setup, available: int | None, words: str) -> None:
    cards = Cards(Card)
    with pytest.raises(DeviceMemoryError, match=words):
        measure(cards.machine(available), About("card", 8.0), setup, 4096, QUIET, QUIET)
    assert cards.all_closed()


# --- a point ----------------------------------------------------------------------------------------------------------


def test_a_point() -> None:
    cards = Cards(Card)
    setup = evolve(ASKED, pool_mib=2, baselines=BASELINES)
    found = point(cards, setup)
    assert (found.context_capacity, found.prompt_tokens, found.pool_mib, found.pool_tries) == (4144, 4096, 2, 0)
    assert found.streaming_active and found.h2d_mib_per_token > 1 and found.h2d_calls_per_token > 6
    assert found.copy_ms == pytest.approx(found.h2d_mib_per_token / 1024 / found.link_gib_s * 1e3)
    assert 3 < found.link_gib_s < 4e9 / 2**30
    assert 3 * 130 * 0.5e-3 < found.compute_ms <= found.token_ms
    assert found.exposed_ms == pytest.approx(found.token_ms - found.compute_ms)
    assert found.decode_tps == pytest.approx(48e3 / found.predicted_ms)
    assert found.page_entry_ms is not None and 0 < found.page_entry_ms < found.predicted_ms
    assert found.host_ms is not None and 0 < found.host_ms < found.token_ms * 1.01
    assert found.vram_after_mib - found.vram_before_mib == pytest.approx(2, abs=0.1)
    assert found.vram_after_mib + found.vram_free_after_mib == pytest.approx(8)
    assert found.all_resident_decode_tps == found.baseline_decode_tps
    assert found.all_resident_decode_tps is not None and found.host_only_decode_tps is not None
    assert found.all_resident_decode_tps > found.decode_tps > found.host_only_decode_tps
    assert found.managed_decode_tps is None and "managed: fake device has no managed memory" in found.notes
    assert "KV alone: no model between the attentions" in found.notes
    assert found.published_decode_tps is None and found.page_entry_reload_ms is None
    assert cards.all_closed()


def test_a_simulated_card_is_measured_as_it_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs, one result: ``measure`` with a device that takes the times of a profile, and ``simulate``. The link
    is slow, so that it shows when something is copied while no clock runs."""
    profile, model = evolve(PROFILES["rtx-5070-ti"], h2d_gib_s=20.0), MODELS[FITTED_TO]
    page_s = profile.c1_ms_per_1k_tokens * 256 / TOKENS / 1e3 / model.layers

    class Stub:
        def __init__(self, device: FakeDevice, geometry: Any, stream: Any, wanted_s: tuple[float, ...]) -> None:
            self.launch = lambda number: device.launch(stream, LAYER, (1,), (1,), (wanted_s[number],))

    def kernel_s(launch: Launch) -> float:
        if launch.kernel == LAYER:
            return float(launch.args[0])
        if not launch.kernel.startswith(("kv_attend", "kv_wide")):
            return 0.0
        k_pages, v_pages = launch.args[1:3]
        return WAVE_S + page_s * (v_pages - k_pages) / 8

    def opened(setup: Setup) -> Device:
        link = profile.h2d_gib_s * 2**30
        speeds = Speeds(in_bytes_per_s=link, out_bytes_per_s=link, copy_s=profile.call_ms / 1e3, launch_s=0.0,
                        call_s=CALL_S, kernel_s=kernel_s)
        return FakeDevice(None, speeds=speeds, memory_bytes=round(profile.usable_mib) * MIB)

    monkeypatch.setattr(kvgpu, "Busy", Stub)
    machine = Machine(opened, lambda device: device.host_s, lambda: None)  # type: ignore[attr-defined]
    setup = Setup(None, model, decode_tokens=48, pool_mib=448, baselines=("host-only",), other_ms=profile.decode_ms(
        model), other_prefill_ms=profile.prefill_step_ms(model, 512, 0)[0])
    measured = measure(machine, About("card", 8.0), setup, 32768, QUIET, QUIET)
    simulated = simulate(evolve(setup, profile=profile), 32768)
    assert measured.h2d_mib_per_token == simulated.h2d_mib_per_token > 300
    for name in ("h2d_calls_per_token", "decode_tps", "host_only_decode_tps", "link_gib_s", "compute_ms"):
        assert getattr(measured, name) == pytest.approx(getattr(simulated, name), rel=0.01), name


def test_what_does_not_fit_is_no_baseline() -> None:
    found = point(Cards(Card), evolve(ASKED, pool_mib=1, baselines=("all-resident",), reserve_mib=6))
    assert found.all_resident_decode_tps is None and "all-resident: takes 3 MiB, 2 are free" in found.notes
    whole = point(Cards(Card), evolve(ASKED, decode_tokens=32, baselines=("all-resident",)))
    assert whole.page_entry_ms is not None, "the page behind the answer is entered for this"
    assert whole.all_resident_decode_tps is not None and not whole.streaming_active
    assert whole.all_resident_decode_tps == pytest.approx(whole.decode_tps, rel=0.02)


def test_a_full_prefill_runs_all_of_the_prompt() -> None:
    rows = []

    class Counting(Card):
        def launch(self, *args: Any, **more: Any) -> None:
            if args[1] == "kv_write":
                rows.append(args[4][4])
            super().launch(*args, **more)

    found = point(Cards(Counting), evolve(ASKED, pool_mib=1, full_prefill=True), prompt=1000)
    assert found.prefill_steps == 16 and sum(rows) == 3 * (1000 + 48)
    assert found.prompt_ms > point(Cards(Counting), evolve(ASKED, pool_mib=1), prompt=1000).prompt_ms * 0.8


def test_a_pool_that_is_too_large_after_all_is_made_smaller() -> None:
    """Of the allocations of a MiB and more those in the place of the weights, for the link and of the search succeed,
    and those of the real run do not, twice."""
    said: list[str] = []
    allocs = 0

    class Late(Card):
        def alloc(self, size: int) -> int:
            nonlocal allocs
            allocs += size >= MIB
            if allocs in (4, 5) and size >= MIB:
                raise DeviceMemoryError("planted")
            return super().alloc(size)

    cards = Cards(lambda: Late(mib=16))
    found = point(cards, prompt=12288, say=said.append)
    assert (found.pool_mib, found.pool_tries) == (5, 3) and cards.all_closed()
    assert said == [f"   12,288 tokens: a pool of {pool} MiB is too large after all (planted); {pool - 2} MiB are tried"
                    for pool in (9, 7)]


def test_it_can_be_kept_busy() -> None:
    """A device whose fold takes 100 ns a page: the token takes as long as was asked for, and copies hide behind it."""
    device = FakeDevice({"kv_fold_64": lambda memory, launch: None}, memory_bytes=MIB)

    def fold_s(launch: Launch) -> float:
        memory: Memory = device.device_memory
        return 5e-6 + 1e-7 * int(memory.ints(int(launch.args[2]), 4)[2])

    device.speeds = Speeds(kernel_s=fold_s)
    stream = device.stream("compute")
    geometry = MODEL.geometry(KVType.Q8_0, KVType.Q4_0, 32)
    busy = Busy(device, geometry, stream, (0.002, 0.0, 0.03))
    for number, wanted in ((0, 0.002), (1, 0.0), (2, 0.03)):
        begun = device.record(stream, timed=True)
        busy.launch(number)
        ended = device.record(stream, timed=True)
        device.synchronize()
        assert device.elapsed_s(begun, ended) == pytest.approx(wanted, rel=0.01, abs=1e-5)
    device.speeds = Speeds(kernel_s=lambda launch: 1e-5)
    with pytest.raises(DeviceError, match="cannot be kept busy"):
        Busy(device, geometry, stream, (0.002,))


# --- sweeps -----------------------------------------------------------------------------------------------------------


def sweep(folder: Path, setup: Setup = ASKED, last: int = 6144) -> Sweep:
    return Sweep(setup, last + setup.decode_tokens, 2048, 2048, folder)


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / TABLE).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def failures_of(folder: Path) -> dict[int, str]:
    records = map(json.loads, (folder / RESULTS).read_text("utf-8").splitlines())
    return {record["prompt_tokens"]: record["why"] for record in records if record["kind"] == "point_failure"}


def test_no_room_in_the_middle_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The longest context does not fit: told, kept in the results, the others are there; later it is tried again."""
    small = Cards(Card, Card, Card, lambda: Card(3), Card)
    assert run_sweep(sweep(tmp_path, last=8192), small.machine()) == 1
    assert [int(row["prompt_tokens"]) for row in rows_of(tmp_path)] == [2048, 4096, 8192]
    assert list(failures_of(tmp_path)) == [6144] and "no pool works" in failures_of(tmp_path)[6144]
    assert "6,144 tokens: not measured: no pool works" in capsys.readouterr().err
    assert small.all_closed()
    again = Cards(Card)
    assert run_sweep(sweep(tmp_path, last=8192), again.machine()) == 0
    assert len(rows_of(tmp_path)) == 4 and len(again.opened) == 2 and not failures_of(tmp_path)


def test_a_device_that_fails(tmp_path: Path) -> None:
    cards = Cards(Card, Card, lambda: Card(launches=400), Card)
    assert run_sweep(sweep(tmp_path), cards.machine()) == 1
    assert [int(row["prompt_tokens"]) for row in rows_of(tmp_path)] == [2048, 6144]
    assert failures_of(tmp_path) == {4096: "launch: an illegal address"} and cards.all_closed()


def test_ctrl_c_keeps_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = Cards(Card, Card, lambda: Card(launches=400, interrupt=True))
    assert run_sweep(sweep(tmp_path), cards.machine()) == 130
    assert [int(row["prompt_tokens"]) for row in rows_of(tmp_path)] == [2048]
    assert cards.all_closed() and "PARTIAL" in capsys.readouterr().out
    again = Cards(Card)
    assert run_sweep(sweep(tmp_path), again.machine()) == 0
    assert len(rows_of(tmp_path)) == 3 and len(again.opened) == 3


class Named(Card):
    def __init__(self) -> None:
        super().__init__()
        self.name = "a GPU"


def test_measured_and_simulated_are_never_mixed(tmp_path: Path) -> None:
    assert run_sweep(sweep(tmp_path, last=2048), Cards(Card).machine()) == 0
    assert {row["source"] for row in rows_of(tmp_path)} == {TRIED} and TRIED != MEASURED
    before = (tmp_path / RESULTS).read_bytes()
    simulated = evolve(ASKED, profile=PROFILES["h200"])
    with pytest.raises(ConfigError, match="source was 'no GPU' and is 'simulated'"):
        run_sweep(sweep(tmp_path, simulated, last=2048))
    with pytest.raises(ConfigError, match="source was 'no GPU' and is 'measured'"):
        run_sweep(sweep(tmp_path, last=2048), Cards(Named).machine())
    with pytest.raises(ConfigError, match="reserve_mib was None and is 0"):
        run_sweep(sweep(tmp_path, evolve(ASKED, reserve_mib=0), last=2048), Cards(Card).machine())
    assert (tmp_path / RESULTS).read_bytes() == before
    other = tmp_path / "simulated"
    assert run_sweep(sweep(other, simulated, last=2048)) == 0
    assert {row["source"] for row in rows_of(other)} == {"simulated"}
    with pytest.raises(ConfigError, match="source was 'simulated' and is 'no GPU'"):
        run_sweep(sweep(other, last=2048), Cards(Card).machine())

"""Steps of ``just gpu`` that pass or fail: the device, its contract, and that streamed is resident, bit for bit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
from attrs import evolve

from kvstream.cuda.device import PyCudaDevice, Stream
from kvstream.cuda.launches import tensor_possible
from kvstream.cuda.layout import HEAD_SIZES, cells_min, plan_layout
from kvstream.cuda.numerics import check_numerics
from kvstream.cuda.types import KVType
from kvstream.errors import DeviceError
from tests.cuda import device_contract, ledger
from tests.cuda import test_streaming as fake
from tests.cuda import test_streaming_pycuda as tests
from tests.cuda import test_streaming_wide as wide
from tests.cuda.gpu.bench import RUNS_MAX, Bench, Direct
from tests.cuda.streaming import Shape, opening_of, play

TYPES = tuple(map(str, KVType))
ORACLE_MAX = 1e-5
POOL_BYTES = 64 << 20


def device(bench: Bench, tell: Any) -> None:
    """What there is, and one known problem."""
    import pycuda
    import pycuda.driver as cuda

    begun = time.perf_counter()
    opened = bench.open()
    open_s = time.perf_counter() - begun
    try:
        free, total = opened.memory()
        told = cuda.Context.get_device()
        attributes = cuda.device_attribute
        tell.part("device", {
            "name": opened.name, "simulated": bench.simulated, "driver": cuda.get_driver_version(),
            "pycuda": pycuda.VERSION_TEXT, "pycuda_cuda": list(cuda.get_version()), "numpy": np.__version__,
            "python": sys.version.split()[0],
            "memory_bytes": total, "memory_free_bytes": free, "image_bytes": len(bench.driver.kernels),
            "open_s": bench.measured(open_s), "pci": told.pci_bus_id(),
            "multiprocessors": told.get_attribute(attributes.MULTIPROCESSOR_COUNT),
            "copy_engines": told.get_attribute(attributes.ASYNC_ENGINE_COUNT),
            "shared_bytes_optin": told.get_attribute(attributes.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)})
        tell.say(f"{opened.name}, driver for CUDA {cuda.get_driver_version()}, {free / 2**30:.1f} of "
                 f"{total / 2**30:.1f} GiB free")
        _known_problem(opened, Shape(1, 2, 6, 64, "q8_0", "q4_0", page_tokens=256), _memory(opened))
    finally:
        opened.close()


def numerics(bench: Bench, tell: Any) -> None:
    """The known problem for every pair of types and head size, tensor cores included. All of them are tried, unless the
    device fails altogether."""
    head_sizes, types = ((64,), TYPES[3:6]) if bench.tiny else (HEAD_SIZES, TYPES)
    checked, wrong = 0, dict[str, str]()
    opened = bench.open()
    try:
        memory = _memory(opened)
        for head_size, k_type, v_type in product(head_sizes, types, types):
            shape = Shape(1, 2, 6, head_size, k_type, v_type, page_tokens=256 if checked % 2 else 32)
            try:
                said = _known_problem(opened, shape, memory)
            except DeviceError as error:
                said = error.message
            checked += 1
            if said is not None:
                wrong[f"{k_type}/{v_type} {head_size}"] = said
                opened.synchronize()  # fails where the device has failed
            tell.part("checked", checked)
            tell.part("wrong", wrong)
    finally:
        opened.close()
    if wrong:
        raise AssertionError(f"{len(wrong)} of {checked}: {next(iter(wrong.values()))}")


def _memory(opened: PyCudaDevice) -> tuple[int, Any, Stream]:
    return opened.alloc(POOL_BYTES), opened.pinned(8 << 20), opened.stream("compute")


def _known_problem(opened: PyCudaDevice, shape: Shape, memory: tuple[int, Any, Stream]) -> str | None:
    """What is wrong with tensor cores, if anything. *Errors*: DeviceError when it is the other kernels."""
    layout = plan_layout(shape.geometry(), POOL_BYTES, 1 << 30, 64, 1, 512)
    return check_numerics(opened, layout, *memory, tensor_possible(layout))


def contract(bench: Bench, tell: Any) -> None:
    """The contract of ``Device``, unchanged."""
    done: list[str] = []
    for scene in device_contract.SCENES:
        opened = bench.open()
        try:
            scene(opened)
        except Exception as error:
            raise AssertionError(f"{scene.__name__}: {type(error).__name__}: {error}") from error
        finally:
            opened.close()
        done.append(scene.__name__)
        tell.part("scenes", done)


def bitwise(bench: Bench, tell: Any) -> None:
    """The tests of streamed equals resident, unchanged, with this process in the place of the simulated driver's pool.
    What is asked is done first; then more, until the time is over."""
    ledger.take()
    runs = 0

    def count() -> None:
        totals = ledger.NOW.totals()
        tell.part("counts", {"runs": runs, **{name: totals[name] for name in (
            "rows", "streamed_rows", "pages", "pairs", "shapes", "pools")}})

    def done(tests: Iterable[tuple[str, int, Callable[[Any], None]]], optional: bool) -> list[str]:
        """Names of those for which there was no time."""
        nonlocal runs
        left_out, slowest_s = [], 0.0
        for name, runs_max, test in tests:
            # A run takes as long as those before it, and there are so many of it.
            if bench.left_s <= (slowest_s * runs_max if optional else 0):
                left_out.append(name)
                continue
            direct, begun = Direct(bench, runs_max), time.monotonic()
            try:
                test(direct)
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
            slowest_s = max(slowest_s, (time.monotonic() - begun) / max(1, direct.runs))
            runs += direct.runs
            count()
        return left_out

    missed = done(_asked(bench), optional=False)
    worst: dict[str, float] = {}
    for shape in _oracle_shapes(bench):
        worst[f"{shape.k_type}/{shape.v_type} {shape.head_size}"] = off = against_float64(bench, shape)
        tell.part("float64", worst)
        if not off < ORACLE_MAX:
            raise AssertionError(f"{shape} is {off:.3g} off float64's result")
    if missed:
        raise TimeoutError(f"there was no time for {', '.join(missed)}")
    tell.part("not_reached", done(_more(bench), optional=True))


def _asked(bench: Bench) -> Iterator[tuple[str, int, Callable[[Any], None]]]:
    """Name, runs of each scene at most, test."""
    if bench.tiny:
        yield _named(tests.test_four_sequences_in_one_pool_are_each_as_alone, runs_max=1)
        shapes = [evolve(tests.SMALL, k_type=k_type, v_type=v_type) for k_type, v_type in tests.MIXED]
        yield _named(tests.same_streamed_and_resident, shapes)
        yield _named(wide.test_the_real_kernels, wide.SHAPES[:1])
        return
    yield _named(tests.test_four_sequences_in_one_pool_are_each_as_alone)
    yield _named(tests.test_the_life_of_sequences)
    yield _named(tests.test_repartition_under_load)
    yield _named(tests.test_the_page_of_the_product)
    yield _named(wide.test_the_real_kernels, wide.SHAPES)
    yield _named(tests.test_the_fake_device_computes_the_same_up_to_rounding)
    for script in (fake.BY_TOKEN, fake.BY_SEVEN):
        yield _named(tests.test_the_width_of_a_step_changes_nothing, script)
    for head_size in HEAD_SIZES:
        yield _named(tests.test_all_shapes, head_size)
    for k_type in TYPES:
        yield _named(tests.test_all_pairs_of_types, k_type)


def _more(bench: Bench) -> Iterator[tuple[str, int, Callable[[Any], None]]]:
    if bench.tiny:
        return
    yield _named(tests.test_every_size_of_pool)
    yield _named(tests.test_two_hundred_orders, runs_max=200)
    for head_size in (80, 96, 128, 256):
        for k_type in TYPES:
            shapes = [evolve(tests.SMALL, head_size=head_size, kv_heads=2, q_heads=6, k_type=k_type, v_type=v_type)
                      for v_type in TYPES]
            yield (f"all pairs with {k_type} at head size {head_size}", RUNS_MAX,
                   lambda direct, shapes=shapes: tests.same_streamed_and_resident(direct, shapes))


def _named(test: Callable[..., None], *args: Any, runs_max: int = RUNS_MAX) -> tuple[str, int, Callable[[Any], None]]:
    which = f" {args[0]}" if args and isinstance(args[0], (str, int)) else ""
    return f"{test.__name__}{which}", runs_max, lambda direct: test(direct, *args)


def _oracle_shapes(bench: Bench) -> list[Shape]:
    """Each type once as K and once as V, then each head size."""
    shapes = [evolve(tests.SMALL, k_type=kind, v_type=TYPES[(number + 4) % 9]) for number, kind in enumerate(TYPES)]
    shapes += [Shape(2, 2, 6, head_size, "q8_0", "q4_0") for head_size in HEAD_SIZES]
    return shapes[3:4] if bench.tiny else shapes


def against_float64(bench: Bench, shape: Shape) -> float:
    """The largest difference of a streamed run from attention in float64."""
    worst = 0.0

    def oracle(out: Any, expected: Any) -> None:
        nonlocal worst
        off = float(np.abs(out - expected).max())
        worst = max(worst, off if off == off else float("inf"))

    geometry = shape.geometry()
    played = play(bench.open(), geometry, opening_of(geometry, cells_min(geometry, 64, 1), sequences_max=1),
                  tests.SHORT, oracle=oracle)
    assert played.stats.counters["in_pages"] > 0
    return worst

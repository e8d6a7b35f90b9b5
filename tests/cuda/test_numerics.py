"""The known problem at opening: passes where the kernels are right, however small the opening, and refuses others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda.cache import KVCache
from kvstream.cuda.device import Device, PyCudaDevice
from kvstream.cuda.fake_device import FakeDevice, Launch, Memory
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.layout import HEAD_SIZES, Geometry, cells_min, plan_layout
from kvstream.cuda.numerics import check_numerics
from kvstream.cuda.records import Opening
from kvstream.cuda.types import KVType
from kvstream.errors import DeviceError
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Shape

SHAPE = Shape(layers=1, kv_heads=2, q_heads=6)


def opened(device: Device, geometry: Geometry, table_slots: int = 64, rows_max: int = 8, tokens: int = 64) -> KVCache:
    """With the fewest cells, and one page in the host where ``tokens`` is one page."""
    layout = plan_layout(geometry, 1 << 40, 1 << 40, rows_max, 1, tokens, table_slots)
    least = evolve(layout, cells=cells_min(geometry, rows_max, 1), host_pages=geometry.pages(tokens))
    cache = KVCache(device, geometry, Opening(least.pool_bytes, least.host_bytes, rows_max, 1, tokens, arrays=False,
                                              table_slots=table_slots))
    assert cache.layout == least
    return cache


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_right_kernels_pass(head_size: int) -> None:
    for number, kind in enumerate(KVType):
        shape = evolve(SHAPE, head_size=head_size, k_type=str(kind), v_type=str(tuple(KVType)[(number + 4) % 9]))
        device = FakeDevice(KERNELS, seed=number)
        cache = opened(device, shape.geometry(), rows_max=(1, 8, 64)[number % 3])
        assert not cache._executor.slab.any()  # as fresh as if nothing had been there
        assert cache.stats().counters["launches"] == 0
        cache.close()


@pytest.mark.parametrize(("table_slots", "rows_max", "tokens"), [(1, 1, 1), (1, 8, 32), (2, 1, 32), (3, 8, 32),
                                                                 (4, 2, 33)])
@pytest.mark.parametrize("q_heads", [1, 16])
def test_the_smallest_openings_have_room(table_slots: int, rows_max: int, tokens: int, q_heads: int) -> None:
    geometry = evolve(SHAPE, kv_heads=1, q_heads=q_heads, k_type="iq4_nl", v_type="q4_0").geometry()
    device = FakeDevice(KERNELS, seed=tokens)
    cache = opened(device, geometry, table_slots, rows_max, tokens)
    allocations = len(device.device_memory._starts), len(device._arrays)
    assert allocations == (1, 1)  # the pool and the slab, nothing beside them
    cache.close()


def wrong_write(memory: Memory, launch: Launch) -> None:
    """The last row of V of each launch (there are five) is one bit off."""
    KERNELS["kv_write"](memory, launch)
    rows = int(launch.args[4])
    memory.view(int(memory.addresses(int(launch.args[3]), rows)[-1]), 1)[0] ^= 1


def changed(kernel: str, **places: Any) -> Callable[[Memory, Launch], None]:
    """That kernel with other arguments. ``a9``: the tenth, counted from 0, as the old one or a function of it."""
    def run(memory: Memory, launch: Launch) -> None:
        args = list(launch.args)
        for name, value in places.items():
            args[int(name[1:])] = value(args[int(name[1:])])
        KERNELS[kernel](memory, evolve(launch, args=tuple(args)))
    return run


def forgets_the_state(memory: Memory, launch: Launch) -> None:
    """Every wave of the running form begins anew."""
    if launch.args[5]:
        for tile in range(launch.grid[0]):
            memory.ints(int(launch.args[5]) + 32 * tile, 8)[5] |= 1
    KERNELS["kv_attend_64"](memory, launch)


def nudges_one_form(memory: Memory, launch: Launch) -> None:
    """Less than the tolerance, and not in the other form."""
    KERNELS["kv_fold_64"](memory, launch)
    out = memory.floats(int(launch.args[3]), 6 * 64)
    out[0] = np.nextafter(out[0], np.float32(9))


def folds_one_page(memory: Memory, launch: Launch) -> None:
    memory.ints(int(launch.args[2]), 4 * launch.grid[1]).reshape(-1, 4)[:, 2] = 1
    KERNELS["kv_fold_64"](memory, launch)


def wrong_tables(memory: Memory, launch: Launch) -> None:
    """The first two words, addresses of K and of V, change places."""
    KERNELS["kv_tables"](memory, launch)
    table = memory.view(int(launch.args[1]), 32).reshape(2, 16)
    table[:] = table[::-1].copy()


def nothing(memory: Memory, launch: Launch) -> None:
    """An image that runs and does nothing."""


PLANTED = {
    "a wrong bit": ("kv_write", wrong_write, "kv_write stores 5 of 37 rows of V as other bytes than q4_0"),
    "no rows": ("kv_write", nothing, "37 of 37 rows of K .* 37 of 37 rows of V"),
    "no scale": ("kv_attend_64", changed("kv_attend_64", a9=lambda scale: 1.0), "table and its fold is off by .* runn"),
    "a window": ("kv_attend_64", changed("kv_attend_64", a15=lambda window: 36), "attention by the table"),
    "no attention": ("kv_attend_64", nothing, "attention by the table and its fold is off"),
    "another V type": ("kv_attend_64", changed("kv_attend_64", a14=lambda code: 8), "V q4_0, head size 64"),
    "no state": ("kv_attend_64", forgets_the_state, "attention by the running form"),
    "no tables": ("kv_tables", wrong_tables, "attention by the table"),
    "no fold": ("kv_fold_64", nothing, "the table and its fold is off by nan"),
    "one page": ("kv_fold_64", folds_one_page, "the table and its fold is off"),
    "other bits": ("kv_fold_64", nudges_one_form, "do not give the same bits"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_wrong_kernels_are_refused(name: str) -> None:
    kernel, wrong, said = PLANTED[name]
    device = FakeDevice({**KERNELS, kernel: wrong})
    with pytest.raises(DeviceError, match=said) as refused:
        opened(device, SHAPE.geometry())
    assert refused.match("^fake device does not compute") and refused.match("just kernels")


def test_without_tensor_cores_that_are_right_there_is_another_way(caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and steps that are wide get the bits of narrow ones. Other caches do not ask."""
    geometry = SHAPE.geometry()
    for wrong in (nothing, changed("kv_wide_64", a11=lambda group: 1), changed("kv_wide_64", a15=lambda window: 36)):
        caplog.clear()
        cache = opened(FakeDevice({**KERNELS, "kv_wide_64": wrong}), geometry, rows_max=64)
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == 1 and "attention by tensor cores is off by" in warned[0]
        assert not cache._executor.tensor
        cache.close()
    caplog.clear()
    for rows_max, used in ((64, True), (32, False)):
        cache = opened(FakeDevice(KERNELS), geometry, rows_max=rows_max)
        assert cache._executor.tensor == used and not caplog.records
        cache.close()


def one_form_only(memory: Memory, launch: Launch) -> None:
    if launch.args[5]:
        KERNELS["kv_attend_64"](memory, launch)


@pytest.mark.parametrize(("kernel", "wrong"), [
    ("kv_write", nothing), ("kv_attend_64", nothing), ("kv_fold_64", nothing), ("kv_attend_64", one_form_only)])
def test_an_answer_that_lies_there_already_is_not_taken(kernel: str, wrong: Any) -> None:
    """Device memory may hold what the process before has computed in the same place."""
    device = FakeDevice(KERNELS)
    layout = plan_layout(SHAPE.geometry(), 1 << 22, 1 << 22, 8, 1, 64)
    pool, slab, stream = device.alloc(layout.pool_bytes), device.pinned(layout.host_bytes), device.stream("compute")
    check_numerics(device, layout, pool, slab, stream)
    device._kernels = {**KERNELS, kernel: wrong}
    with pytest.raises(DeviceError, match="does not compute"):
        check_numerics(device, layout, pool, slab, stream)


def test_a_kernel_that_faults_is_an_error_of_the_image() -> None:
    device = FakeDevice({**KERNELS, "kv_write": changed("kv_write", a2=lambda address: address + (1 << 40))})
    with pytest.raises(DeviceError, match=r"fake device fails at a problem of 37 tokens: .*just kernels"):
        opened(device, SHAPE.geometry())


def test_what_stores_nothing_is_not_asked() -> None:
    device = FakeDevice(None)
    opened(device, SHAPE.geometry()).close()
    assert device.host_s < 1e-3


def of_another_head_size(sim: Any, kernel: str, other: str) -> str:
    """A scene: a kernel in the place of another, as an image with its names mixed up would have it."""
    device = PyCudaDevice(sim.kernels)
    try:
        device._functions[kernel] = device._functions[other]
        KVCache(device, SHAPE.geometry(), Opening(1 << 22, 1 << 22, 8, 1, 64))
    except DeviceError as error:
        sim.take_reports()  # it may have read and written beside the tables
        return error.message
    finally:
        device.close()
    return ""


def test_a_wrong_image_is_refused_under_pycuda(simulated: Simulated) -> None:
    said = simulated.call(of_another_head_size, "kv_fold_64", "kv_fold_80", kernels="kv")
    assert "KVStream simulated device (sm_" in said and "the table and its fold is off" in said
    assert simulated.call(of_another_head_size, "kv_fold_64", "kv_fold_64", kernels="kv", checked=True) == ""

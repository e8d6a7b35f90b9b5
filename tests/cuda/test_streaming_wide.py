"""Wide steps on tensor cores: streamed equals resident, in any company; all else keeps its bits.

What the bits of a wide step may depend on is the sequence's own rows in the step: not the pool, not the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from kvstream.cuda import executor
from kvstream.cuda.cache import KVCache
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from kvstream.cuda.kernels import WIDE_ROWS_MIN
from kvstream.cuda.tables import Loads
from kvstream.errors import StepError
from tests.cuda.driver.pool import Simulated
from tests.cuda.streaming import Played, Script, Shape, opening_of, same
from tests.cuda.test_streaming import SMALL, alone, feed, fewest, on_fake
from tests.cuda.test_streaming_pycuda import on_pycuda

# Wide and narrow sequences in one step, wide steps over a context that was there before, decode and verify in between.
SCRIPT: Script = (feed(a=40, b=3), feed(b=50, a=7), feed(c=33, a=20, b=1), feed(a=1, b=1, c=1), feed(a=7, b=1, c=7),
                  feed(a=34, c=29), feed(a=1, b=32, c=1), ("cut", "a", 90), feed(a=64))
WIDE = {"a": {*range(40), *range(75, 154)}, "b": {*range(3, 53)}, "c": {*range(33)}}  # positions last written widely
LAYERS = SMALL.layers


def is_wide(key: tuple[str, int, int]) -> bool:
    return key[1] in WIDE[key[0]]


def only_wide_rows_differ(tensor: Played, exact: Played) -> None:
    assert tensor.outputs.keys() == exact.outputs.keys()
    differ = {key for key, value in tensor.outputs.items() if value != exact.outputs[key]}
    assert all(map(is_wide, differ))
    assert len(differ) > 0.9 * sum(map(is_wide, exact.outputs))
    pairs = [(np.frombuffer(tensor.outputs[key], np.float32), np.frombuffer(exact.outputs[key], np.float32))
             for key in differ]
    assert max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs) < 5e-3
    # Waves of wide steps have one launch more where a step has narrow rows too.
    assert exact.stats.counters["launches_wide"] == 0 < tensor.stats.counters["launches_wide"]


def test_any_pool_gives_the_same_bits() -> None:
    resident = on_fake(SMALL, None, SCRIPT, wide="tensor")
    only_wide_rows_differ(resident, on_fake(SMALL, None, SCRIPT))
    for more, seed in ((0, None), (0, 1), (1, 2), (5, 3)):
        played = on_fake(SMALL, fewest(SMALL, 4) + more, SCRIPT, seed, wide="tensor")
        same(SMALL, played, resident, True)
        assert played.stats.counters["launches_wide"] > resident.stats.counters["launches_wide"]


@pytest.mark.parametrize("name", "abc")
def test_company_does_not_show(name: str) -> None:
    script = tuple(line for line in alone(SCRIPT[:7], name))
    expected = on_fake(SMALL, None, script, wide="tensor", sequences_max=1).outputs
    found = on_fake(SMALL, fewest(SMALL, 4), SCRIPT[:7], 3, wide="tensor").outputs
    assert expected == {key: value for key, value in found.items() if key[0] == name}


def test_when_it_is_used() -> None:
    for rows, wide, shape, used in (
            (WIDE_ROWS_MIN, "tensor", SMALL, True), (WIDE_ROWS_MIN - 1, "tensor", SMALL, False),
            (WIDE_ROWS_MIN, "exact", SMALL, False), (WIDE_ROWS_MIN, "tensor", evolve(SMALL, k_type="f32"), False),
            (WIDE_ROWS_MIN, "tensor", evolve(SMALL, v_type="f32"), False),
            (WIDE_ROWS_MIN, "tensor", evolve(SMALL, k_type="bf16", v_type="bf16"), True)):
        played = on_fake(shape, None, (feed(a=rows), feed(a=1), feed(a=8)), wide=wide)
        assert played.stats.counters["launches_wide"] == (LAYERS if used else 0), (rows, wide, shape)


def test_a_wide_step_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its tables only the differences are sent; both kernels read them."""
    shape = evolve(SMALL, page_tokens=256)
    script: Script = (*[feed(a=34, b=3)] * 6, *[feed(b=33)] * 5)
    repeated = []
    again = Loads.again
    monkeypatch.setattr(Loads, "again", lambda self, *args: (repeated.append(args), again(self, *args))[1])
    found = on_fake(shape, fewest(shape, 2), script, 1, wide="tensor", sequences_max=2)
    assert len(repeated) >= 6
    monkeypatch.setattr(executor.Steady, "of", lambda *args: None)
    told = on_fake(shape, fewest(shape, 2), script, 1, wide="tensor", sequences_max=2)
    assert found.outputs == told.outputs and found.stats.counters["launches_wide"] > 0


def test_addresses_are_aligned() -> None:
    geometry = SMALL.geometry()
    cache = KVCache(FakeDevice(KERNELS), geometry, opening_of(geometry, None, wide="tensor"))
    at = cache.device.alloc(1 << 20)
    cache.begin_step([(cache.create(), 40)])
    cache.append(0, at, at)
    for q, out in ((at + 4, at), (at, at + 8)):
        with pytest.raises(StepError, match="multiples of 16"):
            cache.attend(0, q, out)
    cache.close()


def test_the_launches_of_one_wave_in_two_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    script: Script = tuple(feed(a=33, b=20) for _ in range(3))
    resident = on_fake(SMALL, None, script, wide="tensor", sequences_max=2)

    class Narrow(Loads):
        def __init__(self, device: Any, stream: Any, region: int, stagings: Any, on_load: Any) -> None:
            super().__init__(device, stream, region, tuple(staging[:1024] for staging in stagings), on_load)

    monkeypatch.setattr(executor, "Loads", Narrow)
    played = on_fake(SMALL, fewest(SMALL, 2), script, 1, wide="tensor", sequences_max=2)
    same(SMALL, played, resident, True)
    assert played.stats.counters["table_calls"] > played.stats.counters["steps"] + 8


# --- the real kernels -------------------------------------------------------------------------------------------------

SHAPES = (SMALL, evolve(SMALL, head_size=128, kv_heads=2, q_heads=10, k_type="q8_0", v_type="q8_0"),
          evolve(SMALL, head_size=256, k_type="f16", v_type="f16"),
          evolve(SMALL, head_size=80, kv_heads=2, q_heads=2, k_type="bf16", v_type="iq4_nl"))


@pytest.mark.parametrize("shapes", [SHAPES[:1], SHAPES[1:]], ids=["small", "others"])
def test_the_real_kernels(simulated: Simulated, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        runs = [{"cells": None, "wide": "tensor"}, {"cells": None, "wide": "exact"},
                *({"cells": fewest(shape, 4) + more, "wide": "tensor", "policy": policy, "seed": more}
                  for more, policy in enumerate(("uniform", "newest", "priorities")))]
        resident, exact, *streamed = simulated.each(on_pycuda, runs, shape=shape, script=SCRIPT, kernels="kv",
                                                    timeout_s=300)
        only_wide_rows_differ(resident, exact)
        for played in streamed:
            same(shape, played, resident, True)


def test_no_access_is_out_of_order(simulated: Simulated) -> None:
    resident = simulated.call(on_pycuda, SMALL, None, SCRIPT, kernels="kv", wide="tensor")
    for played in simulated.seeds(on_pycuda, 3, shape=SMALL, cells=fewest(SMALL, 4), script=SCRIPT, kernels="kv",
                                  checked=True, wide="tensor"):
        same(SMALL, played, resident, True)

"""One contract for both devices: see ``device_contract``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvstream.cuda import device as device_module
from kvstream.cuda.device import Device, PyCudaDevice
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from tests.cuda.device_contract import SCENES
from tests.cuda.driver.pool import Simulated

SEEDS = (None, *range(12))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_fake_device(scene: Callable[[Device], None]) -> None:
    for seed in SEEDS:
        device = FakeDevice(KERNELS, seed=seed)
        try:
            scene(device)
        finally:
            device.close()


def play(sim: Any, index: int) -> None:
    device = PyCudaDevice(sim.kernels)
    try:
        SCENES[index](device)
    finally:
        device.close()


@pytest.mark.parametrize("index", range(len(SCENES)), ids=lambda index: SCENES[index].__name__)
def test_pycuda_device(simulated: Simulated, index: int) -> None:
    simulated.seeds(play, 12, kernels="kv", index=index)


def pin_more_than_may_be_locked(sim: Any) -> list[str]:
    """What is said when 600 bytes are pinned three times, and 1,000 may be locked."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvstream.cuda").addHandler(handler)
    device_module.limit_bytes = lambda: 1000
    device = PyCudaDevice(sim.kernels)
    try:
        for _ in range(3):
            device.pinned(600)
    finally:
        device.close()
    return said


def test_less_may_be_locked_than_is_pinned(simulated: Simulated) -> None:
    said = simulated.call(pin_more_than_may_be_locked, kernels="kv")
    assert len(said) == 1 and said[0].startswith("1200 bytes of host memory are to be pinned")

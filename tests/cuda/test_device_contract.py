"""One contract for both devices: see ``device_contract``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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

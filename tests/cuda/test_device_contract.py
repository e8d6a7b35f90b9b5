"""One contract for both devices: see ``device_contract``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstream.cuda.device import Device
from kvstream.cuda.fake_device import FakeDevice
from kvstream.cuda.fake_kernels import KERNELS
from tests.cuda.device_contract import SCENES

SEEDS = (None, *range(12))


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_fake_device(scene: Callable[[Device], None]) -> None:
    for seed in SEEDS:
        device = FakeDevice(KERNELS, seed=seed)
        try:
            scene(device)
        finally:
            device.close()

"""What the steps of ``just gpu`` work with: PyCUDA's driver, and stand-ins for what the simulated one gives tests.

The scenes and tests of the streamer are called as they are. What they ask of the simulated driver (an image, a count of
calls, many runs under seeds) is answered here for a real one: the image is the packaged one, calls to PyCUDA are
counted, and a seed is simply another run, because real streams have an order of their own each time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstream.cuda.device import PyCudaDevice

CALLS = {"memcpy_htod_async": "cuMemcpyHtoDAsync", "memcpy_dtoh_async": "cuMemcpyDtoHAsync"}
WAIT = "cuStreamWaitEvent"
STAND_IN = "KVStream simulated device"
RUNS_MAX = 6
"""Instead of dozens of seeds."""


class RealDriver:
    """In the place of ``Sim``, for scenes. Calls are counted where PyCUDA is called. ``simulated``: the driver that was
    found is the simulated one all the same."""

    checked = False

    def __init__(self, image: bytes) -> None:
        self.kernels = image
        self._counts: Counter[str] = Counter()
        import pycuda.driver as cuda

        cuda.init()
        self.simulated = cuda.Device(0).name().startswith(STAND_IN)
        for name, call in CALLS.items():
            setattr(cuda, name, self._counted(getattr(cuda, name), call))
        cuda.Stream.wait_for_event = self._counted(cuda.Stream.wait_for_event, WAIT)

    def _counted(self, function: Callable[..., Any], call: str) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            self._counts[f"call:{call}"] += 1
            return function(*args)
        return counting

    def get(self, key: str) -> int:
        """*Errors*: KeyError for what only the simulated driver knows."""
        if key == "pageable_copies":  # nobody can see them here; ``PyCudaDevice`` refuses to make one
            return 0
        if key not in (f"call:{call}" for call in (*CALLS.values(), WAIT)):
            raise KeyError(key)
        return self._counts[key]

    def clear_counters(self) -> None:
        self._counts.clear()

    def reports(self) -> list[str]:
        """A real driver sees nothing that its program does not."""
        return []


class Bench:
    """``driver``: a ``RealDriver`` or the control of the simulated one. ``until``: by then a step should be done."""

    def __init__(self, driver: Any, size: str, until: float, earlier: Mapping[str, Any], simulated: bool) -> None:
        self.driver, self.size, self.until, self.earlier, self.simulated = driver, size, until, earlier, simulated

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def open(self) -> PyCudaDevice:
        return PyCudaDevice(self.driver.kernels)

    def measured(self, value: float) -> float | None:
        """A time, or what follows from one. Nothing on the simulated driver, whose times mean nothing."""
        return None if self.simulated else value


class Direct:
    """In the place of ``Simulated``, for tests: scenes are called here and now, on the device of this process. How many
    runs there were is counted; what was compared, the tests' ledger knows."""

    def __init__(self, bench: Bench, runs_max: int = RUNS_MAX) -> None:
        self._bench, self._runs_max = bench, runs_max
        self.runs = 0

    def call(self, scene: Callable[..., Any], *args: Any, seed: int = 0, policy: str = "uniform",
             kernels: str | None = None, checked: bool = False, timeout_s: float = 0, **kwargs: Any) -> Any:
        if not isinstance(self._bench.driver, RealDriver):
            self._bench.driver.reset(seed, policy)
        result = scene(self._bench.driver, *args, **kwargs)
        self.runs += 1
        return result

    def each(self, scene: Callable[..., Any], runs: Iterable[dict[str, Any]], **shared: Any) -> list[Any]:
        return [self.call(scene, **run, **shared) for run in runs]

    def seeds(self, scene: Callable[..., Any], number: int, policies: Iterable[str] | None = None,
              checked: bool = False, **shared: Any) -> list[Any]:
        """There is no checked build for a real device: its runs count as more of the plain ones."""
        return [self.call(scene, seed=seed, **shared) for seed in range(min(number, self._runs_max))]

"""The kernels under real PyCUDA, for a child process with the simulated driver or for a machine with a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstream.cuda import kernels
from tests.cuda.cases import Case, Desk, geometry_of
from tests.cuda.driver.control import Sim
from tests.cuda.driver.scenes import context

LENGTHS = ((90, 3), (32, 1))


def case_of(k_type: str, v_type: str, head_size: int, seed: int) -> Case:
    return Case.random(geometry_of(k_type, v_type, head_size, kv_heads=2, group=3), LENGTHS, seed=seed)


def attend(sim: Sim, k_type: str, v_type: str, head_size: int, seed: int) -> list[bytes]:
    """The case of that seed in both forms, all pages at once and in waves."""
    case = case_of(k_type, v_type, head_size, seed)
    with context() as cuda:
        machine = PyCudaMachine(cuda, sim.kernels)
        desk = Desk(machine, case, seed)
        outs = [desk.table(case.all_at_once()), desk.running(case.in_waves(seed))]
        machine.close()
    return [out.tobytes() for out in outs]


class Handle:
    def __init__(self, memory: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self.memory, self.shape, self.dtype = memory, shape, np.dtype(dtype)


class PyCudaMachine:
    """A ``Machine`` (cases.py) on PyCUDA: everything in order on one stream."""

    def __init__(self, cuda: Any, image: bytes) -> None:
        self.cuda = cuda
        module = cuda.module_from_buffer(image)
        self.functions = {}
        for name, letters in kernels.kernel_formats().items():
            self.functions[name] = module.get_function(name)
            self.functions[name].prepare(letters)
        self.stream = cuda.Stream(1)
        self.held: list[Handle] = []

    def array(self, values: NDArray[Any]) -> Handle:
        handle = self.empty(*values.shape, dtype=values.dtype.type)
        self.cuda.memcpy_htod(handle.memory, np.ascontiguousarray(values))
        return handle

    def empty(self, *shape: int, dtype: type = np.float32) -> Handle:
        handle = Handle(self.cuda.mem_alloc(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)), shape, dtype)
        self.held.append(handle)
        return handle

    def address(self, array: Handle) -> int:
        return int(array.memory)

    def read(self, array: Handle) -> NDArray[Any]:
        out = np.empty(array.shape, array.dtype)
        self.cuda.memcpy_dtoh(out, array.memory)
        return out

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: Any) -> None:
        values = [int(arg.memory) if isinstance(arg, Handle) else arg for arg in args]
        self.functions[kernel].prepared_async_call(grid, (block, 1, 1), self.stream, *values, shared_size=shared_bytes)
        self.stream.synchronize()

    def close(self) -> None:
        self.held.clear()
        self.functions.clear()

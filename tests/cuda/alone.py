"""Kernels run by themselves, without a driver: compile them for the host, give them arrays, launch, look.

The arrays live in one piece of memory that stands for the device's; ``Alone.array`` copies into it, ``Alone.empty``
leaves it poisoned, and in the checked build a read of what no kernel has written is an error. A launch runs at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstream.cuda import kernels
from tests.cuda.driver.build import processor_flags

HERE = Path(__file__).resolve().parent / "driver"
KERNELS = Path(kernels.__file__).resolve().parent

FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-ffp-contract=off",
         "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unknown-pragmas", f"-I{HERE}", f"-I{KERNELS}",
         "-DKVS_SIM=1")
CHECKED_FLAGS = ("-DKVS_SIM_CHECKED=1", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")


class LaunchError(Exception):
    """A launch that was abandoned in the middle, and why."""


def _compile(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:4000]}")


def _object(folder: Path, source: Path, flags: Sequence[str], inputs: Sequence[Path]) -> Path:
    """Compiled once for the same flags and inputs."""
    digest = hashlib.sha256(repr(flags).encode())
    for file in (source, *inputs):
        digest.update(file.read_bytes())
    target = folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = f"{target}.{os.getpid()}"
        _compile(["g++", *flags, "-c", str(source), "-o", unfinished])
        Path(unfinished).replace(target)
    return target


def build(folder: Path, sources: Sequence[Path], checked: bool) -> Path:
    """A kernel module from ``.cu`` files; the ``.cuh`` files beside them come before the package's own."""
    headers = [HERE / "sim.h", HERE / "fibers.h"]
    flags = (*FLAGS, *processor_flags())
    kernel = (*flags, *(CHECKED_FLAGS if checked else ()), "-include", str(HERE / "kernel_host.h"), "-x", "c++")
    around = [HERE / "kernel_host.h", *headers, *sorted(KERNELS.glob("*.cuh"))]
    objects = [_object(folder, source, kernel, [*sorted(source.parent.glob("*.cuh")), *around]) for source in sources]
    runtime = ("fibers.cpp", "hooks.cpp") if checked else ("fibers.cpp",)
    objects += [_object(folder, HERE / name, flags, headers) for name in runtime]
    module = folder / f"{'-'.join(part.stem for part in objects)}.so"
    if not module.exists():
        unfinished = f"{module}.{os.getpid()}"
        _compile(["g++", "-shared", "-Wl,-Bsymbolic", *map(str, objects), "-o", unfinished])
        Path(unfinished).replace(module)
    return module


def build_alone(folder: Path) -> Path:
    source = HERE / "alone.cpp"
    digest = hashlib.sha256(source.read_bytes() + (HERE / "sim.h").read_bytes()).hexdigest()[:16]
    library = folder / f"alone-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = f"{library}.{os.getpid()}"
        _compile(["g++", *FLAGS, "-shared", str(source), "-o", unfinished])
        Path(unfinished).replace(library)
    return library


def cache_of(config: pytest.Config) -> Path:
    """Where compiled things are kept: as the simulated driver's (conftest.py)."""
    named = os.environ.get("KVSTREAM_CUDA_CACHE")
    if named:
        return Path(named) / "alone"
    if config.pluginmanager.hasplugin("cacheprovider"):
        return config.cache.mkdir("kernels")
    return Path(tempfile.gettempdir()) / f"kvstream-kernels-{os.getuid()}"


def open_machine(config: pytest.Config, checked: bool, sources: Sequence[Path] = (KERNELS / "kv.cu",)) -> Alone:
    """Compiled if need be. Skipped where there is no compiler, except in CI, where that is a failure."""
    if shutil.which("g++") is None and not os.environ.get("CI"):
        pytest.skip("no g++ to compile the kernels with")
    folder = cache_of(config)
    return Alone(build_alone(folder), build(folder, sources, checked))


class Alone:
    """One kernel module, on memory that all modules of a process share: opening another one clears it."""

    def __init__(self, library: Path, module: Path, seed: int = 1) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("alone_open", "alone_alloc", "alone_load"):
            getattr(self._library, name).restype = ctypes.c_void_p
        for name in ("alone_error", "alone_reports"):
            getattr(self._library, name).restype = ctypes.c_char_p
        assert self._library.alone_open()
        self._module = ctypes.c_void_p(self._library.alone_load(str(module).encode()))
        assert self._module, self._library.alone_error()
        self.seed = seed
        self.launches = 0

    def clear(self) -> None:
        """Forget all arrays and reports. Arrays that were given out must not be touched any more."""
        self._library.alone_clear()

    def _space(self, shape: tuple[int, ...], dtype: np.dtype, written: bool) -> NDArray:
        size = max(1, int(np.prod(shape)) * dtype.itemsize)
        address = self._library.alone_alloc(ctypes.c_uint64(size), ctypes.c_int(written))
        assert address, "out of simulated memory"
        raw = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(raw, np.uint8)[: int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)

    def array(self, values: NDArray) -> NDArray:
        values = np.ascontiguousarray(values)
        space = self._space(values.shape, values.dtype, True)
        space[...] = values
        return space

    def empty(self, *shape: int, dtype: type = np.float32) -> NDArray:
        return self._space(shape, np.dtype(dtype), False)

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, shared_bytes: int, *args: object,
               formats: str | None = None) -> None:
        letters = kernels.kernel_formats()[kernel] if formats is None else formats
        values = [address_of(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        packed = struct.pack(f"@{letters.replace('P', 'Q')}", *values)
        buffer = ctypes.create_string_buffer(packed, len(packed))
        self.launches += 1
        failed = self._library.alone_launch(
            self._module, kernel.encode(), (ctypes.c_uint32 * 3)(*grid), (ctypes.c_uint32 * 3)(block, 1, 1),
            ctypes.c_uint32(shared_bytes), buffer, ctypes.c_uint32(len(packed)),
            ctypes.c_uint64(self.seed * 1_000_003 + self.launches))
        if failed:
            raise LaunchError(f"{kernel}: {self._library.alone_error().decode()}")

    def address(self, array: NDArray) -> int:
        return address_of(array)

    def read(self, array: NDArray) -> NDArray:
        return np.array(array)

    def reports(self) -> list[str]:
        return self._library.alone_reports().decode().splitlines()


def address_of(array: NDArray) -> int:
    return array.__array_interface__["data"][0]

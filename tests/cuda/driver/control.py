"""The simulated driver as a test sees it: seed, schedule, settings, reports. Needs nothing but ctypes.

Only a child process (``worker``) loads the driver; ``Sim`` is what a scene gets as its first argument there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

POLICIES = ("uniform", "starve", "priorities", "newest", "oldest", "eager")


def schedules(number: int, policies: Iterable[str] = POLICIES) -> Iterator[tuple[int, str]]:
    """``number`` pairs of seed and policy, the policies in turn."""
    turns = tuple(policies)
    for seed in range(number):
        yield seed, turns[seed % len(turns)]


class Reported(AssertionError):
    """A scene ended with reports of the driver that it did not expect."""


class Sim:
    """Control of the simulated driver that this process has loaded.

    ``kernels`` are the bytes of the module image the test asked for (None: it asked for none). ``seed`` and ``policy``
    are those of this run.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.kernels: bytes | None = None
        self.checked = False  # the kernels report each access
        self.seed, self.policy = 0, "uniform"
        for name in ("sim_get", "sim_text"):
            getattr(library, name).restype = ctypes.c_int64

    def reset(self, seed: int, policy: str) -> int:
        """Everything as on the first day, settings too. Returns how many contexts somebody had left behind."""
        self.seed, self.policy = seed, policy
        for key, value in self.defaults.items():
            self.set(key, value)
        return int(self._library.sim_reset(ctypes.c_uint64(seed), POLICIES.index(policy)))

    def remember_defaults(self) -> None:
        names = ("checker", "uninitialised", "trace", "device_bytes", "host_bytes", "host_call_ns", "copy_ns",
                 "copy_bytes_per_us", "kernel_ns", "fail_alloc_after", "fail_host_alloc_after", "fail_launch_after",
                 "fail_copy_after", "compute_capability")
        self.defaults = {name: self.get(name) for name in names}

    def schedule(self, seed: int, policy: str) -> None:
        """Another seed or policy from here on; nothing that is pending is lost."""
        self.seed, self.policy = seed, policy
        self._library.sim_schedule(ctypes.c_uint64(seed), POLICIES.index(policy))

    def eagerness(self, share: float) -> None:
        """How often the device goes on by itself between driver calls (uniform and starve), instead of by seed."""
        self._library.sim_eagerness(round(share * 1000))

    def set(self, key: str, value: int) -> None:
        """Set one of ``defaults``, by name."""
        if self._library.sim_set(key.encode(), ctypes.c_int64(value)):
            raise KeyError(key)

    def get(self, key: str) -> int:
        """A setting, a counter (0 before it counted anything), or: pending, reports, sticky, device_bytes_used,
        host_bytes_used, contexts, streams, events, modules, virtual_ns."""
        return int(self._library.sim_get(key.encode()))

    def _text(self, what: str) -> str:
        size = self._library.sim_text(what.encode(), None, ctypes.c_int64(0)) + 1
        buffer = ctypes.create_string_buffer(size)
        self._library.sim_text(what.encode(), buffer, ctypes.c_int64(size))
        return buffer.value.decode()

    def reports(self) -> list[str]:
        """What the driver has to say against the program, one line each: ``kind: what``. At most 200 are kept."""
        return self._text("reports").splitlines()

    def kinds(self) -> set[str]:
        return {line.split(":")[0] for line in self.reports()}

    def take_reports(self) -> list[str]:
        """The reports, which are then forgotten: a scene that plants a fault ends with this."""
        lines = self.reports()
        self._library.sim_clear_reports()
        return lines

    def trace(self) -> list[str]:
        """The operations in the order in which they ran, if ``set("trace", 1)``."""
        return self._text("trace").splitlines()

    def counters(self) -> dict[str, int]:
        """All counters that are not zero. ``call:cuX``: how often X was called; ``launch:k``: how often k was."""
        return {key: int(value) for key, value in (line.rsplit("=", 1) for line in self._text("counters").splitlines())}

    def clear_counters(self) -> None:
        self._library.sim_clear_counters()

    def clear_sticky(self) -> None:
        """Forget the error that a fault left; a real context cannot be saved like this."""
        self._library.sim_clear_sticky()

    def drain(self) -> None:
        """Run all that is pending. The host learns nothing by it."""
        self._library.sim_drain()

    def step(self, number: int = 1) -> int:
        """Run at most ``number`` operations; returns how many there were."""
        return int(self._library.sim_step(number))

    def host_reads(self, address: int, size: int) -> None:
        """Say that the host is about to read pinned memory: reported unless it has waited for whoever writes there."""
        self._library.sim_host_access(ctypes.c_uint64(address), ctypes.c_uint64(size), 0)

    def host_writes(self, address: int, size: int) -> None:
        self._library.sim_host_access(ctypes.c_uint64(address), ctypes.c_uint64(size), 1)

    def label_stream(self, handle: int, name: str) -> None:
        """A name for reports instead of ``s3``."""
        self._library.sim_label_stream(ctypes.c_void_p(handle), name.encode())

    def label_memory(self, address: int, name: str) -> None:
        self._library.sim_label_memory(ctypes.c_uint64(address), name.encode())


def load(driver: Path) -> Sim:
    """Load the simulated driver into this process. Whoever links to ``libcuda.so.1`` afterwards gets this one, because
    the loader goes by the name inside the library; so it must come before the first import of pycuda."""
    sim = Sim(ctypes.CDLL(str(driver)))
    sim.remember_defaults()
    return sim

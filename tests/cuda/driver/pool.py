"""Runs scenes in child processes that have the simulated driver. This is the only way tests reach it: the process of
pytest itself never loads it, so that nothing can mistake it for a real one, or the real one for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import ledger
from tests.cuda.driver.build import Builder
from tests.cuda.driver.control import schedules

ROOT = Path(__file__).resolve().parents[3]


def cache_folder(config: pytest.Config) -> Path:
    named = os.environ.get("KVSTREAM_CUDA_CACHE")
    if named:
        return Path(named)
    if config.pluginmanager.hasplugin("cacheprovider"):
        return config.cache.mkdir("cuda")
    return Path(tempfile.gettempdir()) / f"kvstream-cuda-{os.getuid()}"


class SceneFailed(AssertionError):
    """A scene raised, was reported by the driver, died or took too long. Says with which seed and policy."""


def only(results: Iterable[Any]) -> Any:
    """What all results are, under whatever schedule; fails when there are two."""
    first, *rest = results
    assert all(result == first for result in rest), (first, next(result for result in rest if result != first))
    return first


class _Child:
    def __init__(self, driver: Path, site: Path) -> None:
        ours, theirs = socket.socketpair()
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        environment.pop("LD_LIBRARY_PATH", None)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cuda.driver.worker", str(theirs.fileno()), str(driver), str(site)],
                cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=self.stderr)
        self.connection = Connection(ours.detach())

    def answer(self, timeout_s: float) -> tuple[str, Any]:
        """("ready" | "result" | "error" | "broken" | "dead" | "late", value or text)"""
        if not self.connection.poll(timeout_s):
            self.process.kill()
            self.process.wait()
            return "late", f"no answer within {timeout_s:g} s{self._last_words()}"
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.wait()
            return "dead", f"the child ended with {self.process.returncode}{self._last_words()}"

    def _last_words(self) -> str:
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")[-4000:]
        return f"; it had written:\n{text}" if text else ""

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr.close()


class Simulated:
    """What the fixture ``simulated`` gives. Children are kept between calls; one that failed is replaced."""

    def __init__(self, builder: Builder, workers: int) -> None:
        self.builder, self.workers = builder, workers
        self._idle: list[_Child] = []
        self._images: dict[tuple[str, bool], Path] = {}

    def call(self, scene: Callable[..., Any], *args: Any, seed: int = 0, policy: str = "uniform",
             kernels: str | None = None, checked: bool = False, timeout_s: float = 120, **kwargs: Any) -> Any:
        """``scene(sim, *args, **kwargs)`` in a child, under that seed and policy. Its result, arguments and exception
        travel by pickle. Fails when the scene raises, when the driver has a report that the scene did not take, or
        when a context is left. ``kernels``: name of a module image of ``Builder.image``; ``checked``: the build whose
        accesses the happens-before checker sees."""
        request = {"module": scene.__module__, "name": scene.__qualname__, "args": args, "kwargs": kwargs,
                   "seed": seed, "policy": policy, "image": self._image(kernels, checked), "checked": checked,
                   "timeout_s": timeout_s}
        child = self._child()
        child.connection.send(request)
        kind, value = child.answer(timeout_s)
        if kind == "result":
            self._idle.append(child)
            ledger.ran(seed, policy, checked)
            return value
        child.close()
        raise SceneFailed(f"{scene.__qualname__}(seed={seed}, policy={policy!r}, kernels={kernels!r}, "
                          f"checked={checked}, {args!r}, {kwargs!r}): {value}")

    def each(self, scene: Callable[..., Any], runs: Iterable[dict[str, Any]], **shared: Any) -> list[Any]:
        """``call(scene, **run, **shared)`` for each run, in several children at once; results in the order of the runs.
        The first failure ends it."""
        self._image(shared.get("kernels"), shared.get("checked", False))  # built once, before there are threads
        with ThreadPoolExecutor(self.workers) as threads:
            futures = [threads.submit(self.call, scene, **run, **shared) for run in runs]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def seeds(self, scene: Callable[..., Any], number: int, policies: Iterable[str] | None = None,
              **shared: Any) -> list[Any]:
        """``each`` over ``number`` seeds with the policies in turn; ``just fuzz-cuda`` makes it many times as many."""
        number *= int(os.environ.get("CUDA_FUZZ") or 1)
        pairs = schedules(number, policies) if policies is not None else schedules(number)
        return self.each(scene, [{"seed": seed, "policy": policy} for seed, policy in pairs], **shared)

    def _image(self, kernels: str | None, checked: bool) -> str | None:
        if kernels is None:
            return None
        key = (kernels, checked)
        if key not in self._images:
            self._images[key] = self.builder.image(kernels, checked)
        return str(self._images[key])

    def _child(self) -> _Child:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        child = _Child(self.builder.driver(), self.builder.pycuda())
        kind, value = child.answer(120)
        if kind != "ready":
            child.close()
            raise SceneFailed(f"no child with the simulated driver: {value}")
        return child

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

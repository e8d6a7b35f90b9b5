"""The simulated CUDA driver for tests: built once per content, reached only through child processes.

**Why children.** PyCUDA takes whichever ``libcuda.so.1`` its process finds. Were the simulated one loaded into pytest's
own process, then on a machine with a GPU a test meant for the real device could run on the fake one, or the other way
round, and nobody would notice. So pytest never loads it; ``simulated.call(scene, ...)`` runs a function in a child that
loads it by its path and refuses to go on unless PyCUDA reports its name. On a GPU machine the same scenes are called
directly, by ``just gpu``, with the PyCUDA of that machine. A child that aborts or hangs is also only one failed test.

The first build takes about 100 s of one core (PyCUDA), later ones seconds. It begins, at low priority, as soon as the
tests are collected, so that those which need no driver run meanwhile. Without a compiler or CUDA's headers these tests
are skipped, except where ``CI`` is set: there a proof that silently does not run is a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cuda import ledger
from tests.cuda.driver.build import Builder, NothingToBuildWith
from tests.cuda.driver.pool import ROOT, Simulated, cache_folder

BUILD = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    if any("simulated" in getattr(item, "fixturenames", ()) for item in session.items):
        # Its failure is told by whoever needs the result and builds again.
        session.config.stash[BUILD] = subprocess.Popen(
            [sys.executable, "-m", "tests.cuda.driver.build", str(cache_folder(session.config))], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=lambda: os.nice(15))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    started = session.config.stash.get(BUILD, None)
    if started is None or started.poll() is not None:
        return
    if os.environ.get("PYTEST_XDIST_WORKER") and exitstatus != pytest.ExitCode.INTERRUPTED:
        started.wait()  # the other process of the tests may be waiting for just this build
    else:
        os.killpg(started.pid, signal.SIGTERM)  # pip and compilers too
        started.wait()


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """What this test has shown goes into its report."""
    ledger.take()
    yield
    request.node.user_properties.append((ledger.PROPERTY, ledger.take().plain()))


@pytest.fixture(scope="session")
def cuda_builder(request: pytest.FixtureRequest) -> Builder:
    try:
        builder = Builder(cache_folder(request.config))
    except NothingToBuildWith as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no simulated CUDA driver: {missing}")
    started = request.config.stash.get(BUILD, None)
    if started is not None:
        started.wait()
    return builder


@pytest.fixture(scope="session")
def simulated(cuda_builder: Builder) -> Iterator[Simulated]:
    pool = Simulated(cuda_builder, workers=os.cpu_count() or 1)
    yield pool
    pool.close()

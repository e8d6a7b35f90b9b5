"""The simulated CUDA driver for tests: built once per content, reached only through child processes.

**Why children.** PyCUDA takes whichever ``libcuda.so.1`` its process finds. Were the simulated one loaded into pytest's
own process, then on a machine with a GPU a test meant for the real device could run on the fake one, or the other way
round, and nobody would notice. So pytest never loads it; ``simulated.call(scene, ...)`` runs a function in a child that
loads it by its path and refuses to go on unless PyCUDA reports its name. On a GPU machine the same scenes are called
directly, by ``just gpu``, with the PyCUDA of that machine. A child that aborts or hangs is also only one failed test.

The first build takes about 100 s (PyCUDA), later ones seconds. Without a compiler or CUDA's headers these tests are
skipped, except where ``CI`` is set: there a proof that silently does not run is a failure.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda.driver.build import Builder, NothingToBuildWith
from tests.cuda.driver.pool import Simulated


@pytest.fixture(scope="session")
def cuda_builder(request: pytest.FixtureRequest) -> Builder:
    named = os.environ.get("KVSTREAM_CUDA_CACHE")
    if named:
        cache = Path(named)
    elif request.config.pluginmanager.hasplugin("cacheprovider"):
        cache = request.config.cache.mkdir("cuda")
    else:
        cache = Path(tempfile.gettempdir()) / f"kvstream-cuda-{os.getuid()}"
    try:
        return Builder(cache)
    except NothingToBuildWith as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no simulated CUDA driver: {missing}")


@pytest.fixture(scope="session")
def simulated(cuda_builder: Builder) -> Iterator[Simulated]:
    pool = Simulated(cuda_builder, workers=os.cpu_count() or 1)
    yield pool
    pool.close()

"""What all tests share: how hard Hypothesis tries, and an environment without the developer's own settings."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.cuda import ledger
from tests.order import LONG_FIRST

HERE = Path(__file__).resolve().parent

# No deadline anywhere: the machine is shared, and a slow example says nothing about the property.
_quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=50, **_quiet)
# The same examples on every run: a red build must be red again on the developer's machine.
settings.register_profile("ci", max_examples=100, derandomize=True, print_blob=True, **_quiet)
settings.register_profile("fuzz", max_examples=5000, phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
                          **_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # where xdist has workers, they send their reports here
        config.pluginmanager.register(ledger.Sum())
    config.option.loadscopereorder = False  # xdist would begin with the files that have the most tests
    gc.disable()  # nothing that the collection of tests makes is garbage, and going through it takes seconds


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {HERE / name: number for number, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(LONG_FIRST)))  # the rest stays as it is


def pytest_collection_finish() -> None:
    gc.freeze()  # a full collection goes through half a million objects of the tests, which stay to the end
    gc.enable()


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer who exported KVSTREAM_SERVER__PORT sees the same results as everyone."""
    for name in [name for name in os.environ if name.startswith("KVSTREAM_") and "__" in name]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def state_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory for each test, made by whoever writes to it."""
    root = tmp_path_factory.mktemp("state")
    return (root / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def no_state_from_outside(state_dirs: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds what another one, or the developer's own KVStream, has kept; nor leaves anything there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(next(state_dirs)))

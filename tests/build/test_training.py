"""What the release's Python is trained with runs on the Python that is here, and makes it do the same each time."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.build.recipes import BUILD

COUNTED = """
import collections, sys, training
training.STARTS, training.STREAMS, training.TOKENS = 1, 3, 20
calls = collections.Counter()
sys.setprofile(lambda frame, event, argument: calls.update([event]))
training.main()
sys.setprofile(None)
print(sorted(calls.items()))
"""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="it runs modules of 3.11, which a release has")
def test_training_counts_the_same_each_time() -> None:
    command = [sys.executable, "-B", "-S", "-c", COUNTED]
    env = {"PYTHONPATH": str(BUILD), "PYTHONHASHSEED": "0"}
    runs = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (run.communicate(timeout=60)[0] for run in runs)
    assert first == second and first.startswith("9") and "('call'" in first, first
    assert all(run.returncode == 0 for run in runs)

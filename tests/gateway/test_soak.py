"""The short form of the soak (``just soak``: 10,000 streams, 1,000 of them aborted): memory, descriptors, sockets and
tasks of a real gateway process are back after its streams are over. The script holds itself against its bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "measure" / "show_rss.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="looks into the process as POSIX shows it")
def test_streams_leave_nothing_behind_also_aborted_ones(tmp_path: Path) -> None:
    report = tmp_path / "rss.json"
    run = subprocess.run([sys.executable, str(SCRIPT), "--streams", "600", "--aborted", "60", "--json", str(report)],
                         capture_output=True, text=True, timeout=300, check=False)
    assert report.exists(), run.stderr[-2000:]
    told = json.loads(report.read_text("utf-8"))
    assert told["counters"]["admitted"] == 601
    missed = [bar for bar in told["bars"] if bar["met"] is False]
    assert not missed and run.returncode == 0, missed

"""The image that the wheel carries is that of these sources, is small, and its attention kernels spill nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstream.cuda import kernels

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "kvstream" / "cuda" / "kernels"
REPORT = (FOLDER / "kernels.txt").read_text("utf-8")


def test_the_image_was_built_from_these_sources() -> None:
    done = subprocess.run([sys.executable, ROOT / "build" / "kernels.py", "--check"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_every_kernel_is_in_the_report_for_every_architecture_and_none_spills() -> None:
    table = [line.split() for line in REPORT.splitlines() if line.startswith("kv_")]
    assert {row[0] for row in table} == set(kernels.kernel_formats())
    for row in table:
        assert len(row) == 1 + 7 and all(cell.isdigit() for cell in row[1:]), row  # "(stack+spills)" would be no digit
        if row[0].startswith("kv_attend"):
            threads = kernels.attend_threads(int(row[0].rsplit("_", 1)[1]))
        if row[0].startswith("kv_wide"):
            threads = kernels.WIDE_THREADS
        if row[0].startswith(("kv_attend", "kv_wide")):
            assert all(2 * threads * int(cell) <= 65536 for cell in row[1:]), f"{row[0]}: not two blocks at a time"


def test_the_image_is_small() -> None:
    size = (FOLDER / "kv.fatbin").stat().st_size
    assert f"kv.fatbin {size} bytes" in REPORT
    assert size < 2 << 20


@pytest.mark.parametrize("head_size", kernels.HEAD_SIZES)
def test_launch_shapes_fit_every_gpu(head_size: int) -> None:
    threads = kernels.attend_threads(head_size)
    assert threads % 32 == 0 and head_size <= threads <= 1024
    assert kernels.attend_shared_bytes(head_size, kernels.PAGE_TOKENS_MAX, running=True) <= 48 * 1024
    assert kernels.wide_shared_bytes(head_size) <= 48 * 1024


def test_the_readme_has_the_same_arguments() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    assert re.findall(r"^`([Pif]+)`$", text, re.MULTILINE) == [
        kernels.WRITE_FORMAT, kernels.TABLES_FORMAT, kernels.ATTEND_FORMAT, kernels.FOLD_FORMAT,
        kernels.ATTEND_FORMAT]
    table, running = (kernels.attend_shared_bytes(256, 256, form) for form in (False, True))
    assert f"{table:,} and {running:,}" in text and f"{kernels.wide_shared_bytes(256):,}" in text

"""``kvstream bench kv`` measures with the real PyCUDA and the real kernels, on the simulated driver: that it works, not
what it says. What is told when memory runs out is in ``tests/bench/test_kvgpu``."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.cuda.driver.pool import Simulated
from tests.cuda.kv_scenes import bench_kv

MIB = 1 << 20


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "out" / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_pool_is_found_and_baselines_run(simulated: Simulated, tmp_path: Path) -> None:
    """A MiB of the 3.5 is in the place of the model, and the inputs take some: 2 are left, and the context needs 3. As
    managed memory it has them."""
    row, output = measured(simulated, tmp_path, baselines="all-resident,host-only,managed")
    assert row["source"] == "no GPU" and row["device"].startswith("KVStream simulated device")
    assert (row["pool_mib"], row["pool_tries"], row["streaming_active"]) == ("2", "1", "True")
    assert float(row["h2d_mib_per_token"]) > 0.1
    assert float(row["host_only_decode_tps"]) > 0 and float(row["managed_decode_tps"]) > 0
    assert row["all_resident_decode_tps"] == "" and "all-resident: takes 3 MiB, 2 are free" in row["notes"]
    assert "NO GPU on KVStream simulated device" in output and "KV ALONE" in output


def test_no_access_is_out_of_order(simulated: Simulated, tmp_path: Path) -> None:
    """The checked build, and the pool in managed memory too."""
    row, _ = measured(simulated, tmp_path, baselines="managed", checked=True)
    assert float(row["h2d_mib_per_token"]) > 0.1 and float(row["managed_decode_tps"]) > 0


def measured(simulated: Simulated, folder: Path, baselines: str, checked: bool = False) -> tuple[dict[str, str], str]:
    code, output, closed = simulated.call(
        bench_kv, str(folder), "--max-context=1008", "--min-context=1000", f"--baseline={baselines}",
        settings={"device_bytes": 7 * MIB // 2}, kernels="kv", checked=checked, timeout_s=300)
    assert code == 0 and closed == [True, True], output
    row, = rows_of(folder)
    return row, output


def test_memory_runs_out_in_the_middle_of_a_sweep(simulated: Simulated, tmp_path: Path) -> None:
    """The allocations of the first context succeed, of the second only that in the place of the model; then it goes on
    where it stopped."""
    arguments = ("--max-context=1008", "--min-context=500", "--step=500", "--pool-mib=2")
    # About the device: none. A context: the model, inputs, what keeps it busy, a copy for the link, the pool.
    code, output, closed = simulated.call(bench_kv, str(tmp_path), *arguments, settings={"fail_alloc_after": 6},
                                          kernels="kv")
    assert code == 1 and closed == [True, True, True], output
    assert [row["prompt_tokens"] for row in rows_of(tmp_path)] == ["500"]
    assert "1,000 tokens: not measured: allocate" in output and "out of memory" in output
    code, output, closed = simulated.call(bench_kv, str(tmp_path), *arguments, settings={}, kernels="kv")
    assert code == 0 and closed == [True, True], output
    assert [row["prompt_tokens"] for row in rows_of(tmp_path)] == ["500", "1000"]

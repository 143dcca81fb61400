"""benchmarks.compare, on a few megabytes: what its rows hold; nothing about times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks.compare.rows import upper95

KEYS = {
    "system",
    "ranks",
    "bytes",
    "compute",
    "stall_s",
    "durable_s",
    "restore_cold_s",
    "restore_memory_s",
    "floor_copy_s",
    "floor_write_s",
    "floor_read_s",
    "floor_fresh_copy_s",
    "slowdown",
    "slowdown_upper95",
}


def test_a_small_job_has_a_row_for_each_system_with_floors_and_what_was_restored_is_what_was_saved(
    tmp_path,
):
    out = tmp_path / "rows.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.compare",
        "--json",
        str(out),
        "--folder",
        str(tmp_path),
        "--systems",
        "trainckpt-plain,torch.save",
        "--ranks",
        "1",
        "--gigabytes",
        "0.003",
        "--rounds",
        "1",
        "--pairs",
        "5",
        "--window",
        "2",
        "--compute",
        "off-cpu",
        "--step-seconds",
        "0.001",
        "--threads",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["system"] for row in rows] == ["trainckpt-plain", "torch.save"], done.stderr
    for row in rows:
        assert set(row) >= KEYS
        assert (row["ranks"], row["compute"], row["left_out"]) == (1, "off-cpu", {})
        assert row["bytes"] == pytest.approx(0.003e9, rel=0.2)
        assert all(row[key] > 0 for key in KEYS if key.startswith("floor_"))
        assert all(row[key] > 0 for key in ("durable_s", "restore_cold_s", "slowdown_upper95"))
        assert row["gpu_save_bytes"] is None
        assert isinstance(row["host_save_bytes"], int)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_the_upper_bound_of_the_median_is_the_order_statistic_that_a_coin_gives():
    values = [float(number) for number in range(21, 0, -1)]
    assert upper95(values) == 15
    assert upper95(values[:5]) == 21
    assert upper95(values[:4]) is None

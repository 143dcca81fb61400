"""Wall time: one notice when the lead is reached; the earliest end that is known."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainckpt.notice import Notice
from trainckpt.preemption.wall_time import WallTime, process_start_s, wall_time_end


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_said_once_and_only_when_no_more_than_the_lead_is_left():
    clock = Clock()
    source = WallTime(160.0, 20.0, clock=clock)
    source.start()
    assert source.fileno() is None
    assert source.poll() == []
    clock.now = 139.9
    assert source.poll() == []
    clock.now = 140.0
    assert source.poll() == [Notice("wall time", seconds_left=20.0)]
    clock.now = 150.0
    assert source.poll() == []
    source.stop()


def test_another_job_has_another_end_and_is_told_of_again():
    """As after a dump that was restored in it."""
    clock, job = Clock(), []
    source = WallTime(110.0, 20.0, clock=clock, anew=lambda: job[-1] if job else None)
    assert len(source.poll()) == 1
    job.append((300.0, 30.0))
    assert source.poll() == []
    clock.now = 270.0
    assert source.poll() == [Notice("wall time", seconds_left=30.0)]
    assert source.poll() == []


def test_after_the_end_nothing_is_left_and_never_less():
    clock = Clock()
    source = WallTime(90.0, 20.0, clock=clock)
    assert source.poll() == [Notice("wall time", seconds_left=0.0)]


@pytest.mark.parametrize(
    ("option_s", "environment", "end"),
    [
        (None, {}, None),
        (60.0, {}, 110.0),
        (None, {"SLURM_JOB_END_TIME": "1700000030"}, 130.0),
        (60.0, {"SLURM_JOB_END_TIME": "1700000030"}, 110.0),
        (600.0, {"SLURM_JOB_END_TIME": "1700000030"}, 130.0),
        (None, {"SLURM_JOB_END_TIME": "1699999999"}, None),
        (600.0, {"SLURM_JOB_END_TIME": "1699999999"}, 650.0),
        (None, {"SLURM_JOB_END_TIME": "tomorrow"}, None),
        (None, {"SLURM_JOB_END_TIME": "inf"}, None),
        (None, {"SLURM_JOB_END_TIME": "nan"}, None),
        (None, {"SLURM_JOB_END_TIME": ""}, None),
    ],
)
def test_the_earliest_end_counts_and_one_in_the_past_is_not_this_jobs(option_s, environment, end):
    found = wall_time_end(
        option_s, environment, now_wall=1_700_000_000.0, now_mono=100.0, process_start=50.0
    )
    assert found == end


def test_a_clock_that_is_set_later_moves_nothing(monkeypatch):
    end = wall_time_end(None, {"SLURM_JOB_END_TIME": "1030"}, 1000.0, time.monotonic(), 0.0)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert end is not None
    assert WallTime(end, 5.0).poll() == []


def test_the_start_of_the_process_lies_before_what_it_did_since():
    code = (
        "import time; time.sleep(0.3)\n"
        "from trainckpt.preemption.wall_time import process_start_s\n"
        "print(time.monotonic() - process_start_s())"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    whole = time.monotonic() - begun
    least = 0.25 if Path("/proc/self/stat").exists() else 0.0
    assert least <= float(done.stdout) <= whole + 0.05  # /proc counts hundredths
    assert process_start_s() <= time.monotonic()


def test_a_process_whose_name_is_cut_inside_a_letter_knows_since_when_it_runs():
    code = """
import time
from pathlib import Path
from trainckpt.preemption.wall_time import process_start_s
Path("/proc/self/comm").write_bytes("\N{LATIN SMALL LETTER A WITH DIAERESIS}".encode() * 8)
time.sleep(0.5)
print(time.monotonic() - process_start_s() > 0.4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"

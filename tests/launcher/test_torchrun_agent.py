"""torchrun under our agent, where it starts its ranks again: what it forgets, and when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.campaign import launch
from tests.limits import HANG_S
from trainckpt.attempt.status_files import (
    LEFT,
    SUPERVISOR_VARIABLE,
    RankStatus,
    read_rank_statuses,
    write_status,
)
from trainckpt.launcher.torchrun_agent import ExitRecorder, end_if_final, read_ends
from trainckpt.launcher.torchrun_command import torchrun_command

SCRIPT = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"rank{rank}.json").write_text((folder / "refused").read_text())
if rank == "1":
    time.sleep(1)  # torchrun looks ten times a second whether it is to end
    print("rank 1 has ended by itself")
"""
EXIT = [sys.executable, "-S", "-c", "raise SystemExit(3)"]


def report(folder, rank, **changes):
    status = RankStatus(rank, 1, "h", "/run", state=LEFT, exit_code=75, **changes)
    write_status(folder / f"rank{rank}.json", status)


def test_what_ranks_reported_is_forgotten_as_others_take_their_place(tmp_path):
    start = ExitRecorder(tmp_path).popen()
    first, second = (start(EXIT, start_new_session=True) for _ in range(2))
    report(tmp_path, 0, how="stopped")
    first.wait()
    helper = start(EXIT)
    helper.wait()
    assert [end.pid for end in read_ends(tmp_path)] == [first.pid]
    second.wait()
    assert list(read_rank_statuses(tmp_path)) == [0]
    third = start(EXIT, start_new_session=True)
    assert read_rank_statuses(tmp_path) == {}
    third.wait()
    assert [end.pid for end in read_ends(tmp_path)] == [third.pid]


@pytest.mark.parametrize(
    ("how", "asked", "ends"),
    [
        ("stopped", True, True),
        ("stopped", False, False),
        ("failed", True, False),
        ("refused", False, True),
    ],
)
def test_torchrun_ends_after_a_notice_or_a_refusal_and_goes_on_after_other_ends(
    tmp_path, how, asked, ends
):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        recorder = ExitRecorder(tmp_path, on_end=end_if_final)
        rank = recorder.popen()(EXIT, start_new_session=True)
        report(tmp_path, 0, how="finished")
        report(tmp_path, 1, how=how, asked=asked)
        assert isinstance(rank, subprocess.Popen)
        rank.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert bool(came) is ends


def test_a_script_with_an_option_nnodes_does_not_make_the_number_of_agents_change(tmp_path):
    write_status(tmp_path / "refused", RankStatus(0, 1, "h", "/run", state=LEFT, how="refused"))
    (tmp_path / "script.py").write_text(SCRIPT)
    script = [str(tmp_path / "script.py"), str(tmp_path), "--nnodes", "1:4"]
    done = subprocess.run(
        torchrun_command(2, [], script),
        env={**os.environ, **launch.environment(), SUPERVISOR_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 has ended by itself" in done.stdout

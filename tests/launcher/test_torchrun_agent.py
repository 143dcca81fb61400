"""torchrun under our agent, where it starts its ranks again: what it forgets, and when it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from trainckpt.attempt.status_files import LEFT, RankStatus, read_rank_statuses, write_status
from trainckpt.launcher.torchrun_agent import ExitRecorder, end_if_final, read_ends

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

"""A stop in a Slurm job: what is asked for, and who waits to be killed. Slurm: tests/slurm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.training import notice, record
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE, read_rank_statuses
from trainckpt.preemption.slurm import UNKNOWN, Job, Scontrol
from trainckpt.stop.requeue import LINGER_S, Requeue


@pytest.fixture(autouse=True)
def all_that_is_said(caplog):
    caplog.set_level("INFO", "trainckpt")


class Answers(Scontrol):
    """A controller that says this of the job, and refuses for this reason, if for any."""

    def __init__(self, job: Job | None, refused: str = "") -> None:
        self.job, self.refused, self.asked = job, refused, 0
        self.why = "" if job else "scontrol cannot be run"

    def show(self) -> Job | None:
        return self.job

    def requeue(self) -> str:
        self.asked += 1
        return self.refused


def asked_and_waited(
    answers: Answers, reason: str, *, in_step: bool = True
) -> tuple[int, list[float]]:
    waited: list[float] = []
    Requeue("7", answers, in_step=in_step).ask(reason, sleep=waited.append)
    return answers.asked, waited


def test_a_job_that_is_queued_again_is_left_at_once():
    assert asked_and_waited(Answers(Job("RUNNING", is_preempted=True)), "SIGTERM") == (1, [])
    assert asked_and_waited(Answers(Job("RUNNING")), "GPU 0: Xid 63, a row") == (1, [])


def test_a_preempted_job_that_slurm_does_not_queue_again_on_request_waits_for_its_end():
    """Leaving by itself it would have completed, and Slurm would not queue it again either."""
    refusing = Answers(Job("RUNNING", is_preempted=True), "disabled")
    assert asked_and_waited(refusing, "SIGTERM") == (1, [LINGER_S])
    assert asked_and_waited(Answers(None), "SIGTERM") == (0, [LINGER_S])


def test_a_job_that_is_cancelled_or_paused_is_neither_asked_for_nor_waited_for():
    assert asked_and_waited(Answers(Job("CANCELLED")), "SIGTERM") == (0, [])
    assert asked_and_waited(Answers(Job("RUNNING")), "trainckpt pause") == (0, [])
    assert asked_and_waited(Answers(Job("RUNNING"), "disabled"), "SIGUSR1") == (1, [])


def test_nobody_waits_for_an_end_that_slurm_would_not_bring(caplog):
    """A variable left over in a shell, a container or a machine that is no longer the job's."""
    assert asked_and_waited(Answers(Job(UNKNOWN)), "SIGTERM") == (0, [])
    assert "Slurm job 7 is not queued again: Slurm does not know it" in caplog.text
    assert asked_and_waited(Answers(None, "no scontrol"), "SIGTERM", in_step=False) == (1, [])
    assert "Slurm did not queue job 7 again: no scontrol" in caplog.text
    assert "waiting" not in caplog.text


def test_whoever_waits_says_so_and_why(caplog):
    asked_and_waited(Answers(None), "SIGTERM")
    [line] = caplog.messages
    assert "waiting at most 600 s for Slurm to end the job" in line
    assert "scontrol cannot be run" in line
    assert "requeue='never' leaves at once" in line


def test_a_step_is_told_by_its_variable():
    assert not Requeue.of({"SLURM_JOB_ID": "7"})._in_step
    assert Requeue.of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})._in_step


def test_outside_of_slurm_and_in_a_proof_nobody_is_asked():
    assert Requeue.of({}) is None
    assert Requeue.of({"SLURM_JOB_ID": "7"}) is not None
    assert Requeue.of({"SLURM_JOB_ID": "7", "TRAINCKPT_PROVE": "{}"}) is None


TRAINS = "import sys; from tests.cli.pausing import train; train(0, sys.argv[1])"


def test_while_slurm_is_asked_the_supervisor_keeps_time_no_more(tmp_path):
    """What is committed is safe, and to end a rank that waits for Slurm would lose the requeue."""
    told, run = tmp_path / "told", tmp_path / "run"
    told.mkdir()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\ncp {told}/rank0.json {tmp_path}\nexit 1\n")
    scontrol.chmod(0o755)
    known = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    environment = {
        **known,
        SUPERVISOR_VARIABLE: str(told),
        "SLURM_JOB_ID": "7",
        "TRAINCKPT_GRACE": "60s",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-c", TRAINS, str(run)]
    with subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]) as process:
        until = time.monotonic() + 60
        while not (run / "attempts/1.json").exists() or record(run, 1)["state"] != "running":
            assert time.monotonic() < until
            time.sleep(0.05)
        assert read_rank_statuses(told)[0].grace_s == 60.0
        notice(run, 1)
        assert process.wait(60) == 75
    then = read_rank_statuses(tmp_path)[0]
    assert (then.how, then.exit_code, then.grace_s) == ("stopped", 75, None)

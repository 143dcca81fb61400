"""What Slurm says of a job, what is right after the save, and the end of a job as a notice.

With the real Slurm: tests/slurm.
"""

from __future__ import annotations

import time

import pytest

from trainckpt.notice import Notice
from trainckpt.preemption.slurm import (
    LEAVE,
    LINGER,
    MOST_ASKED,
    REQUEUE,
    UNKNOWN,
    Job,
    JobEnd,
    Scontrol,
    after_refusal,
    began_nothing,
    decide,
    job_to_requeue,
    noted,
    parse_job,
    without_note,
)

SHOWN = (
    "JobId=12 ArrayJobId=9 ArrayTaskId=3 JobName=x\n   JobState={state} Reason=None\n   Restarts=0 "
    "BatchFlag=1\n   SubmitTime=1700000000\n   StartTime=1700000010 EndTime={end} Deadline=N/A\n"
    "   PreemptEligibleTime=1700000010 PreemptTime={preempt} SuspendTime=None\n   Command=/x "
    "JobState=no\n\nJobId=13 JobName=y\n   JobState=CANCELLED\n   EndTime=1 PreemptTime=1\n\n"
)


def commented(comment: str) -> str:
    """A job as Slurm shows it, with that comment."""
    return (
        f"JobId=12 JobName=x\n   JobState=RUNNING\n   WorkDir=/\n   Comment={comment} \n"
        "   StdErr=/a\n   CPUs/Task=1\n\n"
    )


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "12"}, "12"),
        ({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"}, "9_3"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "0"}, "9_0"),
        ({"SLURM_JOB_ID": "12", "SLURM_HET_JOB_ID": "11"}, "11"),
        ({"SLURM_JOB_ID": "12; rm"}, None),
        ({"SLURM_JOB_ID": "--all"}, None),
    ],
)
def test_a_task_of_an_array_and_a_part_of_a_job_are_requeued_by_their_right_names(variables, job):
    assert job_to_requeue(variables) == job


def test_a_note_that_nothing_began_holds_for_the_next_start_alone_and_keeps_what_people_wrote():
    assert began_nothing("", 0, "a")
    people = "sweep  LR=3e-4 keep StdErr=/x Comment=no "
    comment = noted(people, 1, "a")
    assert comment.startswith(people)
    assert parse_job(commented(comment)).comment == comment
    assert began_nothing(comment, 1, "a")
    assert not began_nothing(comment, 2, "a")
    assert noted(comment, 2, "a") == noted(people, 2, "a")
    assert without_note(comment, 1, "a") == people
    assert without_note(noted("", 1, "a"), 1, "a") == ""


def test_a_note_of_one_command_says_nothing_of_another():
    both = noted(noted("mine", 1, "a"), 1, "b")
    assert not began_nothing(noted("mine", 1, "a"), 1, "b")
    assert began_nothing(both, 1, "a")
    assert began_nothing(both, 1, "b")
    assert without_note(both, 1, "a") == noted("mine", 1, "b")


def test_a_comment_that_cannot_be_told_from_the_rest_is_left_alone():
    assert parse_job(commented("(null)")).comment == ""
    assert parse_job("JobId=12 JobName=x\n   JobState=RUNNING").comment == ""
    for lines in ("mine\nand more", "mine\n   Comment=more", "mine\n\nand more"):
        assert parse_job(commented(lines)).comment is None


def test_the_first_job_that_is_shown_is_the_one_that_is_meant():
    text = SHOWN.format(state="RUNNING", end="1700003610", preempt="None")
    assert parse_job(text) == Job("RUNNING", False, 1700000010.0, 1700003610.0)
    text = SHOWN.format(state="RUNNING", end="Unknown", preempt="1700000100")
    assert parse_job(text) == Job("RUNNING", True, 1700000010.0, None)
    for garbage in ("", "\n", "slurm_load_jobs error: Invalid job id specified", "JobId=1"):
        assert parse_job(garbage) is None


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1", "wall time"])
def test_a_job_that_slurm_stops_is_queued_again_unless_it_is_cancelled_or_queued(reason):
    for state in ("RUNNING", "TIMEOUT"):
        assert decide(reason, Job(state)) == REQUEUE
    for state in ("CANCELLED", "PENDING", "COMPLETING", "PREEMPTED", "REQUEUED", "SUSPENDED"):
        assert decide(reason, Job(state)) == LEAVE


@pytest.mark.parametrize("reason", ["SIGINT", "trainckpt pause", "notice file", "SIGTERM!"])
def test_whoever_stops_a_run_in_another_way_decides_about_its_next_start(reason):
    assert decide(reason, Job("RUNNING", is_preempted=True)) == LEAVE
    assert decide(reason, None) == LEAVE


def test_a_machine_that_goes_or_is_not_well_does_not_end_the_job():
    assert decide("AWS spot terminate", Job("RUNNING"), of_machine=True) == REQUEUE


def test_where_slurm_does_not_answer_or_refuses_only_a_preempted_job_waits_to_be_killed():
    assert decide("SIGTERM", None) == LINGER
    assert decide("SIGUSR1", None) == REQUEUE
    assert after_refusal("SIGTERM", Job("RUNNING", is_preempted=True)) == LINGER
    assert after_refusal("SIGTERM", Job("RUNNING")) == LEAVE
    assert after_refusal("SIGUSR1", None) == LEAVE
    assert after_refusal("SIGTERM", None) == LINGER


def test_a_sigterm_that_slurm_did_not_send_is_not_waited_on():
    """Slurm sends it to the processes of a step alone, and not for a job that it does not know."""
    assert decide("SIGTERM", None, in_step=False) == REQUEUE
    assert after_refusal("SIGTERM", None, in_step=False) == LEAVE
    assert decide("SIGTERM", Job(UNKNOWN)) == LEAVE


def test_a_machine_without_scontrol_says_so(tmp_path):
    scontrol = Scontrol("12", {"PATH": str(tmp_path)})
    assert scontrol.show() is None
    assert "scontrol cannot be run" in scontrol.why
    assert "scontrol cannot be run" in scontrol.requeue()


@pytest.mark.parametrize(
    ("says", "job", "why"),
    [
        ("slurm_load_jobs error: Invalid job id specified", Job(UNKNOWN), "Invalid job id"),
        ("Unable to contact slurm controller", None, "Unable to contact"),
    ],
)
def test_a_job_that_slurm_does_not_know_is_another_thing_than_no_answer(tmp_path, says, job, why):
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    command.chmod(0o755)
    scontrol = Scontrol("12", {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert scontrol.show() == job
    assert why in scontrol.why


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def answered(source: JobEnd) -> list[Notice]:
    """`poll`, once the question that is being asked is answered."""
    while source._asking.is_alive():
        time.sleep(0.001)
    return source.poll()


def test_the_end_of_a_job_is_told_when_the_lead_is_reached_and_the_limit_was_not_raised():
    clock, jobs = Clock(), [Job("RUNNING", False, 1000.0, 2000.0)]
    source = JobEnd(lambda: jobs[-1], lambda whole_s: whole_s / 10, clock=clock, date=clock)
    source.start()
    assert answered(source) == []
    clock.now = 1899.0
    assert answered(source) == []
    jobs.append(Job("RUNNING", False, 1000.0, 3000.0))
    clock.now = 1901.0
    assert answered(source) == []  # asks again
    assert answered(source) == []  # and has learned of the later end
    clock.now = 2801.0
    assert answered(source) == []
    assert answered(source) == [Notice("wall time", seconds_left=199.0)]
    assert answered(source) == []
    source.stop()


@pytest.mark.parametrize("end", ["Unknown", str(10**10)])
def test_a_limit_that_is_lifted_while_the_job_runs_is_no_end_any_more(end):
    clock, jobs = Clock(), [Job("RUNNING", False, 1000.0, 2000.0)]
    source = JobEnd(lambda: jobs[-1], lambda whole_s: whole_s / 10, clock=clock, date=clock)
    source.start()
    assert answered(source) == []
    lifted = parse_job(SHOWN.format(state="RUNNING", end=end, preempt="None"))
    jobs.append(lifted)
    clock.now = 1901.0
    assert [answered(source) for _ in range(4)] == [[]] * 4


def test_an_end_stands_while_the_controller_does_not_know_the_job():
    clock, jobs = Clock(), [Job("RUNNING", False, 1000.0, 2000.0)]
    source = JobEnd(lambda: jobs[-1], lambda whole_s: whole_s / 10, clock=clock, date=clock)
    source.start()
    assert answered(source) == []
    jobs.append(Job(UNKNOWN))
    clock.now = 1901.0
    assert answered(source) == []
    assert answered(source) == [Notice("wall time", seconds_left=99.0)]


def test_a_controller_that_is_busy_is_asked_again_a_few_times():
    clock, asked, jobs = Clock(), [], [None, None, Job("RUNNING", False, 1000.0, 1500.0)]

    def show() -> Job | None:
        asked.append(clock.now)
        return jobs[min(len(asked), len(jobs)) - 1]

    source = JobEnd(show, lambda whole_s: 10.0, clock=clock, date=clock)
    source.start()
    for _ in range(5):
        answered(source)
    assert asked == [1000.0]
    for clock.now in (1070.0, 1140.0, 1200.0, 1495.0):
        answered(source)
    assert asked == [1000.0, 1070.0, 1140.0, 1495.0]
    assert answered(source) == [Notice("wall time", seconds_left=5.0)]

    asked.clear()
    jobs[:] = [None]
    source = JobEnd(show, lambda whole_s: 10.0, clock=clock, date=clock)
    source.start()
    for _ in range(20):
        clock.now += 100.0
        answered(source)
    assert len(asked) == MOST_ASKED


def test_a_slurm_that_answers_nothing_useful_tells_no_end():
    for job in (None, Job("RUNNING"), Job("RUNNING", ends_at=1.0), Job("RUNNING", ends_at=1e300)):
        clock = Clock()
        source = JobEnd(lambda job=job: job, lambda _: 1e9, clock=clock, date=clock)
        source.start()
        assert answered(source) == []

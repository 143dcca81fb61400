"""A Slurm job that is stopped before its ranks have begun is queued again by the supervisor."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from trainckpt.format.attempt import AttemptRecord
from trainckpt.supervisor.early_stop import ask_to_be_queued_again
from trainckpt.supervisor.signals import Inbox
from trainckpt.supervisor.supervise import Ended, supervise
from trainckpt.supervisor.verdict import START_AGAIN

STOPPED = Ended(START_AGAIN, None, 0, "a signal came")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What a stand-in for Slurm's command was asked, in a job that runs."""
    command, log = tmp_path / "scontrol", tmp_path / "asked"
    command.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\n[ "$1" = requeue ] || '
        'echo "JobId=7 JobState=RUNNING Comment=mine too StdErr=/x"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda: log.read_text().splitlines() if log.exists() else []


def heard(name):
    inbox = Inbox()
    inbox.first = name
    return inbox


def test_the_supervisor_asks_where_no_rank_could(asked):
    """The command dies of the signal as one does that imports torch."""
    dies = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    with Inbox() as inbox:
        ended = supervise([sys.executable, "-c", dies], inbox=inbox, ours=True)
        assert (ended.exit_code, ended.record) == (START_AGAIN, None)
        ask_to_be_queued_again(ended, inbox)
    noted = "update JobId=7 Comment=mine too trainckpt:no-run-began-before-restart-1"
    assert asked() == ["--oneliner show job 7", noted, "requeue 7"]


def test_a_later_start_notes_that_no_run_began_only_if_the_one_before_did(asked, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"))
    assert asked() == ["--oneliner show job 7", "requeue 7"]


def test_the_supervisor_asks_for_ranks_that_were_dumped_and_never_heard_the_signal(asked):
    dumped = AttemptRecord(1, outcome={"kind": "dump"})
    ask_to_be_queued_again(Ended(START_AGAIN, dumped), heard("SIGTERM"))
    assert asked() == ["--oneliner show job 7", "requeue 7"]


def test_what_was_set_when_the_run_was_launched_counts_wherever_it_is_resumed(asked):
    never = {"env": {"TRAINCKPT_REQUEUE": "never"}}
    dumped = AttemptRecord(1, outcome={"kind": "dump"}, facts=never)
    ask_to_be_queued_again(Ended(START_AGAIN, dumped), heard("SIGTERM"))
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), facts=never)
    assert asked() == []


@pytest.mark.parametrize(
    ("ended", "first", "variables"),
    [
        (Ended(START_AGAIN, AttemptRecord(1)), "SIGTERM", {}),
        (Ended(1, None), "SIGTERM", {}),
        (STOPPED, "", {}),
        (STOPPED, "SIGTERM", {"SLURM_PROCID": "1"}),
        (STOPPED, "SIGTERM", {"TRAINCKPT_REQUEUE": "never"}),
        (STOPPED, "SIGTERM", {"SLURM_JOB_ID": ""}),
    ],
    ids=["ranks did", "failed", "no signal", "another task", "never", "no Slurm"],
)
def test_nobody_is_asked_where_it_is_not_right(asked, monkeypatch, ended, first, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ask_to_be_queued_again(ended, heard(first))
    assert asked() == []


def test_whoever_pressed_ctrl_c_starts_it_again_himself(asked):
    ask_to_be_queued_again(STOPPED, heard(signal.Signals.SIGINT.name))
    assert "requeue 7" not in asked()

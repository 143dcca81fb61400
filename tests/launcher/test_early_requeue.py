"""A Slurm job that is stopped before its ranks have begun is queued again by the supervisor."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from trainckpt.attempt.launch import command_hash, recorded_options
from trainckpt.encryption.keys import parse_recipients
from trainckpt.errors import START_AGAIN, ConfigurationError
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher.early_requeue import FirstLaunch, ask_to_be_queued_again
from trainckpt.launcher.supervise import RunResult, supervise
from trainckpt.launcher.supervisor_signals import Inbox
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot.attempt_history import found_run
from trainckpt.stop import requeue

STOPPED = RunResult(START_AGAIN, None, 0, "a signal came")
FIRST = FirstLaunch("abc", ["python", "train.py"], None)
SHOW, REQUEUE = "show job 7", "requeue 7"
NOTED = "update JobId=7 Comment=mine  too trainckpt:no-run-began-before-restart-1:abc"
TAKEN_BACK = "update JobId=7 Comment=mine  too"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What a stand-in for Slurm's command was asked, in a job that runs."""
    command, log = tmp_path / "scontrol", tmp_path / "asked"
    command.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\n[ "$1" != update ] || [ ! -e hangs ] || exec sleep 60\n'
        '[ "$1" != requeue ] || [ ! -e refuses ] || exit 1\n[ "$1" != show ] || '
        "printf 'JobId=7\\n   JobState=RUNNING\\n   Comment=mine  too\\n   StdErr=/x\\n'\n"
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
        ask_to_be_queued_again(ended, inbox, first=FIRST)
    assert asked() == [SHOW, NOTED, REQUEUE]


@pytest.mark.parametrize("by", ["environment", "toml"])
def test_the_code_that_says_start_me_again_is_the_one_that_was_asked_for(asked, monkeypatch, by):
    """`configs/htcondor.sub` sets another; Slurm is asked all the same."""
    if by == "toml":
        Path("trainckpt.toml").write_text("exit_code = 85\n")
    else:
        monkeypatch.setenv("TRAINCKPT_EXIT_CODE", "85")
    dies = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); signal.pause()"
    with Inbox() as inbox:
        ended = supervise([sys.executable, "-c", dies], inbox=inbox, ours=True)
        assert ended.exit_code == 85
        assert supervise(["true"], inbox=inbox, ours=True).exit_code == 85  # a signal has come
        ask_to_be_queued_again(ended, inbox, first=FIRST)
    assert asked() == [SHOW, NOTED, REQUEUE]


def test_an_option_that_is_none_is_for_the_ranks_to_refuse(monkeypatch):
    monkeypatch.setenv("TRAINCKPT_EXIT_CODE", "many")
    assert supervise(["true"]).exit_code == 0


def test_a_restart_that_is_stopped_while_it_imports_is_queued_again_by_the_supervisor(asked):
    """The attempt before failed; none of its ranks has asked. One that stopped has."""
    failed = AttemptRecord(1, outcome={"outcome": "killed", "exit_code": 137})
    ended = replace(STOPPED, record=failed, restarts=1, begun=True)
    ask_to_be_queued_again(ended, heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, REQUEUE]
    stopped = failed.with_(outcome={"outcome": "stopped", "kind": "snapshot"})
    ask_to_be_queued_again(replace(ended, record=stopped), heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, REQUEUE]


def test_a_rank_that_has_spoken_may_have_begun_a_run_though_no_record_can_be_read(asked, tmp_path):
    """Its place does not answer any more: nobody knows then what it has committed there."""
    gone = str(tmp_path / "gone")
    speaks = (
        "from trainckpt.attempt.status_files import RankStatusWriter\n"
        f"RankStatusWriter({gone!r}).update(attempt=1)"
    )
    ended = supervise([sys.executable, "-c", speaks], ours=True)
    assert (ended.record, ended.begun) == (None, True)
    ended = replace(ended, exit_code=START_AGAIN)
    ask_to_be_queued_again(ended, heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, REQUEUE]


def test_what_goes_on_from_a_run_never_says_that_none_began(asked):
    """`trainckpt resume`, stopped while it imports."""
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), facts={})
    assert asked() == [SHOW, REQUEUE]


def test_a_run_of_an_earlier_job_is_seen_and_so_is_a_place_that_cannot_be_asked(asked, tmp_path):
    found_run(open_directory(str(tmp_path / "run")))
    for run, argv in (("run", []), (None, ["train.py", "--out=run"]), ("s3://", [])):
        ask_to_be_queued_again(STOPPED, heard("SIGTERM"), first=FirstLaunch("abc", argv, run))
    assert asked() == [SHOW, REQUEUE] * 3
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), first=FirstLaunch("abc", [], "new"))
    assert asked()[6:] == [SHOW, NOTED, REQUEUE]


def test_a_note_that_hangs_does_not_hold_up_the_requeue(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(requeue, "NOTE_S", 0.1)
    (tmp_path / "hangs").touch()
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), first=FIRST)
    assert asked()[-1] == REQUEUE


def test_where_the_job_goes_on_the_note_is_taken_back(asked, tmp_path):
    (tmp_path / "refuses").touch()
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, NOTED, REQUEUE, TAKEN_BACK]


def test_options_that_cannot_be_read_or_were_too_secret_to_keep_do_not_lose_the_requeue(asked):
    secret = {"TRAINCKPT_TIERS": "s3://<redacted>@x/y", "TRAINCKPT_GRACE": "<redacted>"}
    assert recorded_options({"env": secret}).tiers == ()
    for env in (secret, {"TRAINCKPT_GRACE": "no time"}):
        ask_to_be_queued_again(STOPPED, heard("SIGTERM"), facts={"env": env})
    assert asked() == [SHOW, REQUEUE] * 2
    unknown = recorded_options({"env": {"TRAINCKPT_ENCRYPT_TO": "<redacted>"}}).encrypt_to
    with pytest.raises(ConfigurationError):  # else its images would lie there in the clear
        parse_recipients(unknown)


def test_commands_are_told_apart_by_what_makes_their_runs_differ():
    same = ["train.py"], "/a", None, {"SLURM_RESTART_COUNT": "1"}
    words = {
        command_hash(["train.py"], "/a", None, {}),
        command_hash(["train.py", "--seed=1"], "/a", None, {}),
        command_hash(["train.py"], "/b", None, {}),
        command_hash(["train.py"], "/a", "run", {}),
        command_hash(["train.py"], "/a", None, {"TRAINCKPT_TIERS": "/c"}),
    }
    assert len(words) == 5
    assert command_hash(*same) in words


def test_a_later_start_notes_that_no_run_began_only_if_the_one_before_did(asked, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, REQUEUE]


def test_the_supervisor_asks_for_ranks_that_were_dumped_and_never_heard_the_signal(asked):
    dumped = AttemptRecord(1, outcome={"kind": "dump"})
    ask_to_be_queued_again(RunResult(START_AGAIN, dumped), heard("SIGTERM"), first=FIRST)
    assert asked() == [SHOW, REQUEUE]


def test_what_was_set_when_the_run_was_launched_counts_wherever_it_is_resumed(asked):
    never = {"env": {"TRAINCKPT_REQUEUE": "never"}}
    dumped = AttemptRecord(1, outcome={"kind": "dump"}, facts=never)
    ask_to_be_queued_again(RunResult(START_AGAIN, dumped), heard("SIGTERM"))
    ask_to_be_queued_again(STOPPED, heard("SIGTERM"), facts=never)
    assert asked() == []


@pytest.mark.parametrize(
    ("ended", "first", "variables"),
    [
        (RunResult(START_AGAIN, AttemptRecord(1)), "SIGTERM", {}),
        (RunResult(1, None), "SIGTERM", {}),
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
    ask_to_be_queued_again(STOPPED, heard(signal.Signals.SIGINT.name), first=FIRST)
    assert asked() == [SHOW]

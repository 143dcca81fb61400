"""A second start of a run that still trains says so, and no other start does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from trainckpt.attempt import heartbeat
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.resume.resume import still_alive
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path)


def begun(tier, host=None, pid=None, beats=True, **more):
    """An attempt of these processes; the number of the next one."""
    facts = {"hosts": [host or socket.gethostname()], "pids": [pid or os.getpid()]}
    made = attempt_history.claim(tier, lambda n: AttemptRecord(n, facts=facts, **more)).attempt
    if beats:
        heartbeat.path_of(tier, made).write_text("1\n")
    return made + 1


def test_an_attempt_that_gave_a_sign_of_life_is_named_with_its_host(tier):
    second = begun(tier)
    said = still_alive(tier, second)
    assert said.startswith("attempt 1 of this run was alive 0 s ago")
    assert f"({socket.gethostname()})" in said
    third = begun(tier, host="elsewhere", pid=1)
    assert "(elsewhere)" in still_alive(tier, third)


def test_one_that_ended_was_killed_here_or_is_silent_is_not(tier):
    assert still_alive(tier, 1) == ""
    assert still_alive(tier, begun(tier, beats=False)) == ""
    assert still_alive(tier, begun(tier, outcome={"outcome": "stopped"})) == ""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert still_alive(tier, begun(tier, pid=dead.pid)) == ""
    last = begun(tier)
    os.utime(heartbeat.path_of(tier, last - 1), (1, 1))
    assert still_alive(tier, last) == ""

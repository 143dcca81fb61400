"""Who lives, among the processes of this host."""

import os
import subprocess

import pytest

from trainckpt.attempt.heartbeat import is_alive
from trainckpt.dumping.handshake import DumpRequest


def test_who_runs_lives_and_who_is_gone_does_not():
    child = subprocess.Popen(["sleep", "600"])
    assert is_alive(child.pid)
    child.kill()
    child.wait()
    assert not is_alive(child.pid)


def test_who_has_ended_and_was_waited_for_by_nobody_does_not_live():
    """A supervisor whose own parent is busy: ranks would wait for it in vain."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    try:
        os.kill(child.pid, 0)  # a signal to it is no error
        assert not is_alive(child.pid)
        assert DumpRequest("1", child.pid).is_alone
    finally:
        child.wait()


def test_another_users_process_lives(monkeypatch):
    def refuse(pid, number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert is_alive(os.getpid())


@pytest.mark.parametrize("pid", [10**9, 10**30])
def test_a_number_that_no_process_can_have_is_nobodys(pid):
    assert not is_alive(pid)

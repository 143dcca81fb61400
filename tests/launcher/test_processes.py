"""Processes of a launch: told apart by more than their ids, ended ones included."""

from __future__ import annotations

import os
import subprocess
import sys

from trainckpt.launcher.processes import child_above, children, environment, is_ours, living

ME = os.getpid()


def test_a_process_lives_until_it_has_ended_and_is_a_child_until_it_was_waited_for():
    child = subprocess.Popen(["sleep", "600"])
    found = living(child.pid)
    assert found is not None
    assert found == living(child.pid)
    assert found != living(ME)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert living(child.pid) is None
    assert child.pid in children(ME)
    child.wait()
    assert child.pid not in children(ME)
    for nobody in (child.pid, -1, 2**30, 2**70):
        assert living(nobody) is None
        assert children(nobody) == []
        assert environment(nobody) == {}


def test_who_reported_itself_is_known_by_its_launch_or_else_by_its_start():
    reported_at = 1e9  # long before any process of this machine
    child = subprocess.Popen(["sleep", "600"], env={"TRAINCKPT_SUPERVISOR": "/one"})
    try:
        while "TRAINCKPT_SUPERVISOR" not in environment(child.pid):
            assert child.poll() is None
        assert is_ours(living(child.pid), "/one", reported_at)
        assert not is_ours(living(child.pid), "/two", reported_at)
    finally:
        child.kill()
        child.wait()
    with subprocess.Popen(["sleep", "600"], env={}) as unmarked:
        found = living(unmarked.pid)
        assert is_ours(found, "/one", found.create_time())
        assert not is_ours(found, "/one", reported_at)
        unmarked.kill()


def test_the_child_above_is_the_one_that_a_process_descends_from():
    text = "from subprocess import Popen; p = Popen(['sleep', '600']); print(p.pid, flush=True)"
    text += "; p.wait()"
    child = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    try:
        assert child_above(grandchild, ME) == child.pid
        assert child_above(child.pid, ME) == child.pid
        assert child_above(grandchild, grandchild) == grandchild, "it is none of its own"
    finally:
        os.kill(grandchild, 9)
        child.communicate()

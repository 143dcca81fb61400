"""A supervisor that is killed while it dumps leaves no tree that is stopped for ever."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from tests.limits import HANG_S
from tests.process_dump.test_refusals import NAME, VARIABLE
from trainckpt.launcher.processes import orphans_come_here
from trainckpt.process_dump import dump, dump_guard, restore

DUMPS_AND_IS_KILLED = """
import os, pickle, signal, sys
from trainckpt.process_dump import dump
from trainckpt.storage.local import LocalTier

class Deadly(LocalTier):
    def replace(self, key, data):
        if after:
            super().replace(key, data)
        os.kill(os.getpid(), signal.SIGKILL)

root, order, variable, after = pickle.load(sys.stdin.buffer)
dump.take(Deadly(root), order, variable)
"""


def killed_supervisor(counting, *, after_commit=False):
    """One that dumps, and is killed beside its commit, if nobody does it earlier."""
    given = pickle.dumps((counting.tier.root, counting.order(), VARIABLE, after_commit))
    done = subprocess.run(
        [sys.executable, "-c", DUMPS_AND_IS_KILLED],
        input=given,
        capture_output=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def wait_until_gone(path):
    until = time.monotonic() + HANG_S
    while path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_before_the_commit_the_tree_goes_on_and_no_image_is_left(counting):
    killed_supervisor(counting)
    assert counting.counts_on()
    wait_until_gone(counting.tier.root / NAME.folder)
    counting.dump()  # it can be dumped still


def test_it_goes_on_only_after_a_criu_that_outlives_its_supervisor(counting, tmp_path):
    """CRIU would stop it again, or find it running."""
    kills = f'case $1 in dump) kill -9 $PPID; sleep 0.3;; esac; exec {counting.program} "$@"'
    (tmp_path / "criu").write_text(f"#!/bin/sh\n{kills}\n")
    (tmp_path / "criu").chmod(0o755)
    counting.program, real = tmp_path / "criu", counting.program
    killed_supervisor(counting)
    wait_until_gone(counting.tier.root / NAME.folder)
    assert counting.counts_on()
    counting.program = real
    counting.dump()


def test_after_the_commit_the_tree_is_ended_and_the_dump_is_restored(counting):
    killed_supervisor(counting, after_commit=True)
    assert counting.process.wait(HANG_S) == -signal.SIGKILL
    record = restore.load(counting.tier, "run", NAME)
    assert dump.await_gone(record) == []
    counting.restore(record)
    assert counting.counts_on()


def test_a_guard_that_does_not_start_refuses_the_dump(tmp_path, monkeypatch):
    """As under a Python that misses a library: its end is seen, and nothing is dumped unguarded."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    guard = dump_guard.guarded(os.getpid(), "A=b", tmp_path / "dump.json")
    with pytest.raises(OSError, match="the guard of the dump ended with 1"), guard:
        raise AssertionError


GUARDS_AND_IS_KILLED = """
import os, signal, sys
from pathlib import Path
from trainckpt.process_dump.dump_guard import guarded

with guarded(int(sys.argv[1]), "A=b", Path(sys.argv[2]), may_go_on=sys.argv[3] == "on"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("word", "ends"), [("end", True), ("on", False)])
def test_a_tree_without_its_gpu_state_is_ended(tmp_path, word, ends):
    """Its supervisor alone could have put that back. What it has started is ended as well."""
    record, says = tmp_path / "dump" / "dump.json", "sleep 600 & echo $!; wait"
    record.parent.mkdir()
    with subprocess.Popen(["sh", "-c", says], stdout=subprocess.PIPE, text=True) as process:
        pids = [process.pid, int(process.stdout.readline())]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with orphans_come_here():
            arguments = [str(process.pid), str(record), word]
            done = subprocess.run(
                [sys.executable, "-c", GUARDS_AND_IS_KILLED, *arguments],
                check=False,
                timeout=HANG_S,
            )
        assert done.returncode == -signal.SIGKILL
        wait_until_gone(record.parent)
        if ends:
            assert process.wait(HANG_S) == -signal.SIGKILL
        assert [state(pid) in "ZX" for pid in pids] == [ends, ends]
        assert "T" not in [state(pid) for pid in pids]
        for pid in pids if not ends else ():
            os.kill(pid, signal.SIGKILL)


def state(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123 - a line of it
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def test_members_are_the_root_what_it_started_and_what_has_the_mark():
    says = "sleep 600 & echo $!; wait"
    with (
        subprocess.Popen(["sh", "-c", says], stdout=subprocess.PIPE, text=True) as root,
        subprocess.Popen(["sleep", "600"], env={"A": "b"}) as marked,
        subprocess.Popen(["sleep", "600"], env={"A": "bc"}) as other,
    ):
        child = int(root.stdout.readline())
        try:
            assert dump_guard.members(root.pid, "A=b") == sorted([root.pid, child, marked.pid])
        finally:
            for pid in (root.pid, child, marked.pid, other.pid):
                os.kill(pid, signal.SIGKILL)

"""What CRIU has restored waits until an attempt is claimed; before that nothing of it has run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.process_dump.test_numbers import IDLE_THREADS
from tests.process_dump.test_refusals import NAME, PROGRAM, Counting
from trainckpt.process_dump import dump, gate, tree
from trainckpt.process_dump.gate import Gate
from trainckpt.supervisor.adopted import orphans_come_here

CLAIMS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from trainckpt.format.dump import DumpName
from trainckpt.process_dump import restore
from trainckpt.tiers.local import LocalTier

tier = LocalTier(Path(sys.argv[1]))
record = restore.load(tier, "run", DumpName.parse(sys.argv[2]))
def claim():
    print("there", *record.tasks, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
with restore.examined(tier, record) as whole:
    whole.bring_back(2, claim)
"""


class NotClaimedError(Exception):
    """Whatever keeps an attempt from being claimed."""


@pytest.fixture
def counting(criu_here, tmp_path):
    """A process of several threads that runs."""
    found = Counting(tmp_path, criu_here.program, criu_here.version, IDLE_THREADS + PROGRAM)
    try:
        assert found.counts_on()
        yield found
    finally:
        found.end()


def descriptors(process):
    return sorted(int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir())


def test_until_it_is_claimed_nothing_of_a_dump_runs_and_it_stays_of_use(counting):
    had = descriptors(counting.process)
    record = counting.dump()
    before = counting.log.read_bytes()

    def claim():
        assert tree.taken(record.tasks) == [*record.tasks], "all of it is there"
        time.sleep(0.2)  # it counts a hundred times a second
        assert counting.log.read_bytes() == before
        raise NotClaimedError

    for _ in range(2):
        with pytest.raises(NotClaimedError):
            counting.restore(record, claim=claim)
        assert tree.taken(record.tasks) == [], "something of the tree is left"
        assert counting.log.read_bytes() == before
    counting.restore(record)
    assert counting.counts_on()
    assert descriptors(counting.restored) == had


def test_a_supervisor_that_is_killed_as_it_claims_leaves_no_process_and_the_dump(counting):
    record = counting.dump()
    with orphans_come_here():
        done = subprocess.run(
            [sys.executable, "-c", CLAIMS_AND_DIES, counting.tier.root, str(NAME)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split() == ["there", *map(str, record.tasks)]
        assert dump.await_gone(record) == []
    counting.restore(record)
    assert counting.counts_on()


def test_what_ends_without_asking_is_not_waited_for(tmp_path):
    asked = []
    with Gate(tmp_path) as found:
        process = subprocess.Popen(["true"], pass_fds=found.theirs)
        assert not found.attend(lambda: asked.append(1))
        assert process.wait() == 0
    assert asked == []


@pytest.mark.parametrize(("action", "asks"), [("pre-restore", False), ("post-restore", True)])
def test_only_once_all_is_there_the_script_asks(action, asks, tmp_path):
    environment = {**os.environ, "CRTOOLS_SCRIPT_ACTION": action}
    with Gate(tmp_path) as found:
        as_criu = ["sh", "-c", f"{found.script}; exit $?"]
        process = subprocess.Popen(as_criu, pass_fds=found.theirs, env=environment)
        assert found.attend(lambda: None) is asks
        assert process.wait() == 0


def test_the_script_lies_where_programs_may(tmp_path, monkeypatch):
    (tmp_path / "no").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no"))
    monkeypatch.setattr(gate, "_may_run_programs", lambda folder: folder != tmp_path / "no")
    with Gate(tmp_path) as found:
        assert found.script.parents[1] == tmp_path
        assert found.script.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["no"]

"""What CRIU has restored waits until an attempt is claimed; before that nothing of it has run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.process_dump.test_refusals import NAME, PROGRAM, Counting
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher.processes import orphans_come_here
from trainckpt.process_dump import criu, dump, process_tree
from trainckpt.process_dump.criu import RestoreGate
from trainckpt.snapshot import attempt_history

CLAIMS_AND_DIES = """
import os, signal, sys
from pathlib import Path
from trainckpt.format.dump import DumpName
from trainckpt.process_dump import restore
from trainckpt.storage.local import LocalTier

tier = LocalTier(Path(sys.argv[1]))
record = restore.load(tier, "run", DumpName.parse(sys.argv[2]))
def claim():
    print("there", *record.tasks, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
with restore.examined(tier, record) as whole:
    whole.bring_back(2, claim)
"""


FORKS = """
import os
if os.fork() == 0:
    while True:
        __import__("time").sleep(1e6)
"""


class NotClaimedError(Exception):
    """Whatever keeps an attempt from being claimed."""


def descriptors(pid="self"):
    return sorted(path.name for path in Path(f"/proc/{pid}/fd").iterdir())


def test_until_it_is_claimed_nothing_of_a_dump_runs_and_it_stays_of_use(counting):
    had = descriptors(counting.process.pid)
    record = counting.dump()
    before = counting.log.read_bytes()

    def claim():
        assert process_tree.taken(record.tasks) == [*record.tasks], "all of it is there"
        time.sleep(0.2)  # it counts a hundred times a second
        assert counting.log.read_bytes() == before
        raise NotClaimedError

    for _ in range(2):
        with pytest.raises(NotClaimedError):
            counting.restore(record, claim=claim)
        assert process_tree.taken(record.tasks) == [], "something of the tree is left"
        assert counting.log.read_bytes() == before
    counting.restore(record)
    assert counting.counts_on()
    assert descriptors(counting.restored.pid) == had


def test_a_supervisor_that_is_killed_as_it_claims_leaves_no_process_and_the_dump(counting):
    record = counting.dump()
    with orphans_come_here():
        done = subprocess.run(
            [sys.executable, "-c", CLAIMS_AND_DIES, counting.tier.root, str(NAME)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout.split() == ["there", *map(str, record.tasks)]
        assert dump.await_gone(record) == []
    counting.restore(record)
    assert counting.counts_on()


def test_below_a_first_process_that_waits_for_nobody_what_is_not_claimed_is_gone_too(
    criu_here, tmp_path
):
    """Some containers have one: orphans keep their numbers there."""
    found = Counting(tmp_path, criu_here.program, criu_here.version, FORKS + PROGRAM)
    try:
        assert found.counts_on()
        record = found.dump()
        assert len(record.tasks) == 2
        attempt_history.found_run(found.tier)
        attempt_history.claim(found.tier, partial(AttemptRecord, parent=None))
        done = subprocess.run(
            [sys.executable, "-m", "tests.process_dump.refused_resume", found.tier.root, str(NAME)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "is not restored: attempt 2 began meanwhile" in done.stdout, done.stderr
        assert "left: []" in done.stdout
    finally:
        found.end()


def test_what_ends_without_asking_is_not_waited_for():
    asked, before = [], descriptors()
    with RestoreGate() as found:
        process = subprocess.Popen(["true"], pass_fds=found.theirs)
        assert not found.attend(process, lambda: asked.append(1))
        assert process.wait() == 0
    assert asked == []
    assert descriptors() == before


def test_what_ends_is_not_waited_for_though_something_that_it_began_goes_on(monkeypatch):
    """It has the other end of the pipe, and will never ask."""
    monkeypatch.setattr(criu, "LOOK_EVERY_S", 0.05)
    with RestoreGate() as found:
        goes_on = ["sh", "-c", "sleep 600 & echo $!"]
        process = subprocess.Popen(goes_on, pass_fds=found.theirs, stdout=subprocess.PIPE)
        number = int(process.stdout.readline())
        try:
            assert not found.attend(process, lambda: None)
        finally:
            os.kill(number, signal.SIGKILL)
            process.stdout.close()


@pytest.mark.parametrize(("action", "asks"), [("pre-restore", False), ("post-restore", True)])
def test_only_once_all_is_there_the_script_asks(action, asks):
    environment = {**os.environ, "CRTOOLS_SCRIPT_ACTION": action}
    with RestoreGate() as found:
        as_criu = ["sh", "-c", f"{found.script}; exit $?"]
        process = subprocess.Popen(as_criu, pass_fds=found.theirs, env=environment)
        assert found.attend(process, lambda: None) is asks
        assert process.wait() == 0


def test_where_nothing_can_be_asked_nothing_is_dumped(criu_here, monkeypatch):
    assert criu.why_no_gate() == ""

    def none(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", none)
    assert "Permission denied" in criu.examine().why_not

"""What an attempt has left undone is copied by whoever started it, once it is over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.lifecycle.test_stop_tier import stop_on_a_slow_disk
from tests.lifecycle.training import crashed, record, usable
from tests.s3_servers import BUCKET
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt import AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE, Told
from trainckpt.snapshot.attempts import read_attempts, replace
from trainckpt.supervisor.flush_left import LEAVE_S, _limit_s, left_by
from trainckpt.supervisor.held import HeldMemory
from trainckpt.supervisor.record import NamedRun
from trainckpt.supervisor.signals import Inbox
from trainckpt.supervisor.supervise import supervise
from trainckpt.tiers import memfd, memory
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.object_store import open_object_store

FROM_HERE = {"PYTHONPATH": os.pathsep.join(sys.path)}
# Tells of itself what rank 0 of an attempt does, and dies.
RANK = """
    import json, os, sys
    told = {"rank": 0, "pid": os.getpid(), "host": "here", "run": sys.argv[1],
            "attempt": int(sys.argv[2]), "state": "claimed"}
    with open(os.path.join(os.environ["TRAINCKPT_SUPERVISOR"], "rank0.json"), "w") as file:
        json.dump(told, file)
    sys.exit(9)
"""


@contextlib.contextmanager
def left_in_held_memory(run, monkeypatch):
    """A process saved to memory that this one holds, as /dev/shm has no room for it, and died."""
    monkeypatch.setattr(memory, "_ROOM_BYTES", 1 << 60)
    folder = run.parent / "told"
    folder.mkdir()
    with contextlib.closing(HeldMemory()) as held:
        with monkeypatch.context() as supervised, held.serving(folder):
            supervised.setenv(SUPERVISOR_VARIABLE, str(folder))
            crashed(run, 9, every="3 steps", memory_every="1 step", inside=saved)
        yield


def ended(run, number):
    """The supervisor's word on an attempt whose process died just now; what it said."""
    said = []
    command = [sys.executable, "-c", textwrap.dedent(RANK), str(run), str(number)]
    return supervise(command, say=said.append), said


def test_what_ends_with_the_supervisor_is_brought_to_the_run_s_place_before(tmp_path, monkeypatch):
    """Saves to memory alone, which the supervisor holds, since /dev/shm has no room for it."""
    run = tmp_path / "run"
    with left_in_held_memory(run, monkeypatch):
        (newest,) = usable(run)
        place = memory.MemoryPlace.found(str(run))
        assert place.taken.memfd > 0
        later = place.folders()[-1].removeprefix("snapshots/")
        assert SnapshotName.parse(later) > SnapshotName.parse(newest)
        end, said = ended(run, 1)
    assert f"copying {later}, which local lacks" in said[0]
    assert f"{later} was in memory, and is in local" in said[1]
    assert usable(run) == [newest, later]
    assert end.record.newest_commit == later
    assert not place.root.exists()


# Its first launch leaves its newest snapshot in memory alone; the next never claims an attempt.
HOLDS = """
    import os, sys
    if os.environ.get("TRAINCKPT_RESTART"):
        sys.exit(9)
    from tests.lifecycle.training import crashed
    from trainckpt.tiers import memory
    memory._ROOM_BYTES = 1 << 60
    waits = lambda ckpt, _: ckpt._attempt.saver.wait()
    crashed(sys.argv[1], 9, every="3 steps", memory_every="1 step", inside=waits)
    os._exit(9)
"""


@pytest.mark.skipif(not memfd.is_available(), reason="the system has no memfd")
@pytest.mark.parametrize(
    "ends",
    [
        "a restart that dies",
        pytest.param("a signal", marks=pytest.mark.long),
        pytest.param("an error", marks=pytest.mark.long),
    ],
)
def test_what_the_supervisor_holds_is_brought_to_the_place_whatever_ends_it(tmp_path, ends):
    said, run, python = [], tmp_path / "run", tmp_path / "python"
    python.symlink_to(sys.executable)

    def say(line):
        said.append(line)
        if "restart 1 of 1" in line and ends == "a signal":
            os.kill(os.getpid(), signal.SIGTERM)
        elif "restart 1 of 1" in line and ends == "an error":
            python.unlink()

    command = [str(python), "-c", textwrap.dedent(HOLDS), str(run)]
    errors = ConfigurationError if ends == "an error" else ()
    with contextlib.suppress(errors):
        end = supervise(command, say=say, max_restarts=1, ours=True, environment=FROM_HERE)
        assert end.record.newest_commit == usable(run)[-1]
        assert end.exit_code == (75 if ends == "a signal" else 9)
    assert any("was in memory, and is in local" in line for line in said), said
    assert usable(run)[-1].startswith("s4")


@pytest.mark.skipif(not memfd.is_available(), reason="the system has no memfd")
def test_what_ends_with_the_supervisors_of_several_hosts_is_said_to_be_lost(tmp_path, monkeypatch):
    """No next attempt will bring it together."""
    run = tmp_path / "run"
    with left_in_held_memory(run, monkeypatch):
        (newest,) = usable(run)
        later = memory.MemoryPlace.found(str(run)).folders()[-1].removeprefix("snapshots/")
        tier = LocalTier(run)
        first = read_attempts(tier)[1]
        replace(tier, first.with_(facts={**first.facts, "hosts": ["one", "two"]}))
        _, (_, why, lost) = ended(run, 1)
    assert why == "it lies in memory that the supervisors of several hosts hold, and ends with them"
    assert lost.startswith(f"{later} was in memory that the supervisor held, and is lost")
    assert lost.endswith(f"the next attempt goes on from {newest}")


def saved(ckpt, _):
    """Returns once what was saved is committed: an exception waits 5 s for it, and no longer."""
    ckpt._attempt.saver.wait()


def test_a_dead_attempt_s_newest_snapshot_is_copied_to_the_tiers_that_lack_it(
    tmp_path, monkeypatch
):
    """Looked after from another folder: a tier's path is meant as where the run was launched."""
    monkeypatch.chdir(tmp_path)
    tier = tmp_path / "mount" / "far"
    (tmp_path / "mount").write_text("")  # does not answer
    crashed(tmp_path / "run", 0)  # now it is known that no tier holds the run
    crashed(tmp_path / "run", 9, tiers=[tier], inside=saved)
    newest = usable(tmp_path / "run")[-1]

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("TRAINCKPT_TIERS", "mount/far")
    end, said = ended(tmp_path / "run", 2)
    # Whoever recorded the end first said why.
    first = re.compile(
        r"attempt 2 failed by (rank 0 ended with 9|Crash\(\)): "
        f"copying {newest}, which far lacks; a further signal ends that"
    )
    assert first.fullmatch(said[0])
    assert said[1].startswith("the tier far does not answer: ")
    assert "not all of it was copied" in said[-1]
    assert end.record.outcome["tiers"] == ["local"]

    (tmp_path / "mount").unlink()
    end, said = ended(tmp_path / "run", 2)
    assert first.fullmatch(said[0])
    assert re.fullmatch(rf"{newest} is in far: 0.0 MB in [0-9.]+ s", said[-1])
    assert usable(tier) == [newest]
    assert end.record.outcome["tiers"] == ["local", "far"]
    assert record(tier, 2)["outcome"] == record(tmp_path / "run", 2)["outcome"]
    assert record(tmp_path / "run", 2)["tier_commits"] == {"far": newest}

    assert list(Path.cwd().iterdir()) == []
    named = NamedRun(str(tmp_path / "run"), ["python"], str(tmp_path), 1)
    assert [each["url"] for each in named._tiers["tiers"]] == [str(tier)]

    end, said = ended(tmp_path / "run", 2)
    assert said == []  # there is nothing left to do
    assert os.environ.get("TRAINCKPT_SUPERVISOR") is None


def test_what_is_in_memory_alone_is_brought_to_the_place_and_from_there_to_the_tiers(tmp_path):
    run, far = tmp_path / "run", tmp_path / "far"
    stop_on_a_slow_disk(run, tiers=[far])
    newest = record(run, 1)["outcome"]["snapshot"]
    assert newest not in usable(run)

    end, said = ended(run, 1)
    assert said[0].startswith(
        f"attempt 1 stopped by maintenance: copying {newest}, which local, far"
    )
    assert said[1].startswith(f"{newest} was in memory, and is in local after ")
    assert said[-1].startswith(f"{newest} is in far: ")
    assert end.record.outcome["tiers"] == ["local", "far"]
    assert end.record.newest_commit == newest
    assert usable(run)[-1] == usable(far)[-1] == newest
    assert record(far, 1) == record(run, 1)


def test_a_killed_run_s_newest_snapshot_is_in_the_store_when_its_supervisor_returns(
    tmp_path, rclone_server, at
):
    at(rclone_server)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    settings = {"options": {"tiers": url, "every": "1 steps, s3: never"}}
    script = [sys.executable, "-m", "tests.lifecycle.deadline_script", str(tmp_path / "run"),
              json.dumps(settings)]  # fmt: skip
    said = []

    def kill(process):
        until = time.monotonic() + 60
        while "saved s2~1.2" not in (tmp_path / "out").read_text() and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.02)
        process.kill()

    with (tmp_path / "out").open("wb") as output:
        end = supervise(script, output=output, watch=kill, ours=True, say=said.append)
    newest = end.record.outcome["snapshot"]
    why = end.record.outcome["reason"]
    assert end.record.outcome["outcome"] == "killed", (tmp_path / "out").read_text()
    assert said[0] == (
        f"attempt 1 killed by {why}: copying {newest}, which s3 lacks; a further signal ends that"
    )
    assert said[-1].startswith(f"{newest} is in s3: ")
    assert end.record.outcome["tiers"] == ["local", "s3"]
    store = open_object_store(url)
    assert store.list("snapshots") == [newest]
    assert store.size(f"snapshots/{newest}/manifest.json")


def test_copying_ends_before_the_grace_does_that_the_stops_signal_began():
    inbox, ranks = Inbox(), [Told(0, 1, "here", "run", grace_s=grace) for grace in (None, 60, 30)]
    assert _limit_s(ranks, inbox) is None  # nobody said when
    inbox.stop_s = time.monotonic() - 10
    assert _limit_s(ranks, inbox) <= 30 - 10 - LEAVE_S
    assert _limit_s(ranks[:1], inbox) is None  # nobody said how long


FAR = {"tiers": [{"name": "far", "url": "/far"}]}


@pytest.mark.parametrize(
    ("newest", "facts", "expected", "outcome"),
    [
        (None, FAR, [], None),
        ("s3~1.1", {}, [], None),
        ("s3~1.1", FAR, [], None),  # an older attempt's: it has seen to it
        ("s3~2.1", FAR, ["far"], None),
        ("s3~2.1", {**FAR, "tier_commits": {"far": "s2~2.0"}}, ["far"], None),
        ("s3~2.1", {**FAR, "tier_commits": {"far": "s3~2.1"}}, [], None),
        ("s3~2.1", {"tiers": "far"}, [], None),
        ("s3~2.1", FAR, ["far"], {"snapshot": "dump~2.2"}),  # the one beneath the dump
        ("s3~2.1", FAR, ["far"], {"snapshot": None}),
        (None, FAR, ["far"], {"snapshot": "dump~2.2"}),  # the dump itself
        (None, FAR, [], {"snapshot": "dump~1.2"}),  # it began from that one
        ("s3~2.1", FAR, ["local", "far"], {"snapshot": "s4~2.2", "tiers": ["memory"]}),
    ],
)
def test_what_a_record_says_that_its_tiers_lack(newest, facts, expected, outcome):
    left = left_by(AttemptRecord(2, newest_commit=newest, facts=facts, outcome=outcome))
    assert (list(left.tiers) if left is not None else []) == expected

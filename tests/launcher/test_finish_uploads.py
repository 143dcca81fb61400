"""What an attempt has left undone is copied by whoever started it, once it is over."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.end_to_end.training import crashed, record, usable
from tests.s3_servers import BUCKET
from tests.stop.test_final_save import stop_on_a_slow_disk
from trainckpt.attempt.status_files import RankStatus
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher.finish_uploads import LEAVE_S, _limit_s, left_by
from trainckpt.launcher.supervise import supervise
from trainckpt.launcher.supervisor_signals import Inbox
from trainckpt.storage.object_store import open_object_store

# Tells of itself what rank 0 of an attempt does, and dies.
RANK = """
    import json, os, sys
    told = {"rank": 0, "pid": os.getpid(), "host": "here", "run": sys.argv[1],
            "attempt": int(sys.argv[2]), "state": "claimed"}
    with open(os.path.join(os.environ["TRAINCKPT_SUPERVISOR"], "rank0.json"), "w") as file:
        json.dump(told, file)
    sys.exit(9)
"""


def ended(run, number):
    """The supervisor's word on an attempt whose process died just now; what it said."""
    said = []
    command = [sys.executable, "-c", textwrap.dedent(RANK), str(run), str(number)]
    return supervise(command, say=said.append), said


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
        f"copying {newest} to far; another signal ends the copying"
    )
    assert first.fullmatch(said[0])
    assert said[1].startswith("the tier far does not answer: ")
    assert "not all files were copied" in said[-1]
    assert end.record.outcome["tiers"] == ["local"]

    (tmp_path / "mount").unlink()
    end, said = ended(tmp_path / "run", 2)
    assert first.fullmatch(said[0])
    assert re.fullmatch(rf"copied {newest} to far: 0.0 MB in [0-9.]+ s", said[-1])
    assert usable(tier) == [newest]
    assert end.record.outcome["tiers"] == ["local", "far"]
    assert record(tier, 2)["outcome"] == record(tmp_path / "run", 2)["outcome"]
    assert record(tmp_path / "run", 2)["tier_commits"] == {"far": newest}

    assert list(Path.cwd().iterdir()) == []
    end, said = ended(tmp_path / "run", 2)
    assert said == []  # there is nothing left to do
    assert os.environ.get("TRAINCKPT_SUPERVISOR") is None


def test_what_is_in_memory_alone_is_brought_to_the_place_and_from_there_to_the_tiers(tmp_path):
    run, far = tmp_path / "run", tmp_path / "far"
    stop_on_a_slow_disk(run, tiers=[far])
    newest = record(run, 1)["outcome"]["snapshot"]
    assert newest not in usable(run)

    end, said = ended(run, 1)
    assert said[0].startswith(f"attempt 1 stopped by maintenance: copying {newest} to local, far")
    assert said[1].startswith(f"copied {newest} from memory to local in ")
    assert said[-1].startswith(f"copied {newest} to far: ")
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
    script = [
        sys.executable,
        "-m",
        "tests.end_to_end.deadline_script",
        str(tmp_path / "run"),
        json.dumps(settings),
    ]
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
        f"attempt 1 killed by {why}: copying {newest} to s3; another signal ends the copying"
    )
    assert said[-1].startswith(f"copied {newest} to s3: ")
    assert end.record.outcome["tiers"] == ["local", "s3"]
    store = open_object_store(url)
    assert store.list("snapshots") == [newest]
    assert store.size(f"snapshots/{newest}/manifest.json")


def test_copying_ends_before_the_grace_does_that_the_stops_signal_began():
    inbox, ranks = (
        Inbox(),
        [RankStatus(0, 1, "here", "run", grace_s=grace) for grace in (None, 60, 30)],
    )
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
        (None, FAR, [], {"snapshot": "dump~2.2"}),  # a dump stays in the place
        ("s3~2.1", FAR, ["local", "far"], {"snapshot": "s4~2.2", "tiers": ["memory"]}),
    ],
)
def test_what_a_record_says_that_its_tiers_lack(newest, facts, expected, outcome):
    left = left_by(AttemptRecord(2, newest_commit=newest, facts=facts, outcome=outcome))
    assert (list(left.tiers) if left is not None else []) == expected

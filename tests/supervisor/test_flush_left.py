"""What an attempt has left undone is copied by whoever started it, once it is over."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from tests.lifecycle.training import crashed, record, usable
from trainckpt.format.attempt import AttemptRecord
from trainckpt.supervisor.flush_left import lacking
from trainckpt.supervisor.supervise import supervise

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


def test_a_dead_attempt_s_newest_snapshot_is_copied_to_the_tiers_that_lack_it(tmp_path):
    tier = tmp_path / "mount" / "far"
    (tmp_path / "mount").write_text("")  # does not answer
    crashed(tmp_path / "run", 0)  # now it is known that no tier holds the run
    crashed(tmp_path / "run", 9, tiers=[tier])
    newest = usable(tmp_path / "run")[-1]

    end, said = ended(tmp_path / "run", 2)
    assert "not all of it was copied" in said[-1]
    assert end.record.outcome["tiers"] == ["local"]

    (tmp_path / "mount").unlink()
    end, said = ended(tmp_path / "run", 2)
    assert said == ["copying the newest snapshot to far; a further signal ends that"]
    assert usable(tier) == [newest]
    assert end.record.outcome["tiers"] == ["local", "far"]
    assert record(tier, 2)["outcome"] == record(tmp_path / "run", 2)["outcome"]
    assert record(tmp_path / "run", 2)["tier_commits"] == {"far": newest}

    end, said = ended(tmp_path / "run", 2)
    assert said == []  # there is nothing left to do
    assert os.environ.get("TRAINCKPT_SUPERVISOR") is None


FAR = {"tiers": [{"name": "far", "url": "/far"}]}


@pytest.mark.parametrize(
    ("newest", "facts", "expected"),
    [
        (None, FAR, []),
        ("s3~1.1", {}, []),
        ("s3~1.1", FAR, []),  # an older attempt's: it has seen to it
        ("s3~2.1", FAR, ["far"]),
        ("s3~2.1", {**FAR, "tier_commits": {"far": "s2~2.0"}}, ["far"]),
        ("s3~2.1", {**FAR, "tier_commits": {"far": "s3~2.1"}}, []),
        ("s3~2.1", {"tiers": "far"}, []),
    ],
)
def test_what_a_record_says_that_its_tiers_lack(newest, facts, expected):
    assert lacking(AttemptRecord(2, newest_commit=newest, facts=facts)) == expected

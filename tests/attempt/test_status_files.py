"""Status files: what one process of a launch writes, another reads, or it reads nothing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest

from trainckpt.attempt.status_files import (
    RankProgress,
    RankStatus,
    RestoreAnnouncement,
    Supervisor,
    read_status,
    read_statuses,
    write_status,
)
from trainckpt.dumping.handshake import DumpRequest, RankQuiesced
from trainckpt.launcher.nested import Nested

STATUSES = [
    RankStatus(1, 5, "h", "/r", 2, "left", 30.0, "failed", -9, encrypt_to=("a", "b"), deaf=True),
    Supervisor(5, "pid:[1]"),
    RestoreAnnouncement(3, 1.5, None),
    DumpRequest("a", 5, "no room"),
    RankQuiesced("a", "s1~1.1", 2**40),
    Nested(5, "", "/folder", 75, "stopped", "SIGTERM", on_purpose=True),
    RankProgress(0.5, None, 2),
]


@pytest.mark.parametrize("status", STATUSES, ids=lambda status: type(status).__name__)
def test_a_status_is_read_as_it_was_written_and_a_changed_one_is_not(tmp_path, status):
    path, kind = tmp_path / "status.json", type(status)
    assert read_status(path, kind) is None
    write_status(path, status)
    assert read_status(path, kind) == status
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    body = asdict(status)
    for name in body:
        for value in ({}, [1], -(2**31), "a\0b"):
            path.write_text(json.dumps({**body, name: value}))
            assert read_status(path, kind) is None, (name, value)
    path.write_text(json.dumps({**body, "more": 1}))
    assert read_status(path, kind) is None
    path.write_text(json.dumps(dict(list(body.items())[1:])))
    assert read_status(path, kind) is None, "the first field has no default"


def test_the_oldest_of_several_comes_first_and_an_unreadable_one_is_left_out(tmp_path):
    for number, written_at in ((1, 300), (2, 200), (3, 100)):
        path = tmp_path / f"rest{number}.json"
        write_status(path, RankQuiesced(str(number)))
        os.utime(path, (written_at, written_at))
    (tmp_path / "rest3.json").write_text("[")
    found = read_statuses(tmp_path, "rest*.json", RankQuiesced)
    assert found == [(RankQuiesced("2"), 200), (RankQuiesced("1"), 300)]

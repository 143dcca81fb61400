"""Notice files: each is reported once, for its attempt only."""

from __future__ import annotations

import json

import pytest

from trainckpt.notice import Notice
from trainckpt.preemption import NoticeFiles


def write(folder, name, **content):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def test_a_notice_file_is_reported_once(tmp_path):
    """With what it says."""
    files = NoticeFiles(tmp_path / "notices", attempt=3)
    write(
        tmp_path / "notices", "3-a.json", reason="pause", seconds_left=30, mode="window", dump=False
    )
    assert files.poll() == [Notice("pause", mode="window", seconds_left=30.0)]
    assert files.poll() == []


def test_a_file_that_appears_later_is_found(tmp_path):
    """The folder need not exist at first."""
    files = NoticeFiles(tmp_path / "notices", attempt=1)
    assert files.poll() == []
    write(tmp_path / "notices", "1-a.json", reason="pause")
    write(tmp_path / "notices", "1-b.json")
    assert [notice.reason for notice in files.poll()] == ["pause", "notice file"]


def test_a_notice_for_another_attempt_is_ignored(tmp_path):
    """A leftover never stops the next attempt, nor does attempt 1 hear attempt 12's."""
    write(tmp_path, "12-a.json", reason="pause")
    write(tmp_path, "2-a.json", reason="pause")
    files = NoticeFiles(tmp_path, attempt=1)
    assert files.poll() == []
    assert files.bad == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"reason": 3}',
        '{"mode": "never"}',
        '{"seconds_left": -1}',
        '{"seconds_left": NaN}',
        '{"seconds_left": true}',
        "[" * 50_000,
        '"\\ud800',
    ],
)
def test_a_damaged_file_is_no_notice_and_is_remembered_with_the_reason(tmp_path, text):
    """It must not stop a run; the owner can log it."""
    (tmp_path / "1-a.json").write_text(text)
    said = []
    files = NoticeFiles(tmp_path, attempt=1, say=said.append)
    assert files.poll() == []
    assert list(files.bad) == ["1-a.json"]
    assert said == [], "somebody may be writing it"
    assert files.poll() == files.poll() == []
    assert said == [
        f"the notice file {tmp_path / '1-a.json'} is not a notice and stops no rank: "
        + files.bad["1-a.json"]
    ]


def test_a_file_that_was_half_written_is_read_when_it_is_whole(tmp_path):
    """Whoever writes it need not do so in one act."""
    path = tmp_path / "1-a.json"
    path.write_text('{"reason": "pau')
    said = []
    files = NoticeFiles(tmp_path, attempt=1, say=said.append)
    assert files.poll() == []
    path.write_text('{"reason": "pause"}')
    assert [notice.reason for notice in files.poll()] == ["pause"]
    assert files.bad == {}
    assert files.poll() == []
    assert said == []

"""Hostile input: whatever is parsed is read or refused by an error of ours, in bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import mutate, table
from tests.fuzz.engine import run_one
from trainckpt.attempt import heartbeat
from trainckpt.attempt.status_files import read_rank_statuses
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format import json_io, shard_file
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.launcher.torchrun_agent import ENDS, FAILURES, read_ends
from trainckpt.preemption.notice_file import NoticeFiles
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.storage.local import LocalTier

ROOT = Path(__file__).parents[2]
FINDINGS = sorted((Path(__file__).parent / "findings").glob("*.bin"))


@pytest.mark.parametrize("inputs", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_hundreds_of_hostile_inputs_of_each_kind_are_read_or_refused(tmp_path, inputs):
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--together",
        "--inputs",
        str(inputs),
        "--seed",
        "7",
        "--json",
        "--findings",
        str(tmp_path),
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)["parsers"]
    assert [(row["parser"], row["inputs"]) for row in rows] == [(n, inputs) for n in table.NAMES]
    assert all(row["branches"] > 3 for row in rows), "nothing was reached"


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: path.stem)
def test_what_was_once_found_is_refused_now(path):
    _, finding = run_one(table.parser(path.name.partition("-")[0]), path.read_bytes())
    assert finding is None


def test_every_seed_is_accepted_by_its_parser():
    for name in table.NAMES:
        parser = table.parser(name)
        outcomes = [run_one(parser, parser.spell(seed, Random(1)))[0] for seed in parser.seeds]
        assert "accepted" in outcomes, name


def test_a_run_can_be_repeated_by_its_seed():
    parser = table.parser("manifest")
    inputs = [
        [
            parser.spell(mutate.mutated(parser.seeds[0], rng, parser.seeds, parser.words), rng)
            for _ in range(50)
        ]
        for rng in (Random("3"), Random("3"))
    ]
    assert inputs[0] == inputs[1]


@pytest.mark.parametrize("deep", ["[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900])
def test_json_nested_too_deep_is_refused_wherever_the_stack_would_still_bear_it(deep):
    with pytest.raises(UnusableSnapshot, match=r"nested|not valid"):
        json_io.parse(deep.encode(), "it", max_bytes=10_000)


def test_nested_state_as_deep_as_values_may_be_is_read():
    deep = '{"$":"dict","of":[[1,' * 64 + "1" + "]]}" * 64
    assert json_io.parse(deep.encode(), "it", max_bytes=10_000)["$"] == "dict"


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UnusableSnapshot, match="not valid JSON"):
        json_io.parse(b'"\xed\xa0\x80"', "it", max_bytes=100)


def test_a_command_with_bytes_that_are_no_text_is_recorded_and_read_back():
    record = AttemptRecord(1, facts={"argv": [os.fsdecode(b"x\xff.py")]})
    assert AttemptRecord.load(record.dump(), "it").facts["argv"] == ["x\udcff.py"]


def test_metadata_that_is_no_text_is_refused():
    text = b'{"__metadata__":{"trainckpt":"\\ud800"}}'
    with pytest.raises(UnusableSnapshot, match="not valid JSON"):
        shard_file.parse(len(text).to_bytes(8, "little") + text, "it", file_bytes=8 + len(text))


@pytest.mark.parametrize("code", [[], {}, "1", 1.5, True, 2**40])
def test_an_exit_code_that_is_none_makes_a_record_damaged(code):
    record = AttemptRecord(1, outcome={"outcome": "failed", "exit_code": code})
    with pytest.raises(UnusableSnapshot):
        AttemptRecord.load(record.dump(), "it")


def test_a_snapshot_of_a_far_attempt_costs_no_time():
    found = [SnapshotName.parse("s1~999999999.1"), SnapshotName.parse("s1~1.1")]
    assert catalog.ancestry({}, found).keys() == {999999999, 1}


def test_a_stray_record_of_an_impossible_attempt_is_not_one(tmp_path):
    tier = LocalTier(tmp_path)
    for name in ("99999999999999", "007", "\u0663", "0"):
        tier.create(f"attempts/{name}.json", b"{}")
    assert attempt_history.read_attempts(tier) == {}
    assert attempt_history.newest(tier) == 0


def test_no_attempt_is_claimed_that_nobody_could_name(tmp_path):
    tier = LocalTier(tmp_path)
    tier.create("attempts/999999999.json", b"{}")
    with pytest.raises(UnusableSnapshot, match="the largest number"):
        attempt_history.claim(tier, AttemptRecord)


def test_the_record_of_another_attempt_is_a_damaged_one(tmp_path):
    tier = LocalTier(tmp_path)
    tier.create("attempts/2.json", AttemptRecord(7).dump())
    assert "that of 7" in attempt_history.read_attempts(tier)[2].facts["damaged"]


@pytest.mark.timeout(20)
def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(tmp_path):
    tier = LocalTier(tmp_path)
    tier.create("attempts/2.json", b"{}")
    for name in ("run.json", "attempts/1.json", "attempts/1.heartbeat", "1-x.json"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(TrainckptError):
        attempt_history.run_id(tier)
    assert "not a file" in attempt_history.read_attempts(tier)[1].facts["damaged"]
    assert heartbeat.age_s(tier, 1) is None
    notices = NoticeFiles(tmp_path, 1)
    assert notices.poll() == []
    assert notices.bad.keys() == {"1-x.json"}


HUGE = "1" + "0" * 400
NOTICES = ('{"seconds_left": ' + HUGE + "}", '{"seconds_left": 1e300}', "[" * 20_000, "\ud800", "")


@pytest.mark.parametrize("text", NOTICES, ids=["huge", "for_ever", "deep", "half", "empty"])
def test_a_notice_that_nobody_can_keep_is_none(tmp_path, text):
    (tmp_path / "1-x.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    notices = NoticeFiles(tmp_path, 1)
    assert notices.poll() == []
    assert notices.bad


TOLD = {"rank": 0, "pid": 5, "host": "h", "run": "/r"}
LIES = (
    {"rank": "0"},
    {"rank": True},
    {"pid": 2**40},
    {"exit_code": "1"},
    {"attempt": False},
    {"run": "a\0b"},
    {"grace_s": 1e300},
    {"how": 0},
    {"asked": 1},
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: "_".join(lie))
def test_a_rank_that_tells_what_cannot_be_has_told_nothing(tmp_path, lie):
    (tmp_path / "rank0.json").write_text(json.dumps({**TOLD, **lie}))
    (tmp_path / "rank1.json").write_text(json.dumps({**TOLD, "rank": 1}))
    (tmp_path / "rank2.json").write_text("[" * 20_000)
    assert list(read_rank_statuses(tmp_path)) == [1]


def test_ends_that_cannot_be_are_left_out(tmp_path):
    lines = [
        b'{"pid": 1, "code": 0, "at": 1%s}' % (b"0" * 400),
        b'{"pid": 1e400}',
        b'{"pid": 2, "code": 0, "at": NaN}',
        b"\xff\xfe",
        b"[" * 20_000,
        b'{"pid": 3, "code": 1, "at": 2.5}',
    ]
    (tmp_path / ENDS).write_bytes(b"\n".join(lines))
    (tmp_path / FAILURES).write_bytes(b"[" * 20_000)
    assert [end.pid for end in read_ends(tmp_path)] == [3]

"""Records: of runs, attempts, notices, and what ranks and the agent tell the supervisor."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

from tests.fuzz.engine import Parser
from tests.fuzz.mutate import spell
from tests.fuzz.snapshots import MANIFEST_2, sealed
from tests.fuzz.texts import as_json, envelope
from trainckpt.attempt import launch
from trainckpt.attempt.status_files import RankStatus, read_rank_statuses
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format.attempt_record import ENDED, AttemptRecord
from trainckpt.launcher.outcome import LaunchHistory, classify
from trainckpt.launcher.torchrun_agent import RankExit, read_ends
from trainckpt.preemption.notice_file import NoticeFiles
from trainckpt.resume import candidate_order
from trainckpt.snapshot import attempt_history, catalog

REFUSALS = (TrainckptError,)
MOST_WAIT_S = 9e9


def run_attempt(data):
    found = AttemptRecord.load(data, "it")
    use_record(found)
    again = AttemptRecord.load(found.with_(state=ENDED).dump(), "it")
    assert (again.attempt, again.outcome) == (found.attempt, found.outcome)


def use_record(found):
    """As a resume, a supervisor and the command line do."""
    before = {found.attempt: found}
    candidate_order.died_on(before, "s5~1.1")
    candidate_order.lost_since(before, "s5~1.1")
    catalog.ancestry(before, [])
    try:
        launch.recorded_command(found.facts)
    except TrainckptError:
        pass


class _Tier:
    """A tier in memory."""

    name = url = "memory"

    def __init__(self, files):
        self.files = files

    def size(self, key):
        return len(self.files[key]) if key in self.files else None

    def read(self, key, *, max_bytes):
        if key not in self.files or len(self.files[key]) > max_bytes:
            raise UnusableSnapshot(f"{key} is missing or too large")
        return self.files[key]

    def list(self, folder):
        inside = (key[len(folder) + 1 :] for key in self.files if key.startswith(f"{folder}/"))
        return sorted({name.partition("/")[0] for name in inside})

    def create(self, key, data):
        assert key not in self.files
        self.files[key] = data
        return True


def run_run(data):
    tier = _Tier({"run.json": data})
    found = attempt_history.run_id(tier)
    assert isinstance(found, str)
    assert attempt_history.found_run(tier) == found


def run_catalog(data):
    tree = envelope(data)
    if not isinstance(tree, dict):
        return
    files = {name: spell(body).encode() for name, body in tree.items() if "\0" not in name}
    tier = _Tier({**files, "run.json": b'{"format":1,"id":"run"}'})
    before = attempt_history.read_attempts(tier)
    assert all(number == record.attempt for number, record in before.items())
    assert attempt_history.newest(tier) == max(before, default=0)
    for record in before.values():
        use_record(record)
    found = catalog.read_catalog(tier, "run", before)
    candidate_order.order(tier, "run", before)
    for wanted in ("latest", "s5", "s5~1.1"):
        try:
            catalog.find(found, wanted)
        except TrainckptError:
            continue
    claimed = attempt_history.claim(tier, AttemptRecord)
    assert claimed.attempt > max(before, default=0)
    assert claimed.attempt in attempt_history.read_attempts(tier), "a claim that nobody sees"


class _File:
    """A file that holds these bytes."""

    def __init__(self, name, data):
        self.name, self.data = name, data

    def __lt__(self, other):
        return self.name < other.name

    def stat(self):
        return os.stat_result((stat.S_IFREG, 1, 1, 1, 0, 0, len(self.data), 1, 1, 1))

    def is_file(self):
        return True

    def open(self, mode):
        if self.data is None:
            raise FileNotFoundError(self.name)
        return io.BytesIO(self.data)

    def read_bytes(self):
        return self.open("rb").read()

    def read_text(self, encoding):
        return self.read_bytes().decode(encoding)


class _Folder:
    """A folder with some files."""

    def __init__(self, **files):
        self.files = {name.replace("__", "."): _File(name, data) for name, data in files.items()}

    def glob(self, pattern):
        return list(self.files.values())

    def __truediv__(self, name):
        return self.files[name]


def run_notice(data):
    source = NoticeFiles(_Folder(n=data), 1)
    found = source.poll()
    assert len(found) + len(source.bad) == 1
    for notice in found:
        assert isinstance(notice.reason, str)
        assert notice.seconds_left is None or 0 <= notice.seconds_left < MOST_WAIT_S, "no wait"
    assert all(len(why) < 1000 for why in source.bad.values()), "a reason of many pages"


def run_told(data):
    files = {f"rank{i}__json": line for i, line in enumerate(data.split(b"\n")[:4])}
    found = read_rank_statuses(_Folder(**files))
    kinds = RankStatus(0, 0, "", "")
    for rank, told in sorted(found.items()):
        assert rank == told.rank
        for name in ("rank", "pid", "host", "run", "state"):
            assert type(getattr(told, name)) is type(getattr(kinds, name)), name
        assert type(told.attempt) in (int, type(None))
        assert type(told.exit_code) in (int, type(None))
        assert type(told.how) in (str, type(None))
        assert told.grace_s is None or 0 <= told.grace_s < MOST_WAIT_S, "a wait nobody can wait"
        assert "\0" not in told.run
        str(Path(told.run).absolute())
    words = [(told, float(at)) for at, told in enumerate(found.values())]
    for code in (0, 1):
        _judge(LaunchHistory(code, statuses=words, ours=True, ends=[RankExit(5, -9, 1.5)]))


def run_ends(data):
    lines, _, failures = data.partition(b"\n\n")
    found = read_ends(_Folder(ends__jsonl=lines, failures__json=failures))
    assert [end.at for end in found] == sorted(end.at for end in found)
    for end in found:
        assert type(end.pid) is int
        assert type(end.rank) in (int, type(None))
        assert -(2**31) <= end.code < 2**31, "no exit code"
    _judge(LaunchHistory(1, ends=found, statuses=[(RankStatus(0, 5, "h", "r"), 1.0)]))


def _judge(history):
    outcome = classify(history)
    assert type(outcome.exit_code) is int
    assert -(2**31) <= outcome.exit_code < 2**31, "no exit code"


def spell_lines(tree, rng):
    """One line a document, as far as the tree is a list."""
    if not isinstance(tree, list):
        return spell(tree).encode()
    lines = [spell(each).encode() for each in tree]
    at = int(rng.random() * (len(lines) + 1))
    return b"\n".join(lines[:at]) + b"\n\n" + b"\n".join(lines[at:])


def spell_told(tree, rng):
    """One line a rank."""
    each = tree if isinstance(tree, list) else [tree]
    return b"\n".join(spell(told).encode() for told in each)


_FACTS = {
    "argv": ["python", "x.py"],
    "cwd": "/x",
    "env": {"A": "b"},
    "world": 2,
    "hosts": ["h"],
    "launch": {"kind": "torchrun", "nproc": 2},
    "pids": [5],
    "started": 1.5,
    "reading": "s5~1.1",
}
_OUTCOME = {
    "outcome": "failed",
    "snapshot": "s5~1.1",
    "kind": "snapshot",
    "exactness": "bitwise",
    "lost_micro_batches": 3,
    "tiers": ["local"],
    "seconds": 5.5,
    "exit_code": 1,
    "reason": "ValueError",
    "died_while": "starting",
}
_RECORD = {
    **_FACTS,
    "attempt": 2,
    "parent": "s5~1.1",
    "state": "ended",
    "outcome": _OUTCOME,
    "newest_commit": "s7~2.1",
}
_STARTING = {**_RECORD, "state": "starting", "parent": "undecided", "attempt": 1}
_PLACE = {
    "attempts/1.json": _STARTING,
    "attempts/2.json": _RECORD,
    "attempts/3.heartbeat": 1,
    "snapshots/s5~1.1/manifest.json": json.loads(
        sealed({**MANIFEST_2, "attempt": 1, "sequence": 1}, __import__("random").Random(2))
    ),
    "snapshots/s7~2.1/rank00000.safetensors": "",
}
_TOLD = {
    "rank": 0,
    "pid": 5,
    "host": "h",
    "run": "/r",
    "attempt": 1,
    "state": "left",
    "grace_s": 30.0,
    "how": "failed",
    "exit_code": 1,
    "asked": False,
    "survives_s": 10.0,
    "namespace": "pid:[1]",
}
_LEFT = {**_TOLD, "rank": 1, "how": "stopped", "exit_code": 75, "pid": 6}
_END = {"pid": 5, "code": -9, "at": 1.5}
_NOTICE = {"reason": "pause", "seconds_left": 30, "mode": "window", "dump": False}

PARSERS = {
    "attempt": Parser(
        "attempt",
        run_attempt,
        [_RECORD, _STARTING],
        sealed,
        (*_RECORD, *_OUTCOME, "undecided", "failed", "killed"),
        REFUSALS,
    ),
    "run": Parser(
        "run",
        run_run,
        [{"format": 1, "id": "ab" * 16}],
        sealed,
        ("format", "id", "digest"),
        REFUSALS,
    ),
    "catalog": Parser(
        "catalog",
        run_catalog,
        [_PLACE, dict(list(_PLACE.items())[:2])],
        as_json,
        (
            *_PLACE,
            "attempts/999999999.json",
            "attempts/99999999999999.json",
            "attempts/007.json",
            "attempts/\u0663.json",
            "snapshots/s5~999999999.1/manifest.json",
            "snapshots/s5~0.1/x",
            "attempts/.json",
            "snapshots/s05~1.1/manifest.json",
            "parent",
            "state",
            "outcome",
            "exit_code",
            "snapshots/s1~1.1/x",
        ),
        REFUSALS,
    ),
    "notice": Parser("notice", run_notice, [_NOTICE, {}], as_json, tuple(_NOTICE), REFUSALS),
    "told": Parser(
        "told",
        run_told,
        [[_TOLD, _LEFT], _LEFT, [_TOLD, {**_TOLD, "rank": 2}]],
        spell_told,
        (*_TOLD, "stopped", "refused", "claimed"),
        REFUSALS,
    ),
    "ends": Parser(
        "ends",
        run_ends,
        [[_END, {**_END, "pid": 6, "code": 1}, [{"rank": 1, "pid": 6, "code": 1}]], [_END]],
        spell_lines,
        ("pid", "code", "at", "rank"),
        REFUSALS,
    ),
}

"""Cases of chaos: random runs that meet random faults end exactly, or as they have promised.

`python -m tests.chaos --only SEED` plays one of them and shows its logs. A case takes some seconds,
so these 24 are of one or two plain ranks, which share a few references; other trainers' are long.
"""

# ruff: noqa: PTH208 - a listing is what a client of the file server asks for

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time

import pytest

from tests.chaos import disk, drive, judge, late_disk, report, rooms
from tests.chaos.faults import CATALOGUE
from tests.chaos.stage import cannot_be_made
from tests.limits import HANG_S
from tests.warm import ROOT

on_a_stage = pytest.mark.skipif(bool(cannot_be_made()), reason=cannot_be_made() or "-")
SEEDS = [66, 106, 302, 331, 387, 33000, 33037, 33129, 40002, 40056, 40154, 60017]
MORE_SEEDS = [*(33006, 33081, 33138, 40025, 40081, 40098, 40107, 40140, 40211, 40231, 60002, 40105)]
LONG_SEEDS = [
    *(338, 480, 3000, 3001, 3002, 3004, 3005, 3006, 3008, 3009),
    *(3011, 3012, 3013, 3015, 3016, 3018, 3020, 3021, 3023),
]


@on_a_stage
@pytest.mark.parametrize(
    "seeds", [SEEDS, MORE_SEEDS, pytest.param(LONG_SEEDS, marks=pytest.mark.long)]
)
def test_runs_that_meet_random_faults_end_as_the_reference_or_as_promised(seeds):
    names = ",".join(map(str, seeds))
    played = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--only", names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S + 30 * len(seeds),
        check=False,
    )
    assert played.returncode == 0, played.stdout + played.stderr


def test_a_seed_stands_for_one_case_and_every_fault_is_drawn():
    drawn = [drive.draw(seed) for seed in range(400)]
    assert rooms.DUMPS not in {case.room.launcher for case in drawn}
    drawn += [drive.draw(seed, [rooms.DUMPS]) for seed in range(400)]

    assert drawn[:400] == [drive.draw(seed) for seed in range(400)]
    assert drawn[400:] == [drive.draw(seed, [rooms.DUMPS]) for seed in range(400)]
    assert {case.room.launcher for case in drawn[400:]} == {rooms.DUMPS}
    assert {shot.fault for case in drawn for shot in case.shots} == set(CATALOGUE)
    assert all(CATALOGUE[s.fault].needs(case.room) for case in drawn for s in case.shots)


@on_a_stage
def test_the_disk_refuses_the_call_it_was_told_to_and_no_other(tmp_path):
    with disk.mounted(tmp_path / "disk", tmp_path / "backing") as one:
        one.set({"kinds": ["write"], "errno": errno.ENOSPC, "first": 2, "times": 1})
        file = os.open(one.folder / "file", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(file, b"first")
            with pytest.raises(OSError, match="No space left"):
                os.write(file, b"second")
            os.write(file, b"third")
        finally:
            os.close(file)
        assert one.set(None) == 1

        assert (one.backing / "file").read_bytes() == b"firstthird"


@on_a_stage
def test_a_disk_that_is_read_only_still_reads(tmp_path):
    with disk.mounted(tmp_path / "disk", tmp_path / "backing") as one:
        file = one.folder / "file"
        file.write_bytes(b"kept")
        one.set({"kinds": disk.WRITES, "errno": errno.EROFS, "first": 1, "times": None})

        assert file.read_bytes() == b"kept"
        for change in (file.unlink, lambda: file.write_bytes(b"new"), (one.folder / "new").mkdir):
            with pytest.raises(OSError, match="Read-only"):
                change()


@on_a_stage
def test_a_client_of_a_file_server_sees_its_own_changes_at_once_and_those_of_others_late(tmp_path):
    with (
        late_disk.mounted(tmp_path / "one", tmp_path / "backing") as one,
        late_disk.mounted(tmp_path / "other", tmp_path / "backing") as other,
    ):
        assert os.listdir(other.folder) == []
        assert not (other.folder / "file").exists()
        (one.folder / "file").write_bytes(b"new")
        looked_s = time.monotonic()

        assert [os.listdir(one.folder), (one.folder / "file").exists()] == [["file"], True]
        seen = [os.listdir(other.folder), (other.folder / "file").exists()]
        assert seen == [[], False] or time.monotonic() - looked_s > 1  # the machine was busy
        with pytest.raises(FileExistsError):
            (other.folder / "file").touch(exist_ok=False)
        while not (other.folder / "file").exists() or not os.listdir(other.folder):
            assert time.monotonic() - looked_s < HANG_S
            time.sleep(0.05)


def test_the_table_counts_a_fault_in_every_room_of_its_case():
    case = drive.draw(3)
    ended = drive.Ended(([0], []), [], hits=[("SIGKILL", "rank 0", 3)] * 2, codes=[-9])
    lines = [report.line_of(case, [ended], judge.EXACT, "")] * 2

    rows = report.table(lines).splitlines()

    assert rows[2].split()[:2] == ["SIGTERM", "0"]
    assert next(row for row in rows if row.startswith("SIGKILL")).split()[1] == "2"
    assert "4 faults in all" in rows


@on_a_stage
@pytest.mark.long
def test_a_soak_of_a_minute_ends_as_its_reference(tmp_path):
    soaked = subprocess.run(
        [sys.executable, "-m", "tests.chaos.soak", "--for", "1m", "--json", tmp_path / "soak.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=5 * HANG_S,
        check=False,
    )
    assert soaked.returncode == 0, soaked.stdout + soaked.stderr
    assert json.loads((tmp_path / "soak.json").read_text())["wrong"] == []

"""By command: whatever is wrong with a dump on top of a snapshot, `resume` says why, and the run
goes on from the snapshot, exactly."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process_dump.example import Example, dumped_at_a_boundary
from tests.process_dump.taken_pid import with_number
from tests.process_dump.test_refusals import pretend
from trainckpt.format.dump import DumpRecord
from trainckpt.process_dump import criu

pytestmark = pytest.mark.long

WITHOUT = ("setpriv", "--bounding-set=-sys_admin,-checkpoint_restore", "--inh-caps=-all")


def no_criu(run, record):
    run.environment[criu.VARIABLE] = str(run.folder / "none")
    return "TRAINCKPT_CRIU names"


def an_old_one(run, record):
    run.environment[criu.VARIABLE] = str(pretend(run.folder / "criu", "3.17.1"))
    return "is CRIU 3.17.1, 4.0 is needed"


def one_that_fails(run, record):
    fails = 'case "$1" in check) exit 0;; esac; exit 1'
    run.environment[criu.VARIABLE] = str(pretend(run.folder / "criu", "4.2.1", fails))
    return "could not be restored, says CRIU"


def no_privileges(run, record):
    run.before = WITHOUT
    return "CAP_SYS_ADMIN"


def a_changed_library(run, record):
    path = Path(run.run) / "dumps" / record["name"] / "dump.json"
    said = DumpRecord.load(path.read_bytes(), path.name)
    first = said.mapped[0]
    other = replace(first, changed_ns=first.changed_ns + 1)
    path.write_bytes(replace(said, mapped=(other, *said.mapped[1:])).dump())
    return f"{first.path}, which was mapped, has changed since"


def a_taken_number(run, record):
    run.other = with_number(record["root"])
    return f"other processes have its numbers: {record['root']}"


def a_cut_image(run, record):
    images = Path(run.run) / "dumps" / record["name"] / "images"
    largest = max(images.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return f"the image {largest.name} has"


FAULTS = (
    no_criu,
    an_old_one,
    one_that_fails,
    no_privileges,
    a_changed_library,
    a_taken_number,
    a_cut_image,
)


def test_whatever_is_wrong_with_the_dump_the_snapshot_is_used(criu_here, tmp_path):
    hold, flags = tmp_path / "hold", {"workers": 0}
    with Example(tmp_path / "straight", flags=flags) as straight:
        assert straight.start("--dumps", "off").wait() == 0, straight.said()
        reference = straight.trace()
    hold.touch()
    with Example(tmp_path / "x", flags=flags, HOLD=hold, TRAINCKPT_MEMORY="none") as run:
        run.start()
        record = dumped_at_a_boundary(run, hold)
        hold.unlink()
        kept = tmp_path / "kept"
        shutil.copytree(run.folder, kept, symlinks=True)
        before = dict(run.environment)
        for fault in FAULTS:
            shutil.rmtree(run.folder)
            shutil.copytree(kept, run.folder, symlinks=True)
            run.environment, run.before, run.other = dict(before), (), None
            why = fault(run, record)
            code = run.resume().wait()
            if run.other is not None:
                run.other.kill()
                run.other.wait()
            said = run.said()
            assert code == 0, (fault.__name__, said)
            assert why in said, (fault.__name__, said)
            assert run.trace() == reference, fault.__name__
            records = run.records()
            assert records[max(records)].parent == record["snapshot"], fault.__name__

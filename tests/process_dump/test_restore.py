"""What is looked at before a dump is restored: records, images, files; no process is touched."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trainckpt.attempt import heartbeat
from trainckpt.attempt.status_files import CLAIMED, RankStatus
from trainckpt.cli import dumps
from trainckpt.cli.dumps import dumps_of
from trainckpt.cli.main import main
from trainckpt.dumping.old_dumps import old_dumps, remove
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord
from trainckpt.format.digest import digest
from trainckpt.format.dump import DumpName, DumpRecord, Host, Image, WrittenFile
from trainckpt.launcher.restored_dump import AlreadyResumed
from trainckpt.process_dump import dump, restore
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import SharedMemoryDir

HOST = Host("here", "6.1", ("avx2", "fpu"))
RECORD = DumpRecord(
    name=DumpName(2, 7),
    run="r1",
    host=HOST,
    criu="4.2.1",
    created=1.5,
    root=100,
    tasks=(100, 101),
    world=2,
    folder="/tmp/x",
    told={"rank0.json": "{}"},
    images=(Image("core-1.img", 3, digest(b"abc")),),
    written=(WrittenFile("/log", 5),),
    reason="trainckpt pause",
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    tier = LocalTier(tmp_path)
    tier.replace(RECORD.name.record, RECORD.dump())
    assert restore.names_in(tier) == [DumpName(2, 7)]
    assert restore.load(tier, "r1", DumpName(2, 7)) == RECORD
    assert DumpName.parse(str(RECORD.name)) == RECORD.name
    with pytest.raises(UnusableSnapshot, match="belongs to another run"):
        restore.load(tier, "r2", DumpName(2, 7))
    tier.replace(DumpName(3, 1).record, RECORD.dump())
    with pytest.raises(UnusableSnapshot, match=r"is the record of dump~2\.7"):
        restore.load(tier, "r1", DumpName(3, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "dump~02.7"},
        {"root": 0},
        {"root": True},
        {"tasks": [-1]},
        {"created": "now"},
        {"told": {"../x": "y"}},
        {"told": {"x": 1}},
        {"images": [{"name": "a", "num_bytes": 1}]},
        {"images": [{"name": "../a", "num_bytes": 1, "digest": "0" * 32}]},
        {"written": [{"path": "log", "num_bytes": 1}]},
        {"written": [{"path": "/l"}]},
        {"written": ["/log"]},
        {"snapshot": "x"},
        {"dropped": -1},
        {"ports": [0]},
        {"ports": ["80"]},
        {"ports": [2**16]},
        {"ports": 80},
        {"host": "here"},
        {"world": -1},
        {"run": None},
    ],
)
def test_a_record_that_says_something_else_is_refused(change):
    body = json_io.verify_digest(json_io.parse(RECORD.dump(), "x", max_bytes=10**6), "x")
    with pytest.raises(UnusableSnapshot):
        DumpRecord.load(json_io.with_digest({**body, **change}), "x")


def test_a_dump_stays_on_its_host_under_its_kernel_and_on_such_a_processor():
    assert restore.why_not(RECORD, HOST) == ""
    assert restore.why_not(RECORD, replace(HOST, flags=("avx2", "avx512f", "fpu"))) == ""
    assert "taken on here, this is there" in restore.why_not(RECORD, replace(HOST, name="there"))
    assert "kernel 6.1, this is 6.2" in restore.why_not(RECORD, replace(HOST, kernel="6.2"))
    assert "lacks avx2" in restore.why_not(RECORD, replace(HOST, flags=("fpu",)))


def test_a_truncated_a_damaged_and_a_missing_image_are_named(tmp_path):
    path = tmp_path / "core-1.img"
    path.write_bytes(b"abc")
    restore.verify(tmp_path, RECORD)
    path.write_bytes(b"ab")
    with pytest.raises(UnusableSnapshot, match=r"core-1\.img has 2 bytes, not 3"):
        restore.verify(tmp_path, RECORD)
    path.write_bytes(b"abd")
    with pytest.raises(UnusableSnapshot, match=r"core-1\.img is damaged"):
        restore.verify(tmp_path, RECORD)
    path.unlink()
    with pytest.raises(UnusableSnapshot, match=r"core-1\.img is missing"):
        restore.verify(tmp_path, RECORD)


def test_a_file_that_became_a_pipe_is_named_in_place_of_a_wait(tmp_path):
    path = tmp_path / "data"
    record = replace(RECORD, read=(str(path),), mapped=())
    assert restore.why_changed(record) == "", "CRIU names one that is gone"
    path.touch()
    assert restore.why_changed(record) == ""
    path.unlink()
    os.mkfifo(path)
    assert restore.why_changed(record) == f"{path}, which was open, is no file any more"


def test_a_file_that_has_grown_is_cut_back_and_what_came_later_is_kept(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"as it was, and later")
    restore.cut_back(WrittenFile(str(path), 9), attempt=4)
    assert path.read_bytes() == b"as it was"
    assert (tmp_path / "log.after-4").read_bytes() == b", and later"
    restore.cut_back(WrittenFile(str(path), 9), attempt=5)
    assert not (tmp_path / "log.after-5").exists()
    path.write_bytes(b"as it was, again")
    restore.cut_back(WrittenFile(str(path), 9), attempt=4)
    assert (tmp_path / "log.after-4").read_bytes() == b", and later", "nothing is written over"
    assert (tmp_path / "log.after-4-2").read_bytes() == b", again"
    with pytest.raises(UnusableSnapshot, match="has 9 bytes, 10 when it was dumped"):
        restore.cut_back(WrittenFile(str(path), 10), attempt=6)
    path.unlink()
    with pytest.raises(UnusableSnapshot, match="is gone"):
        restore.cut_back(WrittenFile(str(path), 9), attempt=6)
    os.mkfifo(path)  # CRIU would open it, and wait for somebody at its other end
    with pytest.raises(UnusableSnapshot, match="is no file any more"):
        restore.cut_back(WrittenFile(str(path), 0), attempt=6)


def test_a_copy_that_the_disk_has_no_room_for_is_removed_and_the_file_stays(tmp_path):
    """Each further `resume` would leave another part of one."""
    path, before = tmp_path / "log", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_bytes(bytes(3 << 20))
    record = replace(RECORD, written=(WrittenFile(str(path), 9),), folder=str(tmp_path / "own"))
    restorable = restore.RestorableDump(record, Path("none"), tmp_path, None)
    why = f"{path} has grown and cannot be cut back: File too large"
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(restore.RestoreBlocked, match=why):
            restorable.bring_back(4, dict)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [each.name for each in tmp_path.iterdir()] == ["log"]
    assert path.stat().st_size == 3 << 20


def test_what_came_later_is_safe_under_its_name_before_the_file_is_cut(tmp_path, monkeypatch):
    path, synced, sync = tmp_path / "log", [], os.fsync

    def noted(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name  # noqa: PTH115
        synced.append((name, path.stat().st_size))
        sync(descriptor)

    path.write_bytes(b"as it was, and later")
    monkeypatch.setattr(os, "fsync", noted)
    restore.cut_back(WrittenFile(str(path), 9), attempt=4)
    assert synced == [("log.after-4", 20), (tmp_path.name, 20), ("log", 9)]


def test_a_dump_is_numbered_after_every_snapshot_of_its_attempt_in_memory_too(tmp_path):
    """One that stood there alone is copied to the run's place later, and is the older one."""
    tier, memory = LocalTier(tmp_path), SharedMemoryDir.of(str(tmp_path))
    assert dump.next_name(tier, 2) == DumpName(2, 1)
    for name in ("s9~1.4", "s3~2.2"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert dump.next_name(tier, 2) == DumpName(2, 3)
    arena = memory.arena(0, 0)
    arena.reserve(100)
    arena.publish("snapshots/s5~2.5", "rank00000.safetensors")
    assert dump.next_name(tier, 2) == DumpName(2, 6)
    arena.close()
    memory.remove()
    (tmp_path / "dumps" / "dump~2.7").mkdir(parents=True)
    assert dump.next_name(tier, 2) == DumpName(2, 8)


def test_a_dump_is_restored_in_the_run_directory_alone_that_its_processes_save_to(tmp_path):
    """Restored from a copy they would save into the original, beside whoever resumes that."""
    place = tmp_path / "run"
    tier = LocalTier(place)
    run = attempt_history.found_run(tier)
    attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    rank = RankStatus(rank=0, pid=100, host="here", run=str(place), attempt=1, state=CLAIMED)
    told = {"rank0.json": json.dumps(asdict(rank)), "rank1.json": "{", "agent.json": "{}"}
    taken = replace(RECORD, name=DumpName(1, 7), run=run, host=dump.this_host(), told=told)
    tier.replace(taken.name.record, replace(taken, images=()).dump())

    def reason(folder):
        (found,) = dumps_of(LocalTier(folder))
        return found.reason

    assert reason(place) == ""
    shutil.copytree(place, tmp_path / "copy")
    elsewhere = f"its processes save to {place}, where it was taken"
    assert reason(tmp_path / "copy") == elsewhere
    place.rename(tmp_path / "moved")
    assert reason(tmp_path / "moved") == elsewhere
    place.symlink_to(tmp_path / "moved")
    assert reason(place) == reason(tmp_path / "moved") == ""


def kinds(path):
    """Each makes something else of a path than a file."""
    return {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a link that leads back to itself": lambda: path.symlink_to(path),
    }


@pytest.mark.parametrize("kind", kinds(Path()))
def test_a_record_that_is_no_file_makes_one_dump_unusable_and_not_all(tmp_path, kind, capsys):
    tier = LocalTier(tmp_path)
    run = attempt_history.found_run(tier)
    attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    taken = replace(RECORD, name=DumpName(1, 7), run=run, host=dump.this_host(), images=())
    tier.replace(taken.name.record, taken.dump())
    for other in (DumpName(1, 6), DumpName(1, 8)):
        (tmp_path / other.folder).mkdir()
        kinds(tmp_path / other.record)[kind]()
    reasons = {str(found.name): found.reason for found in dumps_of(tier)}
    assert list(reasons) == ["dump~1.8", "dump~1.7", "dump~1.6"]
    assert reasons["dump~1.7"] == ""
    assert f"{DumpName(1, 8).record} is " in reasons["dump~1.8"]
    assert main(["list", "--json", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert [(row["id"], row["usable"]) for row in rows] == [
        ("dump~1.8", False),
        ("dump~1.7", True),
        ("dump~1.6", False),
    ]


def resumed_from_a_dump(folder):
    arguments = argparse.Namespace(
        run=str(folder), at=None, nproc=None, dumps=None, tiers=None, json=False
    )
    return dumps.restored(LocalTier(folder), arguments, (["true"], ".", 1), None)


def test_dumps_that_cannot_be_looked_at_are_not_taken_for_none(tmp_path):
    """Or the command would begin anew, and its attempt would be later than the dump."""
    tier = LocalTier(tmp_path)
    attempt_history.found_run(tier)
    attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    assert resumed_from_a_dump(tmp_path) is None  # there is none
    (tmp_path / "dumps").touch()  # any listing is refused, for whatever reason
    with pytest.raises(TierUnavailable, match="dumps: Not a directory; there is no snapshot") as no:
        resumed_from_a_dump(tmp_path)
    assert f"trainckpt resume {tmp_path} --dumps off" in no.value.hint


def test_beside_living_processes_that_were_restored_nothing_is_launched(tmp_path):
    """A resume a moment after another one finds the dump used up, and would begin anew."""
    tier = LocalTier(tmp_path)
    run = attempt_history.found_run(tier)
    attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    taken = replace(RECORD, name=DumpName(1, 7), run=run, host=dump.this_host(), images=())
    tier.replace(taken.name.record, taken.dump())
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = AttemptRecord(2, "dump~1.7", facts={"pids": [dead.pid, os.getpid()]})
    attempt_history.claim(tier, lambda number: replace(alive, attempt=number))
    assert resumed_from_a_dump(tmp_path) is None, "it has no heartbeat"
    heartbeat.path_of(tier, 2).write_text("1\n")
    with pytest.raises(AlreadyResumed, match=r"attempt 2 went on from dump~1\.7 and is alive"):
        resumed_from_a_dump(tmp_path)
    for over in (
        replace(alive, facts={"pids": [dead.pid, 0, "x"]}),  # killed: its heart is still young
        replace(alive, outcome={"outcome": "failed"}),
        replace(alive, parent=UNDECIDED),
    ):
        attempt_history.replace(tier, over)
        assert resumed_from_a_dump(tmp_path) is None


def test_images_of_dumps_that_no_resume_brings_back_are_given_back(tmp_path):
    """Not of the newest, not of what is being brought back."""
    tier, names = LocalTier(tmp_path), [DumpName(1, 4), DumpName(2, 7), DumpName(3, 1)]
    for name in names:
        (tmp_path / name.folder / "images").mkdir(parents=True)
        (tmp_path / name.folder / "images" / "core-1.img").write_bytes(b"abc")
        tier.replace(name.record, replace(RECORD, name=name).dump())
    records = {1: AttemptRecord(1, None), 2: AttemptRecord(2, "s4~1.2")}
    found = old_dumps(tier, records)
    assert [(o.name, o.num_bytes) for o in found] == [(names[0], 3)]
    assert found[0].reason == "attempt 2 began later"
    records[3] = AttemptRecord(3, "dump~2.7")
    assert [old.name for old in old_dumps(tier, records)] == [names[0]], "2.7 is being restored"
    records[3] = AttemptRecord(3, "dump~2.7", outcome={"outcome": "failed"}, newest_commit="s9~3.2")
    found = old_dumps(tier, records)
    assert [(str(o.name), o.reason) for o in found] == [
        ("dump~1.4", "attempt 3 began later"),
        ("dump~2.7", "attempt 3 went on from it and failed"),
        ("dump~3.1", "s9~3.2 was committed later"),
    ]
    for old in found:
        remove(tier, old)
    assert old_dumps(tier, records) == []
    opened = tmp_path / names[1].folder / "opened"  # by a resume that was killed: in the clear
    opened.mkdir()
    (opened / "core-1.img").write_bytes(b"secret")
    (found,) = old_dumps(tier, records)
    remove(tier, found)
    assert not opened.exists()
    log = tmp_path / names[2].folder / "images" / "dump.log"  # of a CRIU that was killed at once
    log.parent.mkdir()
    log.touch()
    (found,) = old_dumps(tier, records)
    assert (found.name, found.num_bytes) == (names[2], 0)
    remove(tier, found)
    assert not log.parent.exists()
    assert restore.names_in(tier) == sorted(names, reverse=True)

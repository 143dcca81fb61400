"""Large pieces are written where nobody reads from that disk, small ones where somebody may."""

from __future__ import annotations

import os

import pytest

from trainckpt.tiers import direct, disk_reads, new_file
from trainckpt.tiers.disk_reads import BURST, FEW, QUIET_S, DiskReads, Quiet, under
from trainckpt.tiers.new_file import PIECE_BYTES, QUIET_PIECE_BYTES, Pace

DEVICE = os.makedev(8, 1)


def answers(looks):
    quiet = Quiet()
    return [quiet.looked(num_reads, now_s) for num_reads, now_s in looks]


def test_nobody_reads_where_the_count_has_stood_still_for_a_while():
    assert answers([(7, 0.0), (7, QUIET_S / 2), (7, QUIET_S)]) == [False, False, True]


def test_a_look_back_at_a_long_pause_tells_at_once():
    assert answers([(7, 0.0), (7, 60.0)]) == [False, True]


def test_a_few_reads_by_the_way_are_nobody():
    looks = [(n * int(FEW) // 2, float(n)) for n in range(9)]
    assert answers(looks) == [False] + [True] * 8
    of_a_file = [(int(BURST) // 2 * n, 4.0 * n) for n in range(9)]
    assert answers(of_a_file) == [False] + [True] * 8


def test_reads_at_the_pace_of_a_loader_are_somebody_until_a_while_without():
    looks = [(100 * n, float(n)) for n in range(4)]
    assert answers([*looks, (300, 3.5), (300, 3.0 + QUIET_S)]) == [False] * 5 + [True]


def test_reads_that_begin_while_a_file_is_written_are_seen_soon():
    looks = [(7 + 10 * n, 60 + 0.05 * n) for n in range(4)]
    assert answers([(7, 0.0), *looks]) == [False, True, True, False, False]


def test_a_disk_that_does_not_say_is_one_from_which_somebody_may_read():
    assert answers([(None, 0.0), (None, 60.0), (7, 120.0), (7, 180.0)]) == [False] * 3 + [True]


def disks(tmp_path):
    """A disk with a partition, and a volume on it."""
    devices = tmp_path / "devices"
    for folder, reads in (("sda", 40), ("sda/sda1", 30), ("dm-0", 20)):
        (devices / folder).mkdir(parents=True)
        (devices / folder / "stat").write_text(f"  {reads}  1  2  3\n")
    (devices / "sda" / "sda1" / "partition").write_text("1\n")
    (devices / "dm-0" / "slaves").mkdir()
    (devices / "dm-0" / "slaves" / "sda1").symlink_to(devices / "sda" / "sda1")
    numbers = tmp_path / "block"
    numbers.mkdir()
    (numbers / "8:1").symlink_to(devices / "sda" / "sda1")
    (numbers / "253:0").symlink_to(devices / "dm-0")
    return devices, numbers


def test_readers_of_other_partitions_and_volumes_of_a_disk_count(tmp_path):
    devices, numbers = disks(tmp_path)
    assert under(DEVICE, numbers) == under(os.makedev(253, 0), numbers) == [devices / "sda"]
    assert under(os.makedev(0, 40), numbers) == []


def test_what_the_system_counts_is_looked_at_now_and_then(tmp_path, monkeypatch):
    devices, numbers = disks(tmp_path)
    now = [0.0]
    monkeypatch.setattr(disk_reads.time, "monotonic", lambda: now[0])
    reads, told = DiskReads(numbers), []
    for at, count in ((0.0, 40), (60.0, 41), (60.01, 500), (60.1, 900)):
        now[0] = at
        (devices / "sda" / "stat").write_text(f"{count} 0 0\n")
        told.append(reads.are_few(DEVICE))
    assert told == [False, True, True, False]
    now[0] = 120.0
    (devices / "sda" / "stat").write_text("nonsense\n")
    assert not reads.are_few(DEVICE)


def test_this_system_counts_the_reads_of_a_disk(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(os.urandom(64 * direct.PAGE_BYTES))
    if not under(file.stat().st_dev):
        pytest.skip("this file system names no disk")
    reads, now = DiskReads(), []
    reads.are_few(file.stat().st_dev)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        for _ in range(2):
            now.append(reads.num_reads())
            for _ in range(20):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.pread(descriptor, direct.PAGE_BYTES, 0)
        now.append(reads.num_reads())
    finally:
        os.close(descriptor)
    assert now[1] - now[0] >= 10
    assert now[2] - now[1] >= 10


def test_pieces_are_large_only_where_nobody_reads(monkeypatch):
    pace = Pace()
    for few in (False, True, False):
        monkeypatch.setattr(pace._reads, "are_few", lambda device, few=few: few)
        assert pace.piece_bytes(DEVICE) == (QUIET_PIECE_BYTES if few else PIECE_BYTES)
    assert new_file.PIECE_BYTES < new_file.QUIET_PIECE_BYTES

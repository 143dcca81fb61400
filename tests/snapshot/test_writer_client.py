"""Files that another process writes are those that the rank writes, and its death loses nothing."""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.state.helpers import registry
from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.format import names
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import shard_writer, writer_client
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.snapshot.writer_client import WriterClient, WriterDied
from trainckpt.state import staging
from trainckpt.state.capture import capture
from trainckpt.storage.direct_io import address
from trainckpt.storage.local import Disk, LocalTier
from trainckpt.storage.store_errors import is_full

NAMES = [SnapshotName.parse(f"s{n}~1.{n}") for n in range(1, 9)]


@dataclass
class Kept:
    """A shard in a file, as an arena is one."""

    shard: staging.Shard
    descriptor: int

    def progress(self, *shares):
        begin, size = address(self.shard.memory), len(self.shard.memory)
        yield from (begin + int(size * share) for share in shares)


@pytest.fixture
def tier(tmp_path):
    found = LocalTier(tmp_path / "run")
    found.replace(names.RUN_RECORD, b"{}")
    return found


@pytest.fixture
def beside():
    found = WriterClient()
    yield found
    found.close()


def kept(tmp_path, width=300, value=0.5, *, digests=False):
    model = nn.Linear(width, width)
    nn.init.constant_(model.weight, value)
    captured = capture(registry(model=model))
    regions = staging.describe(captured, {})
    descriptors = []

    def memory(num_bytes):
        file = os.open(tmp_path / f"arena{width}{value}", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(file, num_bytes)
        descriptors.append(file)
        return memoryview(mmap.mmap(file, num_bytes))

    how = {"memory": memory, "digests": digests}
    shard = staging.stage(captured, regions, rank=0, world=1, **how)
    return Kept(shard, descriptors[0])


def write(beside, tier, name, one, copied=()):
    return beside.write(tier, name, 0, one.shard, descriptor=one.descriptor, copied=copied)


def content(tier, name):
    return (tier.root / name.folder / "rank00000.safetensors").read_bytes()


def test_the_file_and_its_receipt_are_those_of_the_rank(tmp_path, tier, beside):
    for name, width, value in [(NAMES[0], 300, 1.0), (NAMES[1], 300, 2.0), (NAMES[2], 90, 1.0)]:
        one = kept(tmp_path, width, value)
        written = write(beside, tier, name, one, one.progress(0.1, 0.3, 0.31, 0.99))
        assert content(tier, name) == bytes(one.shard.memory)
        other = LocalTier(tmp_path / "other")
        other.replace(names.RUN_RECORD, b"{}")
        assert write_shard(other, name, 0, one.shard) == written[0]
        assert content(other, name) == content(tier, name)
        assert [r.key for r in written[1].regions] == [r.key for r in one.shard.header.regions]


def undigested(shard):
    """The same bytes, of which no digest is known."""
    return staging.Shard(shard.header, memoryview(bytearray(shard.memory)))


def test_what_the_rank_has_digested_is_not_digested_again(tmp_path, tier, beside, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one = kept(tmp_path, digests=True)
    assert one.shard.digests.keys() == {"model/weight"}
    written = write(beside, tier, NAMES[0], one)
    assert write_shard(tier, NAMES[1], 0, undigested(one.shard)) == written[0]
    assert content(tier, NAMES[0]) == content(tier, NAMES[1])
    told = "ab" * (len(one.shard.digests["model/weight"]) // 2)
    one.shard.digests["model/weight"] = told
    again = write(beside, tier, NAMES[2], one)
    assert told in content(tier, NAMES[2]).decode(errors="replace")
    assert again[0] != written[0]


def test_what_is_said_to_be_complete_is_written_before_the_rest_is(tmp_path, tier, beside):
    """The last of it is filled only once the first stands in the file."""
    one = kept(tmp_path, width=2400)
    whole = bytes(one.shard.memory)
    first = one.shard.header.header_bytes
    half = first + shard_writer.AT_ONCE_BYTES
    one.shard.memory[half:] = bytes(len(whole) - half)
    path = tier.root / NAMES[0].folder / "rank00000.safetensors"

    def copied():
        yield from one.progress(0.0)
        yield address(one.shard.memory) + half
        until = time.monotonic() + 60
        while not path.exists() or path.read_bytes()[first:half] != whole[first:half]:
            assert time.monotonic() < until, "it was not written"
            time.sleep(0.01)
        one.shard.memory[half:] = whole[half:]

    write(beside, tier, NAMES[0], one, copied())
    assert content(tier, NAMES[0])[first:] == whole[first:]


def test_what_a_tier_refuses_is_said_as_the_rank_would_and_the_next_file_is_written(
    tmp_path, tier, beside
):
    one = kept(tmp_path)
    write(beside, tier, NAMES[0], one)
    with pytest.raises(TierUnavailable, match="File exists"):
        write(beside, tier, NAMES[0], one, one.progress(0.5))
    (tier.root / names.RUN_RECORD).unlink()
    with pytest.raises(SaveFailed, match="is gone"):
        write(beside, tier, NAMES[1], one)
    tier.replace(names.RUN_RECORD, b"{}")
    write(beside, tier, NAMES[2], one)
    assert content(tier, NAMES[2]) == content(tier, NAMES[0])


def test_that_the_disk_is_full_is_known_here_as_well_whoever_wrote(tmp_path, tier, beside):
    one = kept(tmp_path)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tier.root]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        tier.replace(names.RUN_RECORD, b"{}")
        with pytest.raises(TierUnavailable, match="No space left") as caught:
            write(beside, tier, NAMES[0], one)
    finally:
        subprocess.run(["umount", tier.root], check=True)
    assert is_full(caught.value)
    assert "free space on the file system" in caught.value.hint


def test_a_layout_that_came_while_memory_was_short_there_is_the_next_file_s(tmp_path, tier, beside):
    write(beside, tier, NAMES[0], kept(tmp_path))
    one, process = kept(tmp_path, width=2400), beside._process.pid
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[0])
    room = pages * resource.getpagesize() + len(one.shard.memory) // 2
    before = resource.prlimit(process, resource.RLIMIT_AS)
    resource.prlimit(process, resource.RLIMIT_AS, (room, before[1]))
    with pytest.raises(SaveFailed, match="Cannot allocate memory"):
        write(beside, tier, NAMES[1], one)
    resource.prlimit(process, resource.RLIMIT_AS, before)
    write(beside, tier, NAMES[2], one)
    other = LocalTier(tmp_path / "other")
    other.replace(names.RUN_RECORD, b"{}")
    write_shard(other, NAMES[2], 0, one.shard)
    assert content(tier, NAMES[2]) == content(other, NAMES[2])


def test_a_file_that_the_rank_gives_up_does_not_stay(tmp_path, tier, beside):
    one = kept(tmp_path)

    def changed():
        yield from one.progress(0.5)
        raise staging.TensorsChanged("w")

    with pytest.raises(staging.TensorsChanged):
        write(beside, tier, NAMES[0], one, changed())
    assert tier.list(NAMES[0].folder) == []
    write(beside, tier, NAMES[1], one)


def test_it_hears_no_signal_and_when_it_is_killed_the_rank_is_told_and_no_other_is_begun(
    tmp_path, tier, beside, caplog
):
    one = kept(tmp_path)
    write(beside, tier, NAMES[0], one)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(beside._process.pid, each)
    write(beside, tier, NAMES[1], one)

    def killed():
        yield from one.progress(0.5)
        beside._process.kill()
        beside._process.wait()
        yield from one.progress(0.6, 0.7)

    copied = killed()
    with caplog.at_level(logging.WARNING, "trainckpt"), pytest.raises(WriterDied):
        write(beside, tier, NAMES[2], one, copied)
    assert "the rank writes its files itself" in caplog.text
    with pytest.raises(WriterDied):
        write(beside, tier, NAMES[3], one)
    assert not beside.takes(tier, 1 << 40)
    tier.remove(f"{NAMES[2].folder}/rank00000.safetensors")
    write_shard(tier, NAMES[2], 0, one.shard, copied=copied)
    assert content(tier, NAMES[2]) == content(tier, NAMES[0])


def test_only_large_files_for_a_plain_disk_are_its_business(tier, tmp_path):
    class Other(Disk):
        pass

    assert WriterClient().takes(tier, writer_client.FROM_BYTES)
    assert not WriterClient().takes(tier, writer_client.FROM_BYTES - 1)
    assert not WriterClient().takes(LocalTier(tmp_path, Other()), 1 << 40)


STARTED = """
import os, sys
from trainckpt.snapshot.writer_client import WriterClient
beside = WriterClient()
beside.start()
print(beside._process.pid, flush=True)
sys.stdin.read(1)
os._exit(0)
"""


def test_it_ends_when_its_rank_does_whatever_way_that_goes():
    for how in (signal.SIGKILL, None):
        with subprocess.Popen(
            [sys.executable, "-c", STARTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as rank:
            other = int(rank.stdout.readline())
            if how is not None:
                rank.send_signal(how)
            else:
                rank.communicate(b"x")
        for _ in itertools.count():
            try:
                os.kill(other, 0)
                if "Z" in Path(f"/proc/{other}/stat").read_text(errors="replace").split()[2]:
                    break
            except (ProcessLookupError, FileNotFoundError):
                break


def test_nothing_of_torch_is_imported_there():
    code = "import sys, trainckpt.snapshot.writer_process; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_tensors_of_a_file_written_there_are_read_by_safetensors(tmp_path, tier, beside):
    safetensors = pytest.importorskip("safetensors.torch")
    write(beside, tier, NAMES[0], kept(tmp_path, value=0.25))
    path = tier.root / NAMES[0].folder / "rank00000.safetensors"
    assert torch.all(safetensors.load_file(path)["model/weight"] == 0.25)

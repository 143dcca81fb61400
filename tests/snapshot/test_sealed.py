"""Sealed files: written in chunks, read in any parts, refused if any byte is not what it was."""

from __future__ import annotations

import os
import random
import threading
from types import SimpleNamespace

import pytest

from trainckpt.encryption.encrypted_file import (
    CHUNK_BYTES,
    FOOTER_BYTES,
    TAG_BYTES,
    ChunkPosition,
    EncryptedLayout,
    Encryptor,
    read_footer,
)
from trainckpt.errors import UnusableSnapshot
from trainckpt.format import digest
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import decrypting_tier, encrypted_writer
from trainckpt.snapshot.encrypted_writer import (
    BLOCK_BYTES,
    SnapshotKey,
    stream_encrypted,
    write_encrypted,
)
from trainckpt.storage.direct_io import address
from trainckpt.storage.local import Disk, LocalTier

NAME, KEY = SnapshotName.parse("s2~1.1"), bytes(range(32))
FILE = "rank00000.safetensors"
HEAD = 8192
SEALERS = "trainckpt-seal"  # names of the threads


class Shard:
    """A file in memory; its head is known only when the rest is there."""

    def __init__(self, data: bytes, head_bytes: int) -> None:
        self._head = data[:head_bytes]
        self.memory = memoryview(bytearray(data))
        self.memory[:head_bytes] = bytes(head_bytes)
        self.header = SimpleNamespace(header_bytes=head_bytes)

    @property
    def head(self) -> bytes:
        return self._head


def content(num_bytes, seed=0):
    return random.Random(seed).randbytes(num_bytes)


def write(tier, data, head_bytes=HEAD, name=NAME, copied=(), key=KEY):
    shard = Shard(data, head_bytes)
    places = (address(shard.memory) + at for at in copied)
    return write_encrypted(
        tier, name, 0, shard, copied=places, snapshot_key=SnapshotKey("run", key)
    )


def reading(tier, entry, name=NAME, key=KEY, run="run"):
    """What `Opened.admit` makes of a manifest, for one file."""
    found = decrypting_tier.DecryptingTier(tier, decrypting_tier.KeyRing())
    found._sealed[f"{name.folder}/{entry.name}"] = (
        entry,
        key,
        ChunkPosition(run, str(name), entry.name),
    )
    return found


def read_all(tier, entry, **how):
    into = memoryview(bytearray(entry.content.num_bytes))
    name = how.get("name", NAME)
    reading(tier, entry, **how).read_into(f"{name.folder}/{entry.name}", 0, into)
    return bytes(into)


@pytest.fixture
def tier(tmp_path):
    return LocalTier(tmp_path)


SIZES = {
    "of a head alone": (HEAD, 0),
    "of less than a chunk": (HEAD, 5000),
    "of whole chunks": (HEAD, 3 * CHUNK_BYTES),
    "of a chunk and a byte": (HEAD, CHUNK_BYTES + 1),
    "of several blocks": (HEAD, 2 * BLOCK_BYTES + 3 * CHUNK_BYTES + 7),
    "of a head of several chunks": (2 * CHUNK_BYTES + 4096, 100),
}


@pytest.mark.parametrize("what", SIZES)
def test_a_file_comes_back_and_what_is_stored_says_nothing_of_it(tier, what):
    head, body = SIZES[what]
    data = content(head + body)
    entry = write(tier, data, head)
    stored = (tier.root / NAME.folder / FILE).read_bytes()
    assert (entry.num_bytes, entry.digest) == (len(stored), digest.digest(stored))
    assert entry.header_digest == digest.digest(stored[body:])
    assert entry.plain.header_digest == digest.digest(data[:head])
    assert entry.content.num_bytes == len(data)
    assert read_all(tier, entry) == data
    for at in range(0, len(data) - 64, max(len(data) // 50, 1)):
        assert data[at : at + 64] not in stored


def test_a_file_of_zeros_is_stored_as_anything_else_and_never_twice_the_same(tier):
    data = bytes(HEAD + 2 * CHUNK_BYTES)
    first = write(tier, data)
    one = (tier.root / NAME.folder / FILE).read_bytes()
    tier.remove(f"{NAME.folder}/{FILE}")
    second = write(tier, data)  # the very same save, tried again
    two = (tier.root / NAME.folder / FILE).read_bytes()
    assert first.digest != second.digest
    assert max(one.count(bytes(8)), two.count(bytes(8))) < 10  # the footer's numbers
    same = sum(a == b for a, b in zip(one[:CHUNK_BYTES], two[:CHUNK_BYTES], strict=True))
    assert same < CHUNK_BYTES // 128  # one in 256 by chance
    assert one[:CHUNK_BYTES] != one[CHUNK_BYTES : 2 * CHUNK_BYTES]


def test_it_is_encrypted_when_all_is_copied_since_training_may_wait_for_that(tier):
    data = content(HEAD + 2 * BLOCK_BYTES + 100)
    shard, waiting = Shard(bytes(len(data)), HEAD), []
    shard._head = data[:HEAD]

    def copied():
        begin = address(shard.memory)
        for at in range(HEAD, len(data), BLOCK_BYTES // 2):
            end = min(at + BLOCK_BYTES // 2, len(data))
            shard.memory[at:end] = data[at:end]
            waiting.append([t for t in threading.enumerate() if t.name.startswith(SEALERS)])
            yield begin + end

    entry = write_encrypted(
        tier, NAME, 0, shard, copied=copied(), snapshot_key=SnapshotKey("run", KEY)
    )
    assert waiting == [[]] * 5
    assert read_all(tier, entry) == data


class Told(Disk):
    """Tells when the first byte of a file is written."""

    def __init__(self):
        super().__init__()
        self.begun = threading.Event()

    def write(self, path, descriptor, block, first_byte):
        super().write(path, descriptor, block, first_byte)
        if path.suffix == ".safetensors":
            self.begun.set()


def test_it_is_written_when_all_is_copied_though_the_copy_is_still_being_proved(tmp_path):
    tier = LocalTier(tmp_path, Told())
    shard, seen = Shard(content(HEAD + 2 * BLOCK_BYTES), HEAD), []

    def copied():
        yield address(shard.memory) + len(shard.memory)
        seen.append(tier.disk.begun.wait(60))  # the next step comes later

    entry = write_encrypted(
        tier, NAME, 0, shard, copied=copied(), snapshot_key=SnapshotKey("run", KEY)
    )
    assert seen == [True]
    assert read_all(tier, entry)[HEAD:] == bytes(shard.memory[HEAD:])


class Slow(Disk):
    """Writes nothing before what it is told of has happened."""

    def __init__(self):
        super().__init__()
        self.ended = threading.Event()

    def write(self, path, descriptor, block, first_byte):
        assert self.ended.wait(10), "the copy's end waits for what is written"
        super().write(path, descriptor, block, first_byte)


def test_the_copy_ends_when_all_is_copied_however_long_it_takes_to_write_it(tmp_path):
    """Its end is measured, and the live tensors are looked at once more."""
    tier = LocalTier(tmp_path, Slow())
    shard = Shard(content(HEAD + 2 * BLOCK_BYTES), HEAD)

    def copied():
        yield address(shard.memory) + len(shard.memory)
        tier.disk.ended.set()

    entry = write_encrypted(
        tier, NAME, 0, shard, copied=copied(), snapshot_key=SnapshotKey("run", KEY)
    )
    assert read_all(tier, entry)[HEAD:] == bytes(shard.memory[HEAD:])


def test_what_is_abandoned_after_it_was_copied_leaves_nothing(tier):
    shard = Shard(content(HEAD + 2 * BLOCK_BYTES), HEAD)

    def copied():
        yield address(shard.memory) + len(shard.memory)
        raise ValueError("a tensor has changed")

    with pytest.raises(ValueError, match="has changed"):
        write_encrypted(tier, NAME, 0, shard, copied=copied(), snapshot_key=SnapshotKey("run", KEY))
    assert not list((tier.root / NAME.folder).iterdir())


class Held(Disk):
    """The file's first block is on its way until the fourth is."""

    def __init__(self):
        super().__init__()
        self.fourth = threading.Event()

    def write(self, path, descriptor, block, first_byte):
        if first_byte == 3 * CHUNK_BYTES:
            self.fourth.set()
        if first_byte == 0 and path.suffix == ".safetensors":
            assert self.fourth.wait(60)
        super().write(path, descriptor, block, first_byte)


def test_several_blocks_are_written_at_once_and_none_is_overwritten_before(tmp_path, monkeypatch):
    monkeypatch.setattr(encrypted_writer, "BLOCK_BYTES", CHUNK_BYTES)
    tier = LocalTier(tmp_path, Held())
    data = content(HEAD + 15 * CHUNK_BYTES)  # each buffer is used several times
    assert read_all(tier, write(tier, data)) == data


@pytest.mark.parametrize("piece", [1000, CHUNK_BYTES, 3 * CHUNK_BYTES - 1])
def test_a_file_that_passes_by_is_the_same_as_one_in_memory(tier, piece):
    data = content(HEAD + 3 * CHUNK_BYTES + 5 if piece > 1000 else HEAD + 30_000)

    def blocks():
        yield memoryview(data)[:HEAD]
        buffer = bytearray(piece)
        for at in range(HEAD, len(data), piece):
            step = data[at : at + piece]
            buffer[: len(step)] = step
            yield memoryview(buffer)[: len(step)]

    entry = stream_encrypted(
        tier,
        NAME,
        0,
        head=data[:HEAD],
        num_bytes=len(data),
        blocks=blocks(),
        snapshot_key=SnapshotKey("run", KEY),
    )
    assert read_all(tier, entry) == data


def test_any_parts_are_read_and_each_is_told_once(tier):
    data = content(HEAD + 12 * CHUNK_BYTES + 77)
    entry = write(tier, data)
    rng = random.Random(1)
    for _ in range(12):
        parts = []
        for _ in range(rng.randrange(1, 9)):
            at = rng.randrange(len(data))
            size = min(rng.choice([0, 1, 500, 70_000, 2 * CHUNK_BYTES, 10**8]), len(data) - at)
            parts.append((at, memoryview(bytearray(size))))
        told = []
        reading(tier, entry).read_parts(f"{NAME.folder}/{FILE}", parts, told.append)
        assert sorted(told) == list(range(len(parts)))
        assert all(bytes(into) == data[at : at + len(into)] for at, into in parts)


def test_what_lies_behind_the_end_is_refused(tier):
    entry = write(tier, content(HEAD + 100))
    with pytest.raises(UnusableSnapshot, match="ends too early"):
        reading(tier, entry).read_into(
            f"{NAME.folder}/{FILE}", HEAD + 50, memoryview(bytearray(51))
        )


def test_a_write_that_fails_leaves_nothing_and_ends_its_threads(tier):
    class Full(Exception):
        pass

    def copied():
        yield 0
        raise Full

    shard = Shard(content(HEAD + 3 * BLOCK_BYTES), HEAD)
    with pytest.raises(Full):
        write_encrypted(tier, NAME, 0, shard, copied=copied(), snapshot_key=SnapshotKey("run", KEY))
    assert not list((tier.root / NAME.folder).iterdir())


# ---- what is refused


def damaged(tier, entry, change):
    path = tier.root / NAME.folder / FILE
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(data) or data))
    return entry


def flip(at):
    def change(data):
        data[at] ^= 8

    return change


BODY = 2 * CHUNK_BYTES + 333
TAGS = 4 * TAG_BYTES


def swap_chunks(data):
    data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES] = (
        data[CHUNK_BYTES : 2 * CHUNK_BYTES],
        data[:CHUNK_BYTES],
    )


def swap_chunks_and_tags(data):
    swap_chunks(data)
    tags = BODY + HEAD
    data[tags : tags + 16], data[tags + 16 : tags + 32] = (
        data[tags + 16 : tags + 32],
        data[tags : tags + 16],
    )


CHANGES = {
    "the first bit": flip(0),
    "a bit of the second chunk": flip(CHUNK_BYTES + 5),
    "the last bit of the data": flip(BODY - 1),
    "a bit of the head": flip(BODY + 9),
    "a bit of the first tag": flip(BODY + HEAD),
    "a bit of the head's tag": flip(BODY + HEAD + TAGS - 1),
    "a bit of the salt": flip(-1),
    "two chunks swapped": swap_chunks,
    "two chunks swapped with their tags": swap_chunks_and_tags,
    "the mark at the end": flip(-FOOTER_BYTES),
    "the version": flip(-FOOTER_BYTES + 16),
    "the length of a chunk": flip(-FOOTER_BYTES + 20),
    "the length of the head": flip(-FOOTER_BYTES + 24),
    "the length of the body": flip(-FOOTER_BYTES + 32),
    "nothing but zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_was_changed_is_refused(tier, what):
    entry = damaged(tier, write(tier, content(HEAD + BODY)), CHANGES[what])
    with pytest.raises(UnusableSnapshot) as caught:
        read_all(tier, entry)
    assert "rank00000.safetensors" in caught.value.message


def test_every_chunk_alone_is_bound_to_its_file_snapshot_run_and_key(tier):
    data = content(HEAD + 100)
    entry = write(tier, data)
    other = SnapshotName.parse("s2~1.2")
    (tier.root / other.folder).mkdir()
    os.link(tier.root / NAME.folder / FILE, tier.root / other.folder / FILE)
    for how in ({"name": other}, {"run": "another"}, {"key": bytes(32)}):
        with pytest.raises(UnusableSnapshot, match="not what was encrypted for this place"):
            read_all(tier, entry, **how)
    assert read_all(tier, entry) == data


def test_a_file_that_was_cut_anywhere_is_refused_also_if_its_end_was_mended(tier):
    """Whoever cuts may write a footer that fits what is left."""
    data = content(HEAD + BODY)
    entry = write(tier, data)
    stored = (tier.root / NAME.folder / FILE).read_bytes()
    _, salt = read_footer(stored[-FOOTER_BYTES:], len(stored), FILE)
    cuts = [
        0,
        1,
        FOOTER_BYTES - 1,
        FOOTER_BYTES,
        CHUNK_BYTES,
        BODY,
        BODY + HEAD,
        BODY + HEAD + 16,
        len(stored) - FOOTER_BYTES,
        len(stored) - 1,
    ]
    for cut in cuts:
        (tier.root / NAME.folder / FILE).write_bytes(stored[:cut])
        with pytest.raises(UnusableSnapshot):
            read_all(tier, entry)
    shorter = EncryptedLayout(HEAD, CHUNK_BYTES)
    forged = Encryptor(bytes(32), ChunkPosition("", "", ""), shorter)
    end = stored[BODY : BODY + HEAD] + stored[BODY + HEAD : BODY + HEAD + 16]
    end += stored[-FOOTER_BYTES - 16 : -FOOTER_BYTES]
    for number in range(shorter.num_chunks):
        size = shorter.chunk(number).num_bytes
        forged.encrypt(number, memoryview(bytearray(size)), memoryview(bytearray(size + 16)))
    footer = forged.tail()[-FOOTER_BYTES:-24] + salt
    (tier.root / NAME.folder / FILE).write_bytes(stored[:CHUNK_BYTES] + end + footer)
    mended = type(entry)(
        FILE, shorter.stored_bytes, "", "", True, type(entry.plain)(shorter.plain_bytes, "")
    )
    with pytest.raises(UnusableSnapshot, match="not what was encrypted for this place"):
        read_all(tier, mended)


def test_a_chunk_is_never_encrypted_twice():
    sealer = Encryptor(KEY, ChunkPosition("run", "s2~1.1", FILE), EncryptedLayout(10, 100))
    sealer.encrypt(0, memoryview(bytes(100)), memoryview(bytearray(116)))
    with pytest.raises(ValueError, match="encrypted once"):
        sealer.encrypt(0, memoryview(bytes(100)), memoryview(bytearray(116)))
    with pytest.raises(ValueError, match="not every chunk"):
        sealer.tail()

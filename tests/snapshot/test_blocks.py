"""What is wanted of a file is read once, in few reads, and verified by whichever thread read it."""

from __future__ import annotations

import threading
from itertools import pairwise
from random import Random

import pytest
import torch

from tests.faults.test_bad_bytes import flip
from tests.snapshot import layouts
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.layout import Box, replicated
from trainckpt.snapshot import restore
from trainckpt.snapshot.restore import read_header
from trainckpt.state import destination, staging
from trainckpt.storage import direct_io
from trainckpt.storage.local import Disk, LocalTier

PAGE = direct_io.PAGE_BYTES
# Of a few bytes, of some pages, of many blocks; some of them begin where no page does.
SHAPES = {
    "a": (3,),
    "b": (5000,),
    "c": (70, 701),
    "d": (1,),
    "e": (0, 4),
    "f": (33, 1031),
    "g": (2048,),
    "h": (),
    "i": (9000,),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A file of some hundred kilobytes is read as one of some gigabytes."""
    for module in (direct_io, restore, destination):
        monkeypatch.setattr(module, "FROM_BYTES", 4 * PAGE)
    for name in ("PIECE_BYTES", "WRITE_PIECE_BYTES"):
        monkeypatch.setattr(direct_io, name, 4 * PAGE)
    monkeypatch.setattr(restore, "BORROWED_FROM_BYTES", 4 * PAGE)
    monkeypatch.setattr(restore, "READ_BYTES", 8 * PAGE)
    monkeypatch.setattr(restore, "SCRATCH_BYTES", 16 * PAGE)


class Noting(layouts.Counting):
    """Notes the place and the length of every read of tensors, and where it goes to."""

    def __init__(self, tier):
        super().__init__(tier)
        self.parts = []

    def read_parts(self, key, parts, done):
        self.parts += [(at, len(into), direct_io.address(into)) for at, into in parts]
        super().read_parts(key, parts, done)


@pytest.fixture
def saved(tmp_path):
    random = Random(3)
    tensors = {name: layouts.drawn(random, shape) for name, shape in SHAPES.items()}
    tensors["bytes"] = torch.arange(5, dtype=torch.uint8)
    tier = LocalTier(tmp_path)
    manifest = layouts.save(tier, 1, tensors, dict.fromkeys(tensors, replicated(1)))
    return Noting(tier), manifest, tensors


def same(found, expected):
    return bytes(staging.bytes_of(found)) == bytes(staging.bytes_of(expected))


def regions(tier, manifest):
    """Region -> (where it begins in the file, how long it is)."""
    header = read_header(tier, manifest.name.folder, manifest.files[0])
    return {r.key: (header.header_bytes + r.first_byte, r.num_bytes) for r in header.regions}


def test_everything_is_read_once_in_few_reads_and_what_is_large_straight_to_its_place(saved):
    tier, manifest, tensors = saved
    found = layouts.restore(tier, manifest, dict.fromkeys(manifest.tensors))
    assert all(same(found[name], tensors[name]) for name in tensors if tensors[name].numel())
    total = sum(tensor.nbytes for tensor in found.values())
    assert sum(size for _, size, _ in tier.parts) == total
    assert len(tier.parts) < total / (8 * PAGE) + len(SHAPES)
    places = regions(tier, manifest)
    for name in ("b", "c", "f", "i"):
        begin, size = places[name]
        at = found[name].data_ptr()
        assert (at - begin) % PAGE == 0
        assert found[name].untyped_storage().nbytes() == size
        inside = [
            n
            for first, n, to in tier.parts
            if begin <= first < begin + size and to == at + first - begin
        ]
        assert sum(inside) > size - 4 * PAGE  # the rest is short, and read with its neighbours


@pytest.mark.parametrize("number", range(12))
def test_any_part_of_a_tensor_is_what_it_was_and_little_more_is_read(saved, number):
    tier, manifest, tensors = saved
    random = Random(number)
    wanted = {}
    for name, shape in SHAPES.items():
        first = tuple(random.randint(0, n) for n in shape)
        extent = tuple(random.randint(0, n - o) for o, n in zip(first, shape, strict=True))
        if len(shape) > 1 and random.random() < 0.5:  # rows, which are one run of bytes
            first, extent = (first[0], *(0 for _ in shape[1:])), (extent[0], *shape[1:])
        wanted[name] = Box(first, extent)
    found = layouts.restore(tier, manifest, wanted)
    for name, box in wanted.items():
        if not box.is_empty:
            assert same(found[name], layouts.part(tensors[name], box).contiguous()), name
    runs = sorted((at, at + size) for at, size, _ in tier.parts)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(runs))


def test_a_flipped_bit_anywhere_is_found_and_named_whichever_thread_reads_it(saved):
    tier, manifest, _ = saved
    path = tier.root / manifest.name.folder / manifest.files[0].name
    random = Random(1)
    for name, (begin, size) in regions(tier, manifest).items():
        for at in {begin, begin + size - 1, begin + random.randrange(size)} if size else ():
            flip(path, at)
            with pytest.raises(UnusableSnapshot) as caught:
                layouts.restore(tier, manifest, dict.fromkeys(manifest.tensors))
            flip(path, at)
            key = f"{manifest.name.folder}/{path.name}"
            assert caught.value.message == f"{key}: {name} does not match its digest"
    layouts.restore(tier, manifest, dict.fromkeys(manifest.tensors))


def test_a_file_cut_short_is_refused_by_name(saved):
    tier, manifest, _ = saved
    path = tier.root / manifest.name.folder / manifest.files[0].name
    data = path.read_bytes()
    for cut in (1, PAGE, 20 * PAGE):
        path.write_bytes(data[:-cut])
        with pytest.raises(UnusableSnapshot, match=f"{path.name} ends .* bytes too early"):
            layouts.restore(tier, manifest, dict.fromkeys(manifest.tensors))


def test_a_disk_that_gives_other_bytes_the_second_time_is_not_asked_a_second_time(saved):
    """What was verified is what is used; also where a page holds the end of one and the next."""
    tier, manifest, tensors = saved
    header_bytes = min(begin for begin, _ in regions(tier, manifest).values())
    seen, asking = set(), threading.Lock()

    class Fickle(Disk):
        def read(self, path, descriptor, into, first_byte):
            got = super().read(path, descriptor, into, first_byte)
            places = set(range(max(first_byte, header_bytes), first_byte + got))
            with asking:
                again = places & seen
                seen.update(places)
            for at in again:
                into[at - first_byte] ^= 1
            return got

    found = layouts.restore(
        LocalTier(tier.root, Fickle()), manifest, dict.fromkeys(manifest.tensors)
    )
    assert all(same(found[name], tensors[name]) for name in tensors if tensors[name].numel())

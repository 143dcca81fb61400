"""Ranks of one host read each byte once between them, and verify what they take of each other."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.faults.test_bad_bytes import flip
from tests.snapshot import layouts
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.layout import Layout, replicated
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.shares import Share
from trainckpt.state.destination import Destination
from trainckpt.tiers import other_memory
from trainckpt.tiers.common_memory import CommonMemory
from trainckpt.tiers.local import LocalTier

OWN = ("c", "d")  # as an optimizer's state is
SHAPES = {"a": (700, 300), "b": (64, 1000), "c": (1000, 300), "d": (500, 500), "few": (7,)}


class Host:
    """Ranks of one host, all of them in this process: each other's memory is read as it is."""

    def __init__(self, tier, manifest, num, own=None, *, common=True):
        """`own`: of each rank, the tensors that are to become live themselves."""
        self.tiers = [layouts.Counting(tier) for _ in range(num)]
        self.readers = [Reader(each, manifest) for each in self.tiers]
        self.wanted = dict.fromkeys(manifest.tensors)
        own = own or [OWN] * num
        self.destinations = [Destination(self.wanted, own=own[n]) for n in range(num)]
        self.manifest = manifest
        first = CommonMemory.make()
        others = [CommonMemory.opened(str(first.target)) for _ in range(num - 1)]
        memories = [first, *others] if common else [None] * num
        for number, reader in enumerate(self.readers):
            reader.share = Share(number, num, manifest, memories[number])

    def read_shares(self):
        for reader, destination in zip(self.readers, self.destinations, strict=True):
            reader.read(self.wanted, destination, donor=0)
        return [reader.share.told() for reader in self.readers]

    def take(self, *, agreed=None):
        """What every rank missed, or the error that it found."""
        told, found = [reader.share.told() for reader in self.readers], []
        if agreed is None:
            agreed = len({reader.share.dealt for reader in self.readers}) == 1
        for reader in self.readers:
            try:
                found.append(reader.take(told, agreed=agreed))
            except UnusableSnapshot as error:
                found.append(error)
        return found

    def tensors(self, number):
        types = {name: entry.dtype for name, entry in self.manifest.tensors.items()}
        return self.destinations[number].finish(types)


def saved(tier, world):
    """By so many ranks that hold the same tensors."""
    random = Random(1)
    tensors = {name: layouts.drawn(random, shape) for name, shape in SHAPES.items()}
    return tensors, layouts.save(tier, world, tensors, dict.fromkeys(SHAPES, replicated(world)))


def equal(found, tensors):
    return all(
        torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize(("then", "now"), [(2, 2), (1, 2), (2, 4), (3, 2), (4, 3)])
def test_each_byte_is_read_once_by_all_ranks_of_a_host(tmp_path, then, now, common):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, then)
    host = Host(tier, manifest, now, common=common)
    told = host.read_shares()
    read = [tier.num_bytes for tier in host.tiers]
    assert [reader.take(told) for reader in host.readers] == [0] * now
    assert [tier.num_bytes for tier in host.tiers] == read  # no more than before
    assert all(equal(host.tensors(number), tensors) for number in range(now))
    total = sum(tensor.nbytes for tensor in tensors.values())
    small = 65536 * len(SHAPES) * then  # at most; read by every rank, as headers are
    assert sum(read) <= total + now * small
    assert max(read) < 0.75 * total


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_in_any_layout_every_rank_has_all_of_what_it_wants(tmp_path, seed, common):
    """Columns, rows and replicas: what is put in pieces, and what others do not want."""
    random = Random(seed)
    then = random.choice((1, 2, 4))
    tensors = {name: layouts.drawn(random, shape) for name, shape in SHAPES.items()}
    lying = {n: layouts.draw_layout(random, then, t.dim()) for n, t in tensors.items()}
    tier = LocalTier(tmp_path)
    manifest = layouts.save(tier, then, tensors, lying)
    host = Host(tier, manifest, random.choice((2, 3, 4)), common=common)
    told = host.read_shares()
    for number, reader in enumerate(host.readers):
        reader.take(told)
        assert not reader.share.left
        assert equal(host.tensors(number), tensors)


def test_what_rows_were_divided_into_columns_is_put_together_by_each(tmp_path):
    random = Random(3)
    lying = {"w": Layout((2, 2), (2, 1), 0, (None, 1), (0, 1))}
    tensors = {"w": layouts.drawn(random, (600, 600))}
    tier = LocalTier(tmp_path)
    manifest = layouts.save(tier, 4, tensors, lying)
    host = Host(tier, manifest, 2)
    told = host.read_shares()
    assert [reader.take(told) for reader in host.readers] == [0, 0]
    assert all(equal(host.tensors(number), tensors) for number in range(2))


def test_what_another_rank_does_not_have_is_read_after_all(tmp_path):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2, common=False)
    told = host.read_shares()
    left = [sum(len(load.into) for load in reader.share.left) for reader in host.readers]
    gone = other_memory.Place(told[1].process, 4096, told[1].num_bytes)
    assert host.readers[0].take([told[0], gone]) == left[0] > 500_000
    assert host.readers[1].take([told[0]]) == 0
    assert equal(host.tensors(0), tensors)
    assert equal(host.tensors(1), tensors)


def test_what_has_changed_in_anothers_memory_is_not_believed(tmp_path):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    told = host.read_shares()
    host.readers[1].share._own[0].into[5] ^= 1
    length = len(host.readers[1].share._own[0].into)
    assert host.readers[0].take(told) == length
    assert equal(host.tensors(0), tensors)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"x":3}', b'{"x":[1,2]}', b'{"x":["a",1,2]}', b"\xff"]
)
def test_a_table_that_is_none_is_as_if_there_were_none(tmp_path, text):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    host.read_shares()
    table = bytearray(text or b" ")
    assert host.readers[0].take([other_memory.place_of(memoryview(table))]) > 500_000
    assert equal(host.tensors(0), tensors)


def test_damage_is_found_by_the_rank_that_reads_it(tmp_path):
    tier = LocalTier(tmp_path)
    _, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    file = manifest.files[1]
    flip(tier.root / manifest.name.folder / file.name, file.num_bytes // 2)
    host.readers[0].read(host.wanted, host.destinations[0], donor=0)
    with pytest.raises(UnusableSnapshot, match="rank00001"):
        host.readers[1].read(host.wanted, host.destinations[1], donor=0)


def test_what_each_rank_holds_of_its_own_is_left_to_nobody(tmp_path):
    tier = LocalTier(tmp_path)
    random = Random(2)
    alike = layouts.drawn(random, (300, 300))
    manifest = layouts.save(
        tier, 2, {"alike": alike}, {"alike": replicated(2)},
        own=lambda rank: {"own": torch.full((300, 300), float(rank))},
    )  # fmt: skip
    host = Host(tier, manifest, 2)
    host.read_shares()
    assert {load.place.region.tensor for r in host.readers for load in r.share.left} == {"alike"}


def test_what_is_read_after_the_others_were_asked_is_left_to_nobody(tmp_path):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    told = host.read_shares()
    host.readers[0].take(told)
    again = Destination(host.wanted)
    host.readers[0].read(host.wanted, again, donor=0)
    assert not host.readers[0].share.left
    assert equal(again.finish({n: entry.dtype for n, entry in manifest.tensors.items()}), tensors)


def test_what_each_rank_needs_otherwise_now_is_read_by_each(tmp_path):
    tier = LocalTier(tmp_path)
    _, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    for reader in host.readers:
        reader.share.apart = {"a", "b", "c"}
    host.read_shares()
    assert {load.place.region.tensor for r in host.readers for load in r.share.left} == {"d"}
    assert {load.place.region.tensor for r in host.readers for load in r.share._own} == {"d"}


def test_what_waits_to_be_applied_lies_once_for_all_ranks(tmp_path):
    tier = LocalTier(tmp_path)
    _, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    host.read_shares()
    assert host.take() == [0, 0]
    first, second = host.tensors(0), host.tensors(1)
    for name in SHAPES:
        first[name].view(-1)[3] = 77.0
        lies_once = name not in (*OWN, "few")
        assert (second[name].view(-1)[3].item() == 77.0) == lies_once, name
    assert set(host.destinations[0].borrowed) == {"a", "b"}


def test_ranks_that_want_their_own_parts_lie_what_is_whole_on_all_alike(tmp_path):
    """As in a resume of HSDP in its own layout: "row" is whole on two ranks, and not on others."""
    random = Random(5)
    hsdp = Layout((2, 2), (2, 1), 0, (None, 0), (0, 1))
    shapes = {"row": (1, 40_000), "rows": (600, 300), "whole": (300, 400)}
    tensors = {name: layouts.drawn(random, shape) for name, shape in shapes.items()}
    lying = {"row": hsdp, "rows": hsdp, "whole": replicated(4)}
    tier = LocalTier(tmp_path)
    manifest = layouts.save(tier, 4, tensors, lying)
    host = Host(tier, manifest, 4, own=[()] * 4)
    boxes = []
    for rank, reader in enumerate(host.readers):
        wanted = {n: at.box(shapes[n], at.coordinate(rank)) for n, at in lying.items()}
        host.destinations[rank] = Destination(wanted)
        reader.read(wanted, host.destinations[rank], donor=rank)
        boxes.append(wanted)
    assert host.take() == [0] * 4
    assert [d.borrowed for d in host.destinations] == [{"whole"}] * 4
    for rank, wanted in enumerate(boxes):
        found = host.tensors(rank)
        for name, box in wanted.items():
            part = tensors[name]
            for d, (first, size) in enumerate(zip(box.offset, box.shape, strict=True)):
                part = part.narrow(d, first, size)
            assert torch.equal(found[name].view(torch.int32), part.contiguous().view(torch.int32))


def test_on_an_accelerator_all_of_the_state_lies_once_for_all_ranks(tmp_path):
    """There nothing that is read becomes live: each rank would have all of it on its host."""
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 4, own=[()] * 4)
    host.read_shares()
    assert host.take() == [0] * 4
    assert all(equal(host.tensors(number), tensors) for number in range(4))
    assert all(d.borrowed == {"a", "b", "c", "d"} for d in host.destinations)


@pytest.mark.parametrize("agreed", [True, False])
def test_what_is_bad_in_the_memory_of_all_is_found_by_whoever_has_not_read_it(tmp_path, agreed):
    """And by all, if they do not mean the same by who writes what."""
    tier = LocalTier(tmp_path)
    _, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2)
    host.read_shares()
    host.readers[1].share._in_common[-1].into[5] ^= 1
    found = [isinstance(each, UnusableSnapshot) for each in host.take(agreed=agreed)]
    assert found == [not agreed, True]


def check(host, tensors):
    """Take; how many ranks have found that it is not good. All others have what was saved."""
    found = host.take()
    for number, each in enumerate(found):
        assert isinstance(each, UnusableSnapshot) or equal(host.tensors(number), tensors)
    return sum(isinstance(each, UnusableSnapshot) for each in found)


@pytest.mark.parametrize("own", [[("a",), ()], [(), ("a",)], [OWN, ()], [("a",), ("d",)]])
def test_ranks_that_lay_it_out_otherwise_never_go_on_with_what_is_not_so(tmp_path, own):
    """They are never to: then one writes over what another has read."""
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2, own=own)
    host.read_shares()
    assert len({reader.share.dealt for reader in host.readers}) == 2
    assert check(host, tensors) > 0


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_cannot_map_the_memory_of_all_is_found_out(tmp_path, monkeypatch, number):
    tier = LocalTier(tmp_path)
    tensors, manifest = saved(tier, 2)
    host = Host(tier, manifest, 2, own=[()] * 2)

    def refuse(num_bytes):
        raise OSError("no memory")

    monkeypatch.setattr(host.readers[number].share._common, "mapped", refuse)
    host.read_shares()
    assert len({reader.share.dealt for reader in host.readers}) == 2
    assert check(host, tensors) == 1  # the other one; so all read it again

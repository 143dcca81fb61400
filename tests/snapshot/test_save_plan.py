"""Save plan and restore plan, over all ranks: every byte once, evenly, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.cursor import Cursor
from trainckpt.format.manifest import RANK, SPLIT, FileEntry, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.format.shard_file import ITEM_BYTES, Region, ShardHeader, lay_out
from trainckpt.snapshot.restore_plan import plan_restore
from trainckpt.snapshot.save_plan import UNCUT_BYTES, plan_save

SHAPES = st.one_of(
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.tuples(st.integers(1, 3000), st.sampled_from([1, 7, 64, 1000])),
)


@st.composite
def states(draw):
    """Whole regions, their groups, which groups are shared, and a number of ranks."""
    regions, groups = [], {}
    for number in range(draw(st.integers(0, 12))):
        shape = draw(SHAPES)
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        name = f"t{draw(st.integers(0, 99))}.{number}"
        regions.append(Region(name, dtype, (0,) * len(shape), shape, shape))
        if draw(st.booleans()):
            groups[name] = draw(st.sampled_from(["a", "b"]))
    return regions, groups, draw(st.sets(st.sampled_from(["a", "b"]))), draw(st.integers(1, 9))


def plans(state):
    regions, groups, shared, world = state
    return [plan_save(regions, groups, shared, rank=r, world=world) for r in range(world)]


@settings(deadline=None, max_examples=200)
@given(states())
def test_every_byte_of_a_shared_tensor_is_stored_once_and_of_any_other_by_every_rank(state):
    regions, groups, shared, world = state
    planned = plans(state)
    for whole in regions:
        parts = [p for plan in planned for p in plan if p.tensor == whole.tensor]
        if groups.get(whole.tensor) not in shared:
            assert parts == [whole] * world
            continue
        rows = sorted(
            row for p in parts for row in range(p.offset[0], p.offset[0] + p.shape[0])
        ) if whole.shape else [0] * len(parts)  # fmt: skip
        assert rows == list(range(whole.shape[0] if whole.shape else 1))
        assert len(parts) == 1 or all(p.shape[1:] == whole.shape[1:] for p in parts)
        assert sum(p.num_bytes for p in parts) == whole.num_bytes


@settings(deadline=None, max_examples=200)
@given(states())
def test_ranks_store_as_much_as_each_other_within_a_row_and_an_uncut_tensor(state):
    regions, groups, shared, world = state
    split = [r for r in regions if groups.get(r.tensor) in shared]
    total = sum(r.num_bytes for r in split)
    row = max((r.num_bytes // r.shape[0] for r in split if r.shape and r.shape[0]), default=0)
    for plan in plans(state):
        mine = sum(p.num_bytes for p in plan if groups.get(p.tensor) in shared)
        assert abs(mine - total / world) <= row + UNCUT_BYTES


def snapshot_of(state):
    regions, groups, shared, world = state
    headers = [
        ShardHeader(rank, world, lay_out(plan), 4096) for rank, plan in enumerate(plans(state))
    ]
    entries = {
        r.tensor: TensorEntry(r.dtype, r.of, SPLIT if groups.get(r.tensor) in shared else RANK)
        for r in regions
    }
    d = "0" * 32
    files = tuple(FileEntry(f"{h.rank}", 4096 + h.data_bytes, d, d) for h in headers)
    name = SnapshotName(1, 1, 0, 0)
    return Manifest("r", name, None, Cursor(), world, files, entries, 0.0), headers


@settings(deadline=None, max_examples=200)
@given(states())
def test_every_rank_reads_every_byte_of_what_it_had_once(state):
    regions, _, _, world = state
    manifest, headers = snapshot_of(state)
    for rank in range(world):
        reads = plan_restore(manifest, headers, rank=rank)
        assert sum(r.region.num_bytes for r in reads) == sum(r.num_bytes for r in regions)
        assert len({(r.region.tensor, r.region.offset) for r in reads}) == len(reads)
        assert {r.region.tensor for r in reads} == {r.tensor for r in regions}


WHOLE = Region("w", "F32", (0, 0), (40_000, 4), (40_000, 4))
TWO_RANKS = ([WHOLE], {"w": "g"}, {"g"}, 2)


def hostile(*changes):
    """The restore plan of a two-rank snapshot of one matrix, with its regions changed."""
    manifest, headers = snapshot_of(TWO_RANKS)
    headers = [
        replace(header, regions=tuple(change(header.regions[0])))
        for header, change in zip(headers, changes, strict=True)
    ]
    return plan_restore(manifest, headers, rank=0)


def as_it_is(region):
    return [region]


def test_the_hostile_snapshot_of_these_tests_is_otherwise_fine():
    assert len(hostile(as_it_is, as_it_is)) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda r: [],  # rows that no file holds
        lambda r: [replace(r, offset=(0, 0))],  # the first half twice, the second never
        lambda r: [replace(r, offset=(19_999, 0))],  # overlapping
        lambda r: [replace(r, offset=(20_000, 0), shape=(20_000, 2))],  # cut across its rows
        lambda r: [r, replace(r, shape=(0, 4))],  # a part of nothing
        lambda r: [replace(r, tensor="v")],  # not in the manifest
        lambda r: [replace(r, of=(2**40, 4))],  # of another shape than the manifest says
        lambda r: [replace(r, dtype="I32")],
    ],
)
def test_regions_that_do_not_make_up_the_tensor_are_refused(change):
    with pytest.raises(UnusableSnapshot):
        hostile(as_it_is, change)


def test_tensors_bigger_than_all_files_together_are_refused_before_memory_is_taken():
    """Each claims a few bytes of a tensor as large as the snapshot; there are thousands."""
    manifest, headers = snapshot_of(TWO_RANKS)
    of = (manifest.num_bytes // 4,)
    liars = [Region(f"l{i}", "F32", (0,), (1,), of) for i in range(1000)]
    entries = {r.tensor: TensorEntry("F32", of, SPLIT) for r in liars}
    manifest = replace(manifest, tensors={**manifest.tensors, **entries})
    headers[0] = replace(headers[0], regions=(*headers[0].regions, *liars))
    with pytest.raises(UnusableSnapshot):
        plan_restore(manifest, headers, rank=0)


@pytest.mark.parametrize("shape", [(0, 4), (2**40, 0)])
def test_an_empty_part_of_a_huge_tensor_is_refused(shape):
    manifest, headers = snapshot_of(TWO_RANKS)
    liar = Region("l", "F32", (0, 0), shape, (2**40, 4) if shape[1] else shape)
    manifest.tensors["l"] = TensorEntry("F32", liar.of, SPLIT)
    headers[0] = replace(headers[0], regions=(*headers[0].regions, liar))
    if shape == (2**40, 0):  # whole, and really without a byte
        assert plan_restore(manifest, headers, rank=0)
    else:
        with pytest.raises(UnusableSnapshot):
            plan_restore(manifest, headers, rank=0)


def test_a_tensor_of_one_rank_that_is_cut_is_refused():
    manifest, headers = snapshot_of(TWO_RANKS)
    manifest.tensors["w"] = TensorEntry("F32", WHOLE.of, RANK)
    with pytest.raises(UnusableSnapshot, match="no rank has the rest"):
        plan_restore(manifest, headers, rank=0)

"""Save plan and restore plan, over all ranks: every byte once, evenly, and back."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.snapshot.layouts import MESHES, mesh_of
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.cursor import Cursor
from trainckpt.format.layout import UNCUT_BYTES, Box, Layout, Stretch, replicated, whole
from trainckpt.format.manifest import FileEntry, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName, shard_file_name
from trainckpt.format.shard_file import ITEM_BYTES, Region
from trainckpt.snapshot.restore_plan import find, plan_restore
from trainckpt.snapshot.save_plan import equal_groups, plan_save

SHAPES = st.one_of(
    st.lists(st.integers(0, 6), max_size=3).map(tuple),
    st.tuples(st.integers(1, 3000), st.sampled_from([1, 7, 64, 1000])),
)


@st.composite
def states(draw):
    """Tensors, how each lies over the ranks (None: each rank's own), and a number of ranks."""
    world = draw(st.sampled_from(sorted(MESHES)))
    tensors = {}
    for number in range(draw(st.integers(0, 10))):
        shape, mesh = draw(SHAPES), draw(st.sampled_from(MESHES[world]))
        dims = [None, *range(len(shape))]
        divided = tuple(draw(st.sampled_from(dims)) for _ in mesh)
        order = tuple(draw(st.permutations(range(len(mesh)))))
        layout = Layout(mesh, mesh_of(mesh), 0, divided, order) if draw(st.booleans()) else None
        dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
        tensors[f"t{draw(st.integers(0, 99))}.{number}"] = (dtype, shape, layout)
    return tensors, world


def held(tensors, rank):
    """The region of each tensor that a rank holds."""
    found = []
    for name, (dtype, shape, layout) in tensors.items():
        box = layout.box(shape, layout.coordinate(rank)) if layout else whole(shape)
        found.append(Region(name, dtype, box.offset, box.shape, shape))
    return found


def plans(state):
    tensors, world = state
    layouts = {name: layout for name, (_, _, layout) in tensors.items() if layout}
    return [plan_save(held(tensors, rank), layouts, rank=rank) for rank in range(world)]


def manifest_of(state):
    tensors, world = state
    entries = {
        name: TensorEntry(dtype, shape, layout) for name, (dtype, shape, layout) in tensors.items()
    }
    files = [FileEntry(shard_file_name(r), 4096, "0" * 32, "0" * 32) for r in range(world)]
    return Manifest("r", SnapshotName(1, 1, 0, 0), None, Cursor(), world, files, entries, 0.0)


@settings(deadline=None, max_examples=150)
@given(states())
def test_every_element_is_stored_once_and_of_a_ranks_own_tensor_by_every_rank(state):
    tensors, world = state
    planned = plans(state)
    for name, (_, shape, layout) in tensors.items():
        parts = [p for plan in planned for p in plan if p.tensor == name]
        if layout is None:
            assert [p.shape for p in parts] == [shape] * world
            continue
        boxes = [p.box for p in parts if not p.box.is_empty]
        assert sum(prod(p.shape) for p in parts) == prod(shape)
        for i, a in enumerate(boxes):
            assert all(a.common(b).is_empty for b in boxes[:i] if shape)


@settings(deadline=None, max_examples=150)
@given(states())
def test_replicas_store_as_much_as_each_other_within_a_row_and_an_uncut_tensor(state):
    tensors, world = state
    plain = {n: (d, s, replicated(world)) for n, (d, s, _) in tensors.items()}
    planned = plans((plain, world))
    regions = [r for r in held(plain, 0) if not r.box.is_empty]
    total = sum(r.num_bytes for r in regions)
    row = max((r.num_bytes // r.shape[0] for r in regions if r.shape), default=0)
    for plan in planned:
        assert abs(sum(p.num_bytes for p in plan) - total / world) <= row + UNCUT_BYTES


@settings(deadline=None, max_examples=150)
@given(states(), st.integers(0, 2**32))
def test_a_box_is_read_from_where_it_was_stored_and_no_element_twice(state, seed):
    tensors, world = state
    stored = [{p.key: p for p in plan} for plan in plans(state)]
    manifest, random = manifest_of(state), Random(seed)
    wanted = {}
    for name, (_, shape, _) in tensors.items():
        offset = tuple(random.randint(0, n) for n in shape)
        extent = tuple(random.randint(0, n - o) for o, n in zip(offset, shape, strict=True))
        wanted[name] = Box(offset, extent) if random.random() < 0.7 else None
    wanted = {n: box if tensors[n][2] else None for n, box in wanted.items()}
    parts = {name: [] for name in tensors}
    for read in plan_restore(manifest, wanted, donor=world - 1):
        region = find(read, manifest.tensors[read.tensor], stored[read.file], "it")
        part = read.part or region.box
        assert part.common(region.box) == part
        parts[read.tensor].append(part)
    for name, (_, shape, _) in tensors.items():
        box = wanted[name] or whole(shape)
        found = [p for p in parts[name] if not p.is_empty]
        assert sum(prod(p.shape) for p in found) == prod(box.shape)
        for i, a in enumerate(found):
            assert a.common(box) == a
            assert all(a.common(b).is_empty for b in found[:i] if shape)


@settings(max_examples=300)
@given(
    st.lists(st.integers(1, 9 * UNCUT_BYTES), min_size=1, max_size=4),
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(0, 2**32),
)
def test_the_holders_of_rows_are_those_that_store_them_also_where_there_are_more_than_rows(
    sizes, replicas, rows, seed
):
    random = Random(seed)
    stretch = Stretch({f"t{i}": size for i, size in enumerate(sizes)}, replicas)
    low, high = sorted((random.randint(0, rows), random.randint(0, rows)))
    for i in range(len(sizes)):
        name, box = f"t{i}", Box((0,), (rows,))
        stored = [(r, *stretch.rows(name, box, r)) for r in range(replicas)]
        wanted = {held for held in stored if held[1] < min(held[2], high) and held[2] > low}
        if low < high:
            assert wanted == set(stretch.holders(name, box, low, high)) & set(stored)
            assert wanted <= set(stretch.holders(name, box, low, high))


def test_a_billion_replicas_of_a_few_rows_are_not_counted_one_by_one():
    stretch = Stretch({"t": 10 * UNCUT_BYTES}, 10**9)
    held = list(stretch.holders("t", Box((0,), (100,)), 0, 100))
    assert [(first, last) for _, first, last in held] == [(n, n + 1) for n in range(100)]


LAYOUT = replicated(2)
TWO_RANKS = ({"w": ("F32", (40_000, 4), LAYOUT)}, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: [],  # rows that no file holds
        lambda r: [replace(r, offset=(0, 0))],
        lambda r: [replace(r, offset=(19_999, 0))],
        lambda r: [replace(r, offset=(20_000, 0), shape=(20_000, 2))],
        lambda r: [replace(r, tensor="v")],
        lambda r: [replace(r, of=(2**40, 4))],  # of another shape than the manifest says
        lambda r: [replace(r, dtype="I32")],
    ],
)
def test_regions_that_are_not_what_the_manifest_says_are_refused(change):
    manifest, planned = manifest_of(TWO_RANKS), plans(TWO_RANKS)
    reads = plan_restore(manifest, {"w": None}, donor=0)
    second = next(read for read in reads if read.file == 1)
    regions = {region.key: region for region in change(planned[1][0])}
    with pytest.raises(UnusableSnapshot):
        find(second, manifest.tensors["w"], regions, "it")


def test_a_tensor_of_one_rank_that_is_cut_is_refused():
    state = ({"w": ("F32", (40_000, 4), None)}, 2)
    manifest = manifest_of(state)
    cut = Region("w", "F32", (0, 0), (20, 4), (40_000, 4))
    (read,) = plan_restore(manifest, {"w": None}, donor=1)
    assert read.file == 1
    with pytest.raises(UnusableSnapshot):
        find(read, manifest.tensors["w"], {"w": cut}, "it")


def test_a_box_outside_its_tensor_and_an_unknown_tensor_are_refused():
    manifest = manifest_of(TWO_RANKS)
    for wanted in ({"w": Box((39_999, 0), (2, 4))}, {"w": Box((0,), (1,))}, {"v": None}):
        with pytest.raises(UnusableSnapshot):
            plan_restore(manifest, wanted, donor=0)


def test_groups_are_equal_if_every_set_of_replicas_agrees_and_is_complete():
    """Two shards with two replicas each; and a group that only some of its ranks have."""
    fine = [{"g": ["0", 2, "a"]}, {"g": ["1", 2, "b"]}, {"g": ["0", 2, "a"]}, {"g": ["1", 2, "b"]}]
    assert equal_groups(fine) == ["g"]
    assert equal_groups([*fine[:3], {"g": ["1", 2, "c"]}]) == []
    assert equal_groups([*fine[:3], {}]) == []
    assert equal_groups([]) == []

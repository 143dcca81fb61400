"""Who reads what between the ranks that hold columns of the same rows: planned alike by all."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch

from tests.snapshot import layouts
from trainckpt.format.cursor import Cursor
from trainckpt.format.digest import digest
from trainckpt.format.files import FileEntry, Files
from trainckpt.format.layout import Layout, replicated
from trainckpt.format.manifest import SPLIT, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName, shard_file_name
from trainckpt.snapshot import shared_plan
from trainckpt.snapshot.restore_plan import Planner
from trainckpt.snapshot.shared_plan import Sharing, stretch_boxes

COLUMNS = Layout((4,), (1,), 0, (1,), (0,))
ROWS = Layout((4,), (1,), 0, (0,), (0,))


def manifest_of(entries, world):
    files = [FileEntry(shard_file_name(r), 9, digest(b""), digest(b"")) for r in range(world)]
    name = SnapshotName.parse("s1~1.1")
    return Manifest("run", name, None, Cursor(step=1), world, Files.of(files), entries, 0.0)


def groups_of(manifest, targets, rank):
    entries = manifest.tensors
    wanted = {n: lay.box(entries[n].shape, lay.coordinate(rank)) for n, lay in targets.items()}
    return Sharing(manifest, Planner(manifest), rank).groups(wanted, targets)


def elements(box):
    return prod(box.shape)


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_is_read_by_one_member_and_all_plan_alike(seed, monkeypatch):
    """Of any layouts, in pieces of any size; what a member wants is in what is read, once."""
    random = Random(seed)
    monkeypatch.setattr(shared_plan, "PIECE_BYTES", random.choice([10_000, 100_000, 16 << 20]))
    world, later = random.choice([1, 2, 3, 4]), random.choice([2, 3, 4])
    shapes = {"a": (640, 2048), "b": (1501, 70, 3), "c": (3, 9000), "d": (257, 33), "e": (1, 999)}
    entries = {
        n: TensorEntry("F32", s, SPLIT, layouts.draw_layout(random, world, len(s)))
        for n, s in shapes.items()
    }
    targets = {n: layouts.draw_layout(random, later, len(s)) for n, s in shapes.items()}
    manifest = manifest_of(entries, world)
    planned = [groups_of(manifest, targets, rank) for rank in range(later)]
    for rank, groups in enumerate(planned):
        for group in groups:
            assert group.members[group.me] == rank
            for other in group.members:
                (same,) = [g for g in planned[other] if g.key == group.key]
                assert (same.digest, same.tensors) == (group.digest, group.tensors)
            _check_shares(group)


def _check_shares(group):
    read = {}
    for loads in group.rounds():
        for pieces in loads:
            assert sum(p.last - p.first for p in pieces) <= max(shared_plan.PIECE_BYTES, 1 << 15)
            for piece in pieces:
                read.setdefault(piece.tensor.name, []).append(piece)
    for tensor in group.tensors:
        pieces = read[tensor.name]
        for run in tensor.runs:
            ends = sorted((p.first, p.last) for p in pieces if p.run == run)
            assert [first for first, _ in ends] == [run.first, *(last for _, last in ends[:-1])]
            assert ends[-1][1] == run.last
            assert all(first % run.block == 0 for first, _ in ends[1:])
        size = tensor.num_bytes // elements_of_all(tensor)
        for member, box in enumerate(tensor.boxes):
            assert sum(elements(part) for p in pieces for part in p.parts(box)) == elements(box)
            share = sum(piece.last - piece.first for piece in tensor.share(member))
            assert abs(share - elements(box) * size) <= max(run.block for run in tensor.runs)


def elements_of_all(tensor):
    return sum(map(elements, tensor.boxes))


def test_nothing_is_left_out_where_a_group_begins_inside_a_block():
    """However the cuts of a tensor are rounded, the first share begins with the first byte."""
    thirds = Layout((3,), (1,), 0, (1,), (0,))
    entries = {f"t{i}": TensorEntry("F32", (640, 2048), SPLIT, thirds) for i in range(8)}
    manifest = manifest_of(entries, 3)
    square = Layout((2, 2), (2, 1), 0, (0, 1), (0, 1))
    (group,) = groups_of(manifest, dict.fromkeys(entries, square), 2)
    assert all(tensor.runs[0].first % 8192 for tensor in group.tensors)
    _check_shares(group)


def test_what_rounding_takes_from_a_member_in_one_tensor_it_gets_back_in_others():
    """Many matrices of five blocks between four members: none reads two of each."""
    entries = {f"t{i:03}": TensorEntry("F32", (40, 256), SPLIT, replicated(1)) for i in range(200)}
    manifest = manifest_of(entries, 1)
    (group,) = groups_of(manifest, dict.fromkeys(entries, COLUMNS), 0)
    read = [sum(p.last - p.first for t in group.tensors for p in t.share(m)) for m in range(4)]
    assert sum(read) == 200 * 40 * 256 * 4
    assert max(read) - min(read) <= 3 * 8192


def test_what_is_read_as_well_alone_is_not_shared():
    """Rows, whole tensors, and columns that lie as they did."""
    cut = Layout((2, 2), (2, 1), 0, (0, 1), (0, 1))
    other = Layout((4, 2), (2, 1), 0, (0, 1), (0, 1))
    entries = {
        "rows": TensorEntry("F32", (640, 2048), SPLIT, replicated(4)),
        "as it was": TensorEntry("F32", (640, 2048), SPLIT, cut),
        "one row": TensorEntry("F32", (1, 8192), SPLIT, replicated(4)),
        "nothing": TensorEntry("F32", (0, 2048), SPLIT, replicated(4)),
    }
    targets = {"rows": ROWS, "as it was": other, "one row": COLUMNS, "nothing": COLUMNS}
    manifest = manifest_of(entries, 4)
    for rank in range(8):
        assert groups_of(manifest, {"as it was": other}, rank) == ()
    for rank in range(4):
        mine = {name: lay for name, lay in targets.items() if name != "as it was"}
        assert groups_of(manifest, mine, rank) == ()


def test_columns_of_one_row_are_shared_where_a_block_is_more_than_a_rank_needs():
    entries = {"w": TensorEntry("F32", (1, 4 * 3000), SPLIT, replicated(4))}
    (group,) = groups_of(manifest_of(entries, 4), {"w": COLUMNS}, 1)
    assert [sum(p.last - p.first for p in group.tensors[0].share(m)) for m in range(4)] == [
        8192, 8192, 16384, 15232,
    ]  # fmt: skip


def test_only_ranks_of_one_row_range_and_one_replica_are_a_group():
    entries = {"w": TensorEntry("F32", (640, 2048), SPLIT, replicated(1))}
    manifest = manifest_of(entries, 1)
    hybrid = Layout((2, 2, 2), (4, 2, 1), 0, (None, 0, 1), (0, 1, 2))
    found = {groups_of(manifest, {"w": hybrid}, rank)[0].members for rank in range(8)}
    assert found == {(0, 1), (2, 3), (4, 5), (6, 7)}
    nested = Layout((2, 2), (2, 1), 4, (1, 1), (1, 0))  # a stage of a pipeline: ranks 4 to 7
    (group,) = groups_of(manifest, {"w": nested}, 6)
    assert (group.members, group.me) == ((4, 5, 6, 7), 2)
    large = Layout((shared_plan.MAX_MEMBERS + 1,), (1,), 0, (1,), (0,))
    assert groups_of(manifest, {"w": large}, 0) == ()


def test_boxes_of_a_stretch_are_its_elements_in_order():
    random = Random(3)
    for _ in range(200):
        shape = tuple(random.randint(1, 5) for _ in range(random.randint(0, 4)))
        first, last = sorted(random.randint(0, prod(shape)) for _ in range(2))
        numbers = torch.arange(prod(shape)).view(shape)
        found = [layouts.part(numbers, box).flatten() for box in stretch_boxes(shape, first, last)]
        assert torch.cat([torch.empty(0, dtype=torch.long), *found]).tolist() == [
            *range(first, last)
        ]
        assert len(found) <= max(1, 2 * len(shape) - 1)

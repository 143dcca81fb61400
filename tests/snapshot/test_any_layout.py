"""Save under one layout, restore under another: bit-exact, no byte twice, few bytes too many."""

from __future__ import annotations

from math import prod
from random import Random

import pytest
import torch

from tests.long_cases import long
from tests.snapshot import layouts
from trainckpt.errors import SaveFailed
from trainckpt.format.layout import Layout, replicated
from trainckpt.format.manifest import RANK, TensorEntry
from trainckpt.snapshot import catalog
from trainckpt.snapshot.commit import check_whole, merge_tables
from trainckpt.storage.local import LocalTier

SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (3, 0),
    (0, 4),
    (1, 1),
    (2, 5),
    (5, 3),
    (13, 8),
    (64, 64, 3),
    (257, 33),
    (1000, 3),
    (3, 1000),
    (2, 3, 5, 7),
]
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
LARGE = [(2048, 512), (1500, 700), (3001, 301), (640, 2048), (400_000,)]


def same(mine, theirs):
    return mine.dtype == theirs.dtype and torch.equal(
        mine.contiguous().view(torch.uint8) if mine.dim() else mine,
        theirs.contiguous().view(torch.uint8) if theirs.dim() else theirs,
    )


@pytest.mark.parametrize("seed", [*range(12), *long(*range(12, 40))])
def test_any_layout_is_read_into_any_other_to_the_bit(tmp_path, seed):
    """Uneven, empty and 0-size shards, scalars, replicas that are split, of every type."""
    random, tier = Random(seed), LocalTier(tmp_path)
    world, later = random.choice([1, 2, 3, 4]), random.choice([1, 2, 3, 4])
    tensors = {
        f"t{i}": layouts.drawn(random, random.choice(SHAPES), random.choice(TYPES))
        for i in range(random.randint(1, 9))
    }
    if random.random() < 0.5:
        tensors["large"] = layouts.drawn(random, random.choice(LARGE))
    first = {n: layouts.draw_layout(random, world, t.dim()) for n, t in tensors.items()}
    second = {n: layouts.draw_layout(random, later, t.dim()) for n, t in tensors.items()}
    manifest = layouts.save(tier, world, tensors, first)
    manifest = catalog.load_manifest(tier, "run", manifest.name)  # through its bytes
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    together = layouts.restore_world([tier] * later, manifest, second)
    for rank in range(later):
        wanted = layouts.boxes(later, rank, shapes, second)
        by_itself = layouts.restore(tier, manifest, wanted)
        for name, box in wanted.items():
            part = layouts.part(tensors[name], box)
            assert same(by_itself[name], part), (name, first[name], box)
            assert same(together[rank][name], part), (name, first[name], second[name], box)


@pytest.mark.parametrize("seed", [*range(8), *long(*range(8, 24))])
def test_a_rank_reads_what_it_needs_and_all_write_what_there_is(tmp_path, seed):
    """Within 5 % and 2 %, a window's gradients included: whole on every rank, all different.

    Of layouts that cut rows: a rank that holds columns of a matrix reads whole rows of it.
    """
    random, tier = Random(100 + seed), LocalTier(tmp_path)
    world, later = random.choice([1, 2, 3, 4]), random.choice([1, 2, 3, 4])
    tensors = {f"t{i}": layouts.drawn(random, shape) for i, shape in enumerate(LARGE)}
    first = {n: layouts.draw_layout(random, world, t.dim()) for n, t in tensors.items()}
    second = {
        n: layouts.draw_layout(random, later, t.dim(), columns=False) for n, t in tensors.items()
    }
    gradient = (900, 901)

    def own(rank):
        return {"gradients/t0#unsharded": layouts.drawn(Random(seed * 7 + rank), gradient)}

    manifest = layouts.save(tier, world, tensors, first, own)
    unique = sum(t.nbytes for t in tensors.values()) + world * 4 * prod(gradient)
    assert manifest.num_bytes <= 1.02 * unique
    tiers = [layouts.Counting(tier) for _ in range(later)]
    needed = 0
    for rank, found in enumerate(layouts.restore_world(tiers, manifest, second)):
        needs = sum(tensor.nbytes for tensor in found.values())
        if needs > 1 << 20:
            assert tiers[rank].num_bytes <= 1.05 * needs, (rank, tiers[rank].num_bytes / needs)
        needed += needs
    assert sum(tier.num_bytes for tier in tiers) <= 1.05 * needed


def test_replicas_that_differ_are_kept_as_each_ranks_own(tmp_path):
    """Nothing is thrown away because it should be equal."""
    tier, layout = LocalTier(tmp_path), replicated(2)

    def own(rank):
        return {}

    tensors = {"a": torch.arange(5.0)}
    ranks = []
    original = layouts.held_by

    def diverged(rank, *rest):
        found = original(rank, *rest)
        found.tensors["a"] = found.tensors["a"] + rank
        ranks.append(rank)
        return found

    layouts.held_by = diverged
    try:
        manifest = layouts.save(tier, 2, tensors, {"a": layout}, own)
    finally:
        layouts.held_by = original
    assert manifest.tensors["a"].placement == RANK
    for rank in range(2):
        found = layouts.restore(tier, manifest, {"a": None}, donor=rank)
        assert torch.equal(found["a"], torch.arange(5.0) + rank)


def test_tied_tensors_are_written_once_by_whoever_holds_them(tmp_path):
    """A tensor that two models share has one name, and so one copy."""
    tier = LocalTier(tmp_path)
    table = torch.randn(400, 300)
    layout = Layout((2, 2), (2, 1), 0, (None, 0), (0, 1))
    manifest = layouts.save(tier, 4, {"model/a": table}, {"model/a": layout})
    assert manifest.num_bytes <= 1.02 * table.nbytes + 4 * (4096 + 8)


def test_parts_whose_replicas_differ_are_each_rank_s_own_and_read_back_by_it(tmp_path):
    """Gradients of an open window under tensor parallelism: no other rank has the same."""
    tier, whole = LocalTier(tmp_path), torch.arange(21.0).view(7, 3)
    layout = Layout((2, 2), (2, 1), 0, (None, 0), (0, 1))

    def own(rank):
        box = layout.box((7, 3), layout.coordinate(rank))
        return {"t": layouts.part(whole, box) + 100 * rank}

    manifest = layouts.save(tier, 4, {"t": whole}, {"t": layout}, own)
    assert manifest.tensors["t"].placement == RANK
    for rank in range(4):
        found = layouts.restore(tier, manifest, {"t": None}, donor=rank)
        assert same(found["t"], own(rank)["t"])


def test_a_ranks_own_tensor_may_be_of_another_type_than_the_first_ranks(tmp_path):
    tier = LocalTier(tmp_path)
    kinds = [torch.float32, torch.int64]
    manifest = layouts.save(tier, 2, {}, {}, lambda rank: {"t": torch.ones(3, dtype=kinds[rank])})
    for rank in range(2):
        found = layouts.restore(tier, manifest, {"t": None}, donor=rank)
        assert same(found["t"], torch.ones(3, dtype=kinds[rank]))


def test_a_tensor_of_which_a_rank_has_no_part_is_no_snapshot():
    """One that is divided, and one whose replicas know nothing of each other."""
    plain = {"a": TensorEntry("F32", (8,), replicated(4))}
    stages = [Layout((2,), (1,), base, (0,), (0,)) for base in (0, 2)]
    ours = [{**plain, f"b{i}": TensorEntry("F32", (8,), s)} for i, s in enumerate(stages)]
    merged = merge_tables(ours)
    check_whole(merged, [(ours[0], [0, 1]), (ours[1], [2, 3])])
    with pytest.raises(SaveFailed, match="rank 1 has no part of b0"):
        check_whole(merged, [(ours[0], [0]), (plain, [1]), (ours[1], [2, 3])])


def test_an_empty_part_has_the_type_of_the_whole_also_where_that_is_stored_as_bytes(tmp_path):
    tier, layout = LocalTier(tmp_path), Layout((3,), (1,), 0, (0,), (0,))
    kinds = [torch.complex64, torch.float8_e4m3fnuz, torch.uint8, torch.float32]
    tensors = {f"t{i}": torch.ones(1, 4).to(kind) for i, kind in enumerate(kinds)}
    manifest = layouts.save(tier, 3, tensors, dict.fromkeys(tensors, layout))
    for rank, rows in ((0, 1), (2, 0)):
        wanted = {}
        for name, entry in manifest.tensors.items():
            wanted[name] = layout.box(entry.shape, (rank,))
        found = layouts.restore(tier, manifest, wanted)
        for name, kind in zip(tensors, kinds, strict=True):
            assert (found[name].shape, found[name].dtype) == ((rows, 4), kind)

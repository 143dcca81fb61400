"""What fails on one member of a shared read fails on all whom it reaches, with its reason."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tests.faults.test_bad_bytes import flip
from tests.snapshot import layouts
from trainckpt.errors import TierUnavailable, UnusableSnapshot
from trainckpt.format import shard_file
from trainckpt.format.layout import Layout, replicated
from trainckpt.snapshot import shared_plan
from trainckpt.snapshot.shared_read import HEAD_BYTES, Refusal, _head, _refusal
from trainckpt.state import stage
from trainckpt.tiers.local import LocalTier

COLUMNS = Layout((3,), (1,), 0, (1,), (0,))


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A matrix of one rank, to be read by three that hold columns of it, in many rounds."""
    monkeypatch.setattr(shared_plan, "PIECE_BYTES", 64 << 10)
    tier = LocalTier(tmp_path)
    whole = layouts.drawn(Random(1), (1000, 300))
    manifest = layouts.save(tier, 1, {"w": whole}, {"w": replicated(1)})
    return tier, manifest, whole


def test_a_damaged_block_reaches_every_member_before_it_is_used(saved):
    tier, manifest, _ = saved
    key = f"{manifest.name.folder}/{manifest.files[0].name}"
    flip(tier.root / key, manifest.files[0].num_bytes // 2)  # of the second member's share
    refusals = layouts.restore_world([tier] * 3, manifest, {"w": COLUMNS})
    assert [refusal.rank for refusal in refusals] == [1, 1, 1]
    for refusal in refusals:
        assert type(refusal.error) is UnusableSnapshot
        assert refusal.error.message == f"{key}: w does not match its digest"


def test_a_tier_that_refuses_one_member_is_told_to_the_others_as_that(saved):
    tier, manifest, _ = saved

    class Denies(layouts.Counting):
        def read_parts(self, key, parts, done):
            if self.num_bytes > 200_000:
                raise TierUnavailable(f"cannot read {key}: denied", hint="make it readable")
            super().read_parts(key, parts, done)

    refusals = layouts.restore_world([tier, tier, Denies(tier)], manifest, {"w": COLUMNS})
    assert [(r.rank, type(r.error), r.error.hint) for r in refusals] == [
        (2, TierUnavailable, "make it readable")
    ] * 3


def test_a_refusal_of_any_length_is_told_whole_or_cut():
    for message in ("", "x", "\u00fc" * 5000, "a\0b"):
        told = _head(Refusal(70_000, TierUnavailable(message, hint="do")))
        assert len(told) == HEAD_BYTES
        heard = _refusal(memoryview(told))
        assert heard.rank == 70_000
        assert message.replace("\0", " ").startswith(heard.error.message)
        assert heard.error.hint in ("do", "")


def test_what_has_one_digest_for_much_is_read_by_each_alone(saved, tmp_path, monkeypatch):
    """As in files of format 1: no part of it can be verified by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(shard_file, "block_bytes", lambda size: max(size, 1))
        patch.setattr(stage, "_laid_out", stage._laid_out.__wrapped__)  # remembers other headers
        tier = LocalTier(tmp_path / "old")
        manifest = layouts.save(tier, 1, {"w": saved[2]}, {"w": replicated(1)})
    tiers = [layouts.Counting(tier) for _ in range(3)]
    for rank, found in enumerate(layouts.restore_world(tiers, manifest, {"w": COLUMNS})):
        assert torch.equal(
            found["w"].view(torch.int32),
            saved[2][:, 100 * rank : 100 * rank + 100].view(torch.int32),
        )
        assert tiers[rank].num_bytes > saved[2].nbytes


def test_types_that_are_stored_as_bytes_are_read_together_also_where_a_rank_has_no_column(tmp_path):
    tier = LocalTier(tmp_path)
    kinds = [torch.complex128, torch.float8_e4m3fnuz, torch.uint8, torch.bfloat16]
    tensors = {f"t{i}": torch.randint(0, 99, (500, 4)).to(kind) for i, kind in enumerate(kinds)}
    split = Layout((2,), (1,), 0, (1,), (0,))
    manifest = layouts.save(tier, 2, tensors, dict.fromkeys(tensors, split))
    for rank, found in enumerate(
        layouts.restore_world([tier] * 3, manifest, dict.fromkeys(tensors, COLUMNS))
    ):
        for name, whole in tensors.items():  # of four columns: two, two, none
            part = whole[:, 2 * rank : 2 * rank + 2]
            assert (found[name].dtype, found[name].shape) == (whole.dtype, part.shape)
            assert torch.equal(found[name].to(torch.complex128), part.to(torch.complex128))

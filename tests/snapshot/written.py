"""Small real snapshots, written and committed without any training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tests.state.helpers import registry, shard_of
from trainckpt.format.cursor import Cursor
from trainckpt.format.manifest import RANK, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.save import write_shard


def written(tier, text, tags=()):
    """Steps 1 and 2 of a save under the name `text`; the manifest to commit."""
    if tier.size("run.json") is None:
        tier.create("run.json", b'{"format":1,"id":"run"}')
    name = SnapshotName.parse(text)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, name.step)
    shard = shard_of(registry(model=model))
    receipt = write_shard(tier, name, 0, shard.head, shard.blocks)
    tensors = {r.tensor: TensorEntry(r.dtype, r.of, RANK) for r in shard.header.regions}
    cursor = Cursor(step=name.step, micro=name.micro)
    manifest = Manifest("run", name, None, cursor, 1, (receipt.file,), tensors, 0.0, tags=tags)
    return replace(manifest, reason="test")


def committed(tier, text, tags=()):
    """A snapshot under the name `text`, committed."""
    manifest = written(tier, text, tags)
    commit(tier, manifest)
    return manifest


def shard_path(tier, text, rank=0):
    """Where a shard file of it lies."""
    return tier.root / "snapshots" / text / f"rank{rank:05d}.safetensors"


def weight_of(saved):
    """The value `committed` gave the model's weight."""
    weight = saved.tensors["model/weight"]
    assert torch.equal(weight, weight[0, 0].expand(2, 2))
    return int(weight[0, 0])

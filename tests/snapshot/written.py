"""Small real snapshots, written and committed without any training."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tests.state.helpers import registry, shard_of
from trainckpt.format import names
from trainckpt.format.cursor import Cursor
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.state import staging
from trainckpt.state.capture import capture


def written(tier, text, tags=()):
    """Steps 1 and 2 of a save under the name `text`; the manifest to commit."""
    if tier.size("run.json") is None:
        tier.create("run.json", b'{"format":1,"id":"run"}')
    name = SnapshotName.parse(text)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, name.step)
    shard = shard_of(registry(model=model))
    file = write_shard(tier, name, 0, shard)
    tensors = {r.tensor: TensorEntry(r.dtype, r.of) for r in shard.header.regions}
    cursor = Cursor(step=name.step, micro=name.micro)
    manifest = Manifest("run", name, None, cursor, 1, (file,), tensors, 0.0, tags=tags)
    return replace(manifest, reason="test")


def committed(tier, text, tags=()):
    """A snapshot under the name `text`, committed."""
    manifest = written(tier, text, tags)
    commit(tier, manifest)
    return manifest


def referring(tier, text, to, tags=(), **changes):
    """A snapshot under the name `text` whose regions `to` (key -> older snapshot) are not in it.

    What else it holds is as `committed` makes it.
    """
    name = SnapshotName.parse(text)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, name.step)
    captured = capture(registry(model=model))
    planned = [r for r in staging.describe(captured, {}) if r.key not in to]
    files = {key: f"{older.name}/{names.shard_file_name(0)}" for key, older in to.items()}
    shard = staging.stage(captured, planned, rank=0, world=1, references=files)
    file = write_shard(tier, name, 0, shard)
    reached = [
        replace(older.files[0], name=f"{older.name}/{older.files[0].name}")
        for older in {str(older.name): older for older in to.values()}.values()
    ]
    manifest = Manifest(
        "run",
        name,
        None,
        Cursor(step=name.step, micro=name.micro),
        1,
        (file,),
        next(iter(to.values())).tensors,
        0.0,
        tags=tags,
        reason="test",
        reached=tuple(sorted(reached, key=lambda file: file.name)),
    )
    manifest = replace(manifest, **changes)
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

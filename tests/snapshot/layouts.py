"""Random layouts, and whole worlds of ranks that save and restore in this one process."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainckpt.format.cursor import Cursor
from trainckpt.format.layout import Layout, whole
from trainckpt.format.manifest import Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.commit import commit, merge_tables, table_from_json, table_to_json
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.state import staging, tensor_digests
from trainckpt.state.captured import Captured, Placed
from trainckpt.state.destination import Destination

# (name, mesh) by number of ranks; the dimensions divided are drawn for each tensor.
MESHES = {1: [(1,), (1, 1)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (1, 2, 2)]}


def mesh_of(shape):
    """Strides of a row-major mesh."""
    strides, stride = [], 1
    for extent in reversed(shape):
        strides.insert(0, stride)
        stride *= extent
    return tuple(strides)


def draw_layout(random, world, dims, columns=True):
    """How a tensor of so many dimensions lies over `world` ranks: DDP, FSDP, HSDP, TP, both."""
    mesh = random.choice(MESHES[world])
    can = [None, *range(min(dims, 3 if columns else 1))]
    divided = tuple(random.choice(can) for _ in mesh)
    order = list(range(len(mesh)))
    random.shuffle(order)
    return Layout(mesh, mesh_of(mesh), 0, divided, tuple(order))


def part(tensor, box):
    """The elements of a box."""
    for d, (offset, extent) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(d, offset, extent)
    return tensor


def held_by(rank, tensors, layouts, own):
    """What one rank of a world captures: its part of every tensor, and tensors of its own."""
    found = Captured()
    for name, tensor in tensors.items():
        layout = layouts[name]
        box = layout.box(tuple(tensor.shape), layout.coordinate(rank))
        found.tensors[name] = part(tensor, box).clone()
        found.groups[name] = "model"
        found.placed[name] = Placed(layout, tuple(tensor.shape), box)
    found.tensors.update(own(rank))
    return found


def save(tier, world, tensors, layouts, own=lambda rank: {}, name="s3~1.1"):
    """Save by every rank of a world, as the saver does; returns the committed manifest."""
    if tier.size("run.json") is None:
        tier.create("run.json", b'{"format":2,"id":"run"}')
    ranks = [held_by(rank, tensors, layouts, own) for rank in range(world)]
    equal = equal_groups(
        [tensor_digests.group_digests(one, r, world) for r, one in enumerate(ranks)]
    )
    parsed, files, tables = SnapshotName.parse(name), [], []
    for rank, one in enumerate(ranks):
        split = tensor_digests.split_layouts(one, equal, world)
        regions = staging.describe(one, split)
        shard = staging.stage(one, plan_save(regions, split, rank=rank), rank=rank, world=world)
        files.append(write_shard(tier, parsed, rank, shard))
        table = {r.tensor: TensorEntry(r.dtype, r.of, split.get(r.tensor)) for r in regions}
        tables.append(table_from_json(table_to_json(table), world))
    manifest = Manifest(
        "run", parsed, None, Cursor(step=3), world, tuple(files), merge_tables(tables), 0.0
    )
    commit(tier, manifest)
    return replace(manifest)


class Counting:
    """A tier that counts what is read from it."""

    def __init__(self, tier):
        self.tier, self.num_bytes = tier, 0

    def read_into(self, key, first_byte, memory):
        self.num_bytes += len(memory)
        self.tier.read_into(key, first_byte, memory)

    def read_parts(self, key, parts, done):
        self.num_bytes += sum(len(memory) for _, memory in parts)
        self.tier.read_parts(key, parts, done)

    def __getattr__(self, name):
        return getattr(self.tier, name)


def restore(tier, manifest, wanted, donor=0):
    """What a rank that wants these boxes reads: its tensors."""
    destination = Destination(wanted)
    Reader(tier, manifest).read(wanted, destination, donor=donor)
    return destination.finish({name: manifest.tensors[name].dtype for name in wanted})


def restore_world(tiers, manifest, layouts):
    """What every rank of a world reads that has these layouts now: its tensors."""
    entries = manifest.tensors
    return [
        restore(
            tier,
            manifest,
            {n: lay.box(entries[n].shape, lay.coordinate(rank)) for n, lay in layouts.items()},
        )
        for rank, tier in enumerate(tiers)
    ]


def boxes(world, rank, shapes, layouts):
    """What a rank of a world holds of each tensor."""
    del world
    return {
        name: layouts[name].box(shape, layouts[name].coordinate(rank))
        for name, shape in shapes.items()
    }


def drawn(random, shape, dtype=torch.float32):
    """A tensor of random bits."""
    size = whole(shape).shape
    generator = torch.Generator().manual_seed(random.getrandbits(40))
    bits = torch.randint(-(2**31), 2**31 - 1, size, generator=generator, dtype=torch.int32)
    return bits.to(dtype) if dtype != torch.float32 else bits.view(torch.float32)

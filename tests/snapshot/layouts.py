"""Random layouts, and whole worlds of ranks that save and restore in this one process."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from trainckpt.format.cursor import Cursor
from trainckpt.format.files import Files
from trainckpt.format.layout import Layout, whole
from trainckpt.format.manifest import RANK, SPLIT, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.resuming.read_state import alone
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.save import write_shard
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.snapshot.shared_plan import Sharing
from trainckpt.snapshot.shared_read import SharedRead
from trainckpt.snapshot.tables import merge_tables, table_from_json, table_to_json
from trainckpt.state import replicas, stage
from trainckpt.state.captured import Captured, Placed
from trainckpt.state.destination import Destination
from trainckpt.state.targets import Targets

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
    equal = equal_groups([replicas.group_digests(one, r, world) for r, one in enumerate(ranks)])
    parsed, files, tables = SnapshotName.parse(name), [], []
    for rank, one in enumerate(ranks):
        split = replicas.split_layouts(one, equal, world)
        regions = stage.describe(one, split)
        shard = stage.stage(one, plan_save(regions, split, rank=rank), rank=rank, world=world)
        files.append(write_shard(tier, parsed, rank, shard).file)
        table = {
            r.tensor: TensorEntry(
                r.dtype, r.of, SPLIT if r.tensor in split else RANK, split.get(r.tensor)
            )
            for r in regions
        }
        tables.append(table_from_json(table_to_json(table), world))
    manifest = Manifest(
        "run", parsed, None, Cursor(step=3), world, Files.of(files), merge_tables(tables), 0.0
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


class Switch:
    """Bytes between threads that stand for ranks: the transport alone is not the real one."""

    def __init__(self, members):
        self.mail = {(a, b): queue.Queue() for a in members for b in members}
        self.members = members

    def of(self, rank):
        """The side of one rank."""
        return Side(self, self.members.index(rank))


class Side:
    def __init__(self, switch, me):
        self.mail, self.members, self.me = switch.mail, switch.members, me
        self.sent = 0

    def swap(self, to, data, source, num_bytes):
        if len(data):
            self.sent += len(data)
            self.mail[self.members[self.me], self.members[to]].put(bytes(data))
        if not num_bytes:
            return memoryview(b"")
        got = self.mail[self.members[source], self.members[self.me]].get(timeout=60)
        assert len(got) == num_bytes
        return memoryview(bytearray(got))


def restore_world(tiers, manifest, layouts):
    """What every rank of a world reads that has these layouts now: its tensors, or a refusal.

    As `read_state` and `read_together` do it, over threads.
    """
    world, entries = len(tiers), manifest.tensors
    readers = [Reader(tier, manifest) for tier in tiers]
    wanted = [
        {n: lay.box(entries[n].shape, lay.coordinate(rank)) for n, lay in layouts.items()}
        for rank in range(world)
    ]
    parts = [
        [SharedRead(group, reader)
         for group in Sharing(manifest, reader.planner, rank).groups(wanted[rank], layouts)]
        for rank, reader in enumerate(readers)
    ]  # fmt: skip
    offers = [{part.group.key: part.offer for part in of} for of in parts]
    members = {part.group.key: part.group.members for of in parts for part in of}
    offered = {key: {offers[rank][key] for rank in group} for key, group in members.items()}
    switches = {key: Switch(members[key]) for key in members if len(offered[key]) == 1}

    def one(rank):
        targets = Targets(False, wanted[rank])
        destination = Destination(wanted[rank])
        agreed = [part for part in parts[rank] if part.offer and part.group.key in switches]
        readers[rank].read(alone(targets, agreed, manifest), destination, donor=0)
        for part in agreed:
            refusal = part.read(switches[part.group.key].of(rank), destination)
            if refusal is not None:
                return refusal
        return destination.finish({name: entries[name].dtype for name in wanted[rank]})

    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(one, r) for r in range(world)]]


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

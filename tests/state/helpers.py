"""From live objects through real shard bytes to other live objects, without disk or ranks."""

from __future__ import annotations

import torch

from trainckpt.format import digest, shard_file
from trainckpt.snapshot.save_plan import plan_save
from trainckpt.state import apply, staging
from trainckpt.state.capture import capture
from trainckpt.state.captured import VALUES, Saved, parse_values
from trainckpt.state.destination import Destination
from trainckpt.state.registry import Registry
from trainckpt.storage.direct_io import private_memory


def registry(**tracked):
    """A registry of these objects."""
    found = Registry()
    for name, value in tracked.items():
        found.add(name, value)
    return found


def shard_of(source, memory=private_memory):
    """The state of a registry as one rank's shard file in memory."""
    captured = capture(source)
    layouts = captured.layouts(1)
    planned = plan_save(staging.describe(captured, layouts), layouts, rank=0)
    return staging.stage(captured, planned, rank=0, world=1, memory=memory)


def saved_of(source):
    """The state of a registry, written to bytes and read back."""
    data = b"".join(shard_of(source).blocks())
    head = data[: shard_file.header_length(data, "x")]
    header = shard_file.parse(head, "x", file_bytes=len(data))
    destination = Destination({region.tensor: None for region in header.regions})
    for region in header.regions:
        memory = destination.memory_for(region, region.box)
        first = header.header_bytes + region.first_byte
        if region.num_bytes:
            memory[:] = data[first : first + region.num_bytes]
        block = shard_file.block_bytes(region.num_bytes)
        assert digest.digests_by_block(memory, block) == region.digest
    tensors = destination.finish({})
    values = parse_values(tensors.pop(VALUES))
    shapes = {region.tensor: region.of for region in header.regions}
    return Saved(tensors, values, shapes)


def move(source, target):
    """Put the state of registry `source` into the objects of `target`."""
    saved = saved_of(source)
    apply.check(target, saved, "s0~1.1")
    apply.apply(target, saved)
    return saved


def bits(tensor):
    """Everything that two equal tensors agree in."""
    if tensor.layout is torch.sparse_coo:
        parts = (
            bits(tensor._indices().clone(memory_format=torch.contiguous_format)),
            bits(tensor._values()),
        )
        return "sparse", tuple(tensor.shape), tensor.is_coalesced(), parts
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), bytes(staging.bytes_of(tensor))


def frozen(value):
    """A nested state as a value that can be compared, bit for bit."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return type(value), {key: frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [frozen(item) for item in value]
    return repr(value)

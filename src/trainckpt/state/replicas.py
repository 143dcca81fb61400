"""Replicas: which tensors all ranks that should hold them alike do hold alike.

Under DDP and HSDP several ranks hold equal bytes, and each byte is saved once, split over them.
That they are equal is checked, never taken for granted: a buffer may be a rank's own, and so is a
gradient inside a window. What is not equal on all is saved by each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from trainckpt.state.device_checksum import checksums
from trainckpt.state.stage import bytes_of

PAGE_BYTES = 4096
PARTS = 64  # a sample holds one of so many parts, in turn
MOST_NAMES = 1 << 16  # whose spelling is kept from save to save

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainckpt.format.layout import Layout
    from trainckpt.state.captured import Captured


def group_digests(
    captured: Captured,
    rank: int,
    world: int,
    *,
    sampled: Collection[str] = (),
    number: int = 0,
) -> dict[str, tuple[str, int, str]]:
    """Group -> set of replicas, ranks in it, digest of the group's tensors, sorted by name.

    Only of tensors that other ranks should hold alike. The digest is over name, type, shape and
    bytes, or over the checksum of what lies on a device. `snapshot.save_plan.equal_groups` compares
    them.

    Args:
        captured: State of this rank.
        rank, world: Of this process.
        sampled: Tensors of which only a part is looked at: the first page, and a part that moves on
            with `number`. To digest them all costs training as much as to copy them.
        number: Of the save.
    """
    states: dict[str, tuple[str, int, Any]] = {}
    met: dict[tuple[str, int], Any] = {}  # layouts are few, and long to spell
    layouts = {n: a for n, a in captured.layouts(world).items() if a.num_replicas > 1}
    on_device = [name for name in layouts if not captured.tensors[name].is_cpu]
    compared = (
        _sample_there(captured.tensors[name], number) if name in sampled else captured.tensors[name]
        for name in on_device
    )
    sums = dict(zip(on_device, checksums(list(compared)), strict=True))
    for name in sorted(layouts):
        layout = layouts[name]
        tensor, key = captured.tensors[name], (captured.groups[name], id(layout))
        if key not in met:
            group = group_of(captured, name, layout)
            found = (*layout.replica_set(rank), xxhash.xxh3_128())
            met[key] = states.setdefault(group, found)[2].update
        update = met[key]
        update(_facts(name, tensor.dtype, tensor.shape))
        if name in sums:
            update(sums[name])
        elif name not in sampled:
            update(bytes_of(tensor))
        else:
            for part in _sample(tensor, number):
                update(part)
    return {group: (name, n, state.hexdigest()) for group, (name, n, state) in states.items()}


@lru_cache(MOST_NAMES)
def _facts(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{name} {dtype} {tuple(shape)};".encode()


def _sample(tensor: torch.Tensor, number: int) -> list[memoryview]:
    data, (first, end) = bytes_of(tensor), _part(tensor, number)
    return [data[:PAGE_BYTES], data[first:end]]


def _sample_there(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Return the sample as a tensor on the device: the rest never leaves it."""
    flat, (first, end) = tensor.detach().contiguous().reshape(-1), _part(tensor, number)
    flat = flat.view(torch.uint8)
    return torch.cat([flat[:PAGE_BYTES], flat[first:end]])


def _part(tensor: torch.Tensor, number: int) -> tuple[int, int]:
    """Return the first byte of the part whose turn it is, and the one behind its last."""
    first = number % PARTS * tensor.nbytes // PARTS
    return first, first + -(-tensor.nbytes // PARTS)


def group_of(captured: Captured, name: str, layout: Layout) -> str:
    """Tensors are compared together if they belong together and lie alike."""
    return f"{captured.groups[name]} over {layout.mesh} {layout.base} {layout.dims}"


def kind_of(group: str) -> str:
    """What belongs together in a group, however it lies."""
    return group.rpartition(" over ")[0]


def split_layouts(captured: Captured, equal: Collection[str], world: int) -> dict[str, Layout]:
    """Tensor -> layout, of those whose replicas are equal or that have none."""
    return {
        name: layout
        for name, layout in captured.layouts(world).items()
        if layout.num_replicas == 1 or group_of(captured, name, layout) in equal
    }

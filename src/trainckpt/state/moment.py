"""A moment: the state of this rank as a window begins, kept until the next one is safe.

Large tensors that only an optimizer's step changes are not copied for it, but for the share that
this rank stores of them, or keeps for others, and that beside training (`overlap`). Everything else
is copied at once, to the host: what is this rank's own lies in one small shard file, complete with
digests, which another host may hold.

Gradients are not part of it: a window begins without any. A script that has not dropped those of
the window before may add to them; whether it does shows at the next moment (`Gradients`).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import shard_file
from trainckpt.format.digest import digests_by_block
from trainckpt.format.manifest import RANK, TensorEntry
from trainckpt.state import stage
from trainckpt.state.captured import Captured
from trainckpt.state.kinds.gradients import PART as GRADIENTS
from trainckpt.state.overlap import Overlapped, Piece

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.shard_file import Region
    from trainckpt.state.registry import Registry
    from trainckpt.state.side import Side

ALIGNED_BYTES = 64


@dataclass
class Moment:
    """State of one rank at one boundary.

    Attributes:
        cursor: Where it was taken.
        entries: Of what all ranks hold alike, as a manifest has it.
        small: What is this rank's own.
        kept: Owner -> its small shard file, of this very moment.
        whole: What all ranks hold alike: copies of what not only steps change, else live.
        copied: Key of a region of a large one -> its copy, once `overlapped` is through.
        overlapped: Copies the shares of the large ones; None: nothing is copied.
        live: No step was taken since.
        safe: Set once each rank's small file of this moment is with its partner.
        gradients: Of the window before; None: the script is known to drop them.
        spoiled: Large tensors that something else than a step has changed.
    """

    cursor: Cursor
    entries: dict[str, TensorEntry]
    small: stage.Shard
    kept: dict[int, memoryview] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    copied: dict[str, torch.Tensor] = field(default_factory=dict)
    overlapped: Overlapped | None = None
    live: bool = True
    versions: dict[str, int] = field(default_factory=dict)
    spoiled: list[str] = field(default_factory=list)
    safe: threading.Event = field(default_factory=threading.Event)
    gradients: Gradients | None = None

    def settle(self) -> None:
        """Nothing changes now: copy what is not copied yet, and look at what has changed."""
        overlapped = self.overlapped
        if overlapped is not None:
            overlapped.fence()
            self.spoiled = overlapped.changed
            self.overlapped = None

    @property
    def is_carried(self) -> bool:
        """Whether gradients of the window before may have been added to in this one."""
        return self.gradients is not None and self.gradients.are_there()

    @property
    def is_whole(self) -> bool:
        """Whether all that ranks hold alike is here still: nothing has stepped, or written."""
        changed = (n for n, v in self.versions.items() if self.whole[n]._version != v)
        return self.live and not self.spoiled and next(changed, None) is None

    def has(self, share: Iterable[Region]) -> bool:
        """Whether these regions can be had."""
        missing = (r for r in share if r.tensor in self.versions and r.key not in self.copied)
        return self.is_whole or (not self.spoiled and next(missing, None) is None)

    def file_of(
        self, owner: int, world: int, share: Sequence[Region], small: memoryview
    ) -> tuple[stage.Shard, dict[str, TensorEntry]]:
        """The shard file of a rank, and an entry of each of its tensors.

        Args:
            owner, world: Whose file it is to be, of how many.
            share: What it stores of the tensors that all hold alike.
            small: The small shard file of that rank, or of another that stands in for it.

        Raises:
            UnusableSnapshot: the small file is not what it says.
        """
        own, regions = read_small(small, f"the small state of rank {owner}")
        built = Captured(dict(own))
        for region in share:
            copied = self.copied.get(region.key)
            whole = Captured({region.tensor: self.whole[region.tensor]})
            built.tensors[region.tensor] = (
                copied if copied is not None else stage.source_of(whole, region)
            )
        entries = {r.tensor: TensorEntry(r.dtype, r.of, RANK) for r in regions}
        shard = stage.stage(built, [*regions, *share], rank=owner, world=world)
        return shard, {**self.entries, **entries}


class HostBuffers:
    """Memory on the host for two moments, filled in turn; a GPU reaches it by itself."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._memory = [memoryview(b"")] * 2
        self._turn = 0

    def next(self, num_bytes: int) -> torch.Tensor:
        """Return so many bytes; what the moment before last had in them is gone."""
        self._turn = 1 - self._turn
        memory = self._memory[self._turn]
        if len(memory) < num_bytes:
            self._side.keep(memory, 0)
            memory = self._memory[self._turn] = stage.private_memory(num_bytes)
        self._side.register(memory)
        return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else _no_bytes()

    def close(self) -> None:
        """Let the memory go."""
        self._side.close()
        self._memory = [memoryview(b"")] * 2


class HostCopies:
    """Copies of tensors as they are at a boundary: on the host for what lies on a GPU."""

    def __init__(self, side: Side) -> None:
        self._side, self._buffers = side, HostBuffers(side)

    def make(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a copy of each, over those of the moment before last."""
        on_device = {n: t for n, t in tensors.items() if t.device.type == self._side.kind}
        copies = {n: t.clone() for n, t in tensors.items() if n not in on_device}
        if not on_device:
            return copies
        self._side.use(on_device.values())
        memory = self._buffers.next(sum(_padded(t.nbytes) for t in on_device.values()))
        first, by_device = 0, []
        for name, tensor in on_device.items():
            place = memory[first : first + tensor.nbytes]
            copies[name] = place.view(tensor.dtype).view(tensor.shape)
            if tensor.nbytes and self._side.takes(tensor, place.data_ptr()):
                by_device.append((place.data_ptr(), tensor))
            else:
                copies[name].copy_(tensor)
            first += _padded(tensor.nbytes)
        self._side.copy(by_device)
        return copies

    def close(self) -> None:
        """Let the memory go."""
        self._buffers.close()


class ShareCopies:
    """Copies of the shares of large tensors, made beside training."""

    def __init__(self, side: Side) -> None:
        self._side, self._buffers = side, HostBuffers(side)

    def begin(
        self, captured: Captured, regions: Collection[Region], *, proves: bool, num_threads: int
    ) -> tuple[dict[str, torch.Tensor], Overlapped]:
        """Return the place of each region, and the copies that fill them.

        They are over the copies of the moment before last, and a GPU begins with its own at once.
        """
        self._side.use(captured.tensors[region.tensor] for region in regions)
        memory = self._buffers.next(sum(_padded(region.num_bytes) for region in regions))
        copied: dict[str, torch.Tensor] = {}
        pieces, first = [], 0
        for region in regions:
            place = memory[first : first + region.num_bytes]
            copied[region.key] = place.view(stage.TYPES[region.dtype]).view(region.shape)
            source = stage.source_of(captured, region)
            pieces.append(Piece(region.tensor, source, place.data_ptr()))
            first += _padded(region.num_bytes)
        overlapped = Overlapped(pieces, proves=proves, num_threads=num_threads, side=self._side)
        return copied, overlapped

    def close(self) -> None:
        """Let the memory go."""
        self._buffers.close()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def without_gradients(captured: Captured) -> Captured:
    """The same at a window's beginning."""
    if captured.values.get(GRADIENTS):
        captured.values[GRADIENTS] = {}
        prefix = f"{GRADIENTS}/"
        for kind in (captured.tensors, captured.groups):
            for name in [name for name in kind if name.startswith(prefix)]:
                del kind[name]
    return captured


class Gradients:
    """Those that were there as a window began."""

    def __init__(self, registry: Registry) -> None:
        found = ((p, p.grad) for p in registry.trained_parameters().values())
        self._held = [(p, weakref.ref(grad)) for p, grad in found if grad is not None]

    @property
    def are_none(self) -> bool:
        """Whether there were none at all."""
        return not self._held

    def are_there(self) -> bool:
        """Whether any is there still: nobody has dropped it, so it may be added to."""
        return any(gradient() is p.grad is not None for p, gradient in self._held)


def small_file(captured: Captured, alike: Collection[str], rank: int, world: int) -> stage.Shard:
    """What is this rank's own, values included, copied. Its head is not spelled yet."""
    own = Captured({n: t for n, t in captured.tensors.items() if n not in alike})
    own.values = captured.values
    return stage.stage(own, stage.describe(own, ()), rank=rank, world=world)


def read_small(data: memoryview, what: str) -> tuple[Mapping[str, torch.Tensor], list[Region]]:
    """Tensors of a small shard file, each verified, and what they are.

    Raises:
        UnusableSnapshot: it is not whole.
    """
    length = shard_file.header_length(data[:8], what)
    header = shard_file.parse(data[:length], what, file_bytes=len(data))
    found: dict[str, torch.Tensor] = {}
    for region in header.regions:
        first = length + region.first_byte
        part = data[first : first + region.num_bytes]
        if digests_by_block(part, shard_file.block_bytes(region.num_bytes)) != region.digest:
            raise UnusableSnapshot(f"{what}: {region.tensor[:100]} is damaged")
        kind = stage.TYPES[region.dtype]
        found[region.tensor] = (
            torch.frombuffer(part, dtype=kind).view(region.shape)
            if region.num_bytes
            else torch.empty(region.shape, dtype=kind, device="cpu")
        )
    return found, list(header.regions)

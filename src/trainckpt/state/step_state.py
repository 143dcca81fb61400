"""The state of this rank at the start of a window, stored until the next one is safe.

Large tensors changed only by an optimizer step are not copied whole. Only the shares stored by this
rank, for itself or others, are copied, and that during training (`overlapped_copy`). Everything
else is copied to the host at once. State of this rank alone goes to one small shard file, complete
with digests, for a copy on another host.

Gradients are left out: a window begins without any. A script may add to gradients of the window
before if it did not drop them; the next step state shows it (`Gradients`).
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
from trainckpt.format.manifest import TensorEntry
from trainckpt.state import staging
from trainckpt.state.adapters.gradients import PART as GRADIENTS
from trainckpt.state.captured import Captured
from trainckpt.state.overlapped_copy import OverlappedCopy, PendingCopy
from trainckpt.storage.direct_io import private_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.shard_file import Region
    from trainckpt.state.device_copy import DeviceCopier
    from trainckpt.state.registry import Registry

ALIGNED_BYTES = 64
NO_SAMPLE = "00" * 16


@dataclass
class StepState:
    """State of one rank at one boundary.

    Attributes:
        cursor: Its position.
        entries: Manifest entries of the tensors equal on all ranks.
        share_of: Returns the regions of these that a rank stores; None: this rank lacks some.
        small: The small shard file of this rank's own state.
        sample: Digest of a few of their bytes: equal on all ranks.
        asks: This rank asks for a comparison of the replicas.
        is_asked: Any rank does; once it is safe.
        kept: Owner -> its small shard file of the same boundary.
        samples_of: Owner -> its `sample`.
        whole: The tensors equal on all ranks: copies if more than steps change them, else live.
        copied: Key of a region of a large tensor -> its copy, complete after `overlapped`.
        overlapped: Copies the shares of the large tensors; None: nothing is copied.
        live: No step was taken since.
        versions: Name of a live tensor in `whole` -> its version counter at the boundary.
        spoiled: Large tensors changed outside a step.
        safe: Set once each rank's small file of this boundary is with its partner.
        gradients: Gradients of the window before; None: the script is known to drop them.
    """

    cursor: Cursor
    entries: dict[str, TensorEntry]
    share_of: Callable[[int], tuple[Region, ...]] | None
    small: staging.Shard
    sample: str = NO_SAMPLE
    asks: bool = False
    is_asked: bool = False
    kept: dict[int, memoryview] = field(default_factory=dict)
    samples_of: dict[int, str] = field(default_factory=dict)
    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    copied: dict[str, torch.Tensor] = field(default_factory=dict)
    overlapped: OverlappedCopy | None = None
    live: bool = True
    versions: dict[str, int] = field(default_factory=dict)
    spoiled: list[str] = field(default_factory=list)
    safe: threading.Event = field(default_factory=threading.Event)
    gradients: Gradients | None = None

    def settle(self) -> None:
        """Finish the copies while nothing changes, and note the changed tensors."""
        overlapped = self.overlapped
        if overlapped is not None:
            overlapped.fence()
            self.spoiled = overlapped.changed
            self.overlapped = None

    @property
    def is_carried(self) -> bool:
        """Return True if this window may have added to gradients of the one before."""
        return self.gradients is not None and self.gradients.are_there()

    @property
    def is_whole(self) -> bool:
        """Return True if all tensors equal on all ranks are unchanged: no step, no write."""
        changed = (n for n, v in self.versions.items() if self.whole[n]._version != v)
        return self.live and not self.spoiled and next(changed, None) is None

    def has(self, share: Iterable[Region]) -> bool:
        """Return True if these regions are available."""
        missing = (r for r in share if r.tensor in self.versions and r.key not in self.copied)
        return self.is_whole or (not self.spoiled and next(missing, None) is None)

    def file_of(
        self, owner: int, world: int, share: Sequence[Region], small: memoryview
    ) -> tuple[staging.Shard, dict[str, TensorEntry]]:
        """Return the shard file of a rank, and an entry of each of its tensors.

        Args:
            owner, world: The rank of the file, and the number of ranks.
            share: The regions it stores of the tensors equal on all ranks.
            small: The small shard file of that rank, or of its stand-in.

        Raises:
            UnusableSnapshot: The small file is damaged.
        """
        own, regions = read_small(small, f"the small state of rank {owner}")
        built = Captured(dict(own))
        for region in share:
            copied = self.copied.get(region.key)
            whole = Captured({region.tensor: self.whole[region.tensor]})
            built.tensors[region.tensor] = (
                copied if copied is not None else staging.source_of(whole, region)
            )
        entries = {r.tensor: TensorEntry(r.dtype, r.of) for r in regions}
        shard = staging.stage(built, [*regions, *share], rank=owner, world=world)
        return shard, {**self.entries, **entries}


class HostBuffers:
    """Two host buffers filled in turn, registered for the GPU."""

    def __init__(self, device_copier: DeviceCopier) -> None:
        self._device_copier = device_copier
        self._memory = [memoryview(b"")] * 2
        self._turn = 0

    def next(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of so many bytes. It overwrites the buffer of the call before last."""
        self._turn = 1 - self._turn
        memory = self._memory[self._turn]
        if len(memory) < num_bytes:
            self._device_copier.keep(memory, 0)
            memory = self._memory[self._turn] = private_memory(num_bytes)
        self._device_copier.register(memory)
        return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else _no_bytes()

    def close(self) -> None:
        """Unregister and release the memory."""
        self._device_copier.close()
        self._memory = [memoryview(b"")] * 2


class HostCopies:
    """Copies of tensors as of a boundary; those of GPU tensors lie on the host."""

    def __init__(self, device_copier: DeviceCopier) -> None:
        self._device_copier, self._buffers = device_copier, HostBuffers(device_copier)

    def make(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a copy of each. GPU copies overwrite those of the call before last."""
        on_device = {n: t for n, t in tensors.items() if t.device.type == self._device_copier.kind}
        copies = {n: t.clone() for n, t in tensors.items() if n not in on_device}
        if not on_device:
            return copies
        self._device_copier.use(on_device.values())
        memory = self._buffers.next(sum(_padded(t.nbytes) for t in on_device.values()))
        first, by_device = 0, []
        for name, tensor in on_device.items():
            place = memory[first : first + tensor.nbytes]
            copies[name] = place.view(tensor.dtype).view(tensor.shape)
            if tensor.nbytes and self._device_copier.takes(tensor, place.data_ptr()):
                by_device.append((place.data_ptr(), tensor))
            else:
                copies[name].copy_(tensor)
            first += _padded(tensor.nbytes)
        self._device_copier.copy(by_device)
        return copies

    def close(self) -> None:
        """Unregister and release the memory."""
        self._buffers.close()


class ShareCopies:
    """Copies of the shares of large tensors, made during training."""

    def __init__(self, device_copier: DeviceCopier) -> None:
        self._device_copier, self._buffers = device_copier, HostBuffers(device_copier)

    def begin(
        self, captured: Captured, regions: Collection[Region], *, proves: bool, num_threads: int
    ) -> tuple[dict[str, torch.Tensor], OverlappedCopy]:
        """Return the target of each region, and the copies to fill them.

        They overwrite the copies of the call before last. GPU copies begin at once.
        """
        self._device_copier.use(captured.tensors[region.tensor] for region in regions)
        memory = self._buffers.next(sum(_padded(region.num_bytes) for region in regions))
        copied: dict[str, torch.Tensor] = {}
        pieces, first = [], 0
        for region in regions:
            place = memory[first : first + region.num_bytes]
            copied[region.key] = place.view(staging.TYPES[region.dtype]).view(region.shape)
            source = staging.source_of(captured, region)
            pieces.append(PendingCopy(region.tensor, source, place.data_ptr()))
            first += _padded(region.num_bytes)
        overlapped = OverlappedCopy(
            pieces, proves=proves, num_threads=num_threads, device_copier=self._device_copier
        )
        return copied, overlapped

    def close(self) -> None:
        """Unregister and release the memory."""
        self._buffers.close()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _no_bytes() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def without_gradients(captured: Captured) -> Captured:
    """Remove the gradients from a captured state, and return it."""
    if captured.values.get(GRADIENTS):
        captured.values[GRADIENTS] = {}
        prefix = f"{GRADIENTS}/"
        for kind in (captured.tensors, captured.groups):
            for name in [name for name in kind if name.startswith(prefix)]:
                del kind[name]
    return captured


class Gradients:
    """The gradients present at the start of a window."""

    def __init__(self, registry: Registry) -> None:
        found = ((p, p.grad) for p in registry.trained_parameters().values())
        self._held = [(p, weakref.ref(grad)) for p, grad in found if grad is not None]

    @property
    def are_none(self) -> bool:
        """Return True if there were none."""
        return not self._held

    def are_there(self) -> bool:
        """Return True if any is still its parameter's gradient: backward may have added to it."""
        return any(gradient() is p.grad is not None for p, gradient in self._held)


def small_file(captured: Captured, alike: Collection[str], rank: int, world: int) -> staging.Shard:
    """Copy this rank's own state, values included, to a shard. Its `head` is not built yet."""
    own = Captured({n: t for n, t in captured.tensors.items() if n not in alike})
    own.values = captured.values
    return staging.stage(own, staging.describe(own, ()), rank=rank, world=world)


def read_small(data: memoryview, what: str) -> tuple[Mapping[str, torch.Tensor], list[Region]]:
    """Return the verified tensors of a small shard file, and their regions.

    Raises:
        UnusableSnapshot: The file is damaged.
    """
    length = shard_file.header_length(data[:8], what)
    header = shard_file.parse(data[:length], what, file_bytes=len(data))
    found: dict[str, torch.Tensor] = {}
    for region in header.regions:
        first = length + region.first_byte
        part = data[first : first + region.num_bytes]
        if digests_by_block(part, shard_file.block_bytes(region.num_bytes)) != region.digest:
            raise UnusableSnapshot(f"{what}: {region.tensor[:100]} is damaged")
        kind = staging.TYPES[region.dtype]
        found[region.tensor] = (
            torch.frombuffer(part, dtype=kind).view(region.shape)
            if region.num_bytes
            else torch.empty(region.shape, dtype=kind, device="cpu")
        )
    return found, list(header.regions)

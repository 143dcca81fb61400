"""Destination: where a restore puts what it reads. The way back from `stage`.

Fresh memory, from which the live tensors are filled once everything was verified; what makes new
tensors anyway, as an optimizer's state does, may take it for them (`given`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import shard_file
from trainckpt.format.layout import whole
from trainckpt.state.stage import TYPES, bytes_of, private_memory
from trainckpt.state.values import DTYPES
from trainckpt.state.warm import WarmMemory
from trainckpt.tiers.direct import FROM_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from trainckpt.format.layout import Box
    from trainckpt.format.shard_file import Region


class Destination:
    """Where a restore puts what it reads: fresh CPU memory for one box of each tensor.

    Attributes:
        borrowed: Tensors that lie where they were found, or in memory of others too.
    """

    def __init__(
        self,
        wanted: Mapping[str, Box | None],
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        own: Collection[str] = (),
        warm: WarmMemory | None = None,
    ) -> None:
        """Nothing is allocated yet.

        Args:
            wanted: Tensor -> box; None: the whole of it.
            into: Tensor -> where its box goes, instead of fresh memory: dense, row-major.
            own: Those that are to become live themselves, and are not borrowed.
            warm: Memory that was made for some.
        """
        self._own, self._warm = own, warm or WarmMemory()
        self.borrowed: set[str] = set()
        self._wanted = wanted
        self._tensors = dict(into or {})
        self._laid: dict[str, memoryview] = {}
        self._true = dict.fromkeys(self._tensors, "")
        self._filled = dict.fromkeys(self._tensors, 0)
        self._fresh: list[memoryview] = []

    def fresh(self) -> list[memoryview]:
        """Memory to which nothing was written yet, and which will be live; each once."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def memory_for(self, region: Region, part: Box, first_byte: int = 0) -> memoryview | None:
        """The bytes that `part` fills, lying as those from `first_byte` of a file do, if possible.

        None where that is not one run of bytes.
        """
        tensor, box = self._tensor(region, part, first_byte)
        first, last = _reach(box, part)
        size = math.prod(part.shape)
        if size and last - first + 1 != size:
            return None
        self._filled[region.tensor] += size
        item = tensor.element_size()
        whole_ = self._laid.get(region.tensor)
        return (bytes_of(tensor) if whole_ is None else whole_)[
            first * item : (first + size) * item
        ]

    def borrow(self, region: Region, part: Box, data: memoryview) -> bool:
        """Take `data` for the tensor's memory if `part` is all of it. Live tensors are filled from
        it, and nothing writes to it; it stays as it is as long as the tensor lives.
        """
        name, box = region.tensor, self._wanted.get(region.tensor) or whole(region.of)
        if name in self._tensors or name in self._own or part != box:
            return False
        self._lies_in(data, region, box.shape)
        self._filled[name] = self._tensors[name].numel()
        return True

    def can_lie(self, region: Region) -> bool:
        """Whether the whole of a tensor is wanted, of which the region is a part, and it need not
        lie in this rank's own memory.
        """
        name, box = region.tensor, self._wanted.get(region.tensor)
        is_whole = box is None or box == whole(region.of)
        return is_whole and name not in self._tensors and name not in self._own

    def lie(self, region: Region, memory: memoryview) -> None:
        """Let the whole tensor lie in this memory. Live tensors are filled from it."""
        self._lies_in(memory, region, region.of)
        self._laid[region.tensor], self._filled[region.tensor] = memory, 0

    def _lies_in(self, data: memoryview, region: Region, shape: tuple[int, ...]) -> None:
        name = region.tensor
        self._tensors[name] = torch.frombuffer(data, dtype=TYPES[region.dtype]).view(shape)
        self._true[name] = region.true_dtype
        self.borrowed.add(name)

    def put(self, region: Region, part: Box, data: memoryview) -> None:
        """Copy `part`: `data` begins with its first element and goes on as `region` does."""
        tensor, box = self._tensor(region, part)
        target = tensor
        for d, (o, n, at) in enumerate(zip(part.offset, part.shape, box.offset, strict=True)):
            target = target.narrow(d, o - at, n)
        target.copy_(_inside(region, part, data))
        self._filled[region.tensor] += target.numel()

    def take(self, region: Region, part: Box, data: memoryview, into: memoryview) -> None:
        """The elements of `part` alone, row-major, for another rank; `data` as for `put`."""
        found = torch.frombuffer(into, dtype=TYPES[region.dtype]).view(part.shape)
        found.copy_(_inside(region, part, data))

    def finish(self, dtypes: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """The tensors, once everything was read; raises if a part is missing.

        `dtypes` is asked for the safetensors types of those of which this rank has no element.
        """
        for name, box in self._wanted.items():
            if name not in self._tensors and box is not None and box.is_empty:
                self._tensors[name] = _empty(box.shape, TYPES[dtypes[name]])
            tensor = self._tensors.get(name)
            if tensor is None or self._filled.get(name, 0) != tensor.numel():
                raise UnusableSnapshot(f"{name[:100]}: a part of it is missing")
        return {name: _as_live(t, self._true.get(name, "")) for name, t in self._tensors.items()}

    def _tensor(self, region: Region, part: Box, first_byte: int = 0) -> tuple[torch.Tensor, Box]:
        name = region.tensor
        box = self._wanted.get(name) or whole(region.of)
        if name not in self._tensors:
            try:
                fresh = self._warm.take(name, box.shape, TYPES[region.dtype])
                if fresh is None:
                    fresh = _lying(box, TYPES[region.dtype], first_byte, _reach(box, part)[0])
                    if name in self._own and fresh.nbytes >= FROM_BYTES:
                        self._fresh.append(bytes_of(fresh))
            except (RuntimeError, OSError, OverflowError) as error:  # more than there is
                raise UnusableSnapshot(f"{name[:100]}: {str(error)[:200]}") from error
            self._tensors[name], self._filled[name] = fresh, 0
            self._true[name] = region.true_dtype
        tensor = self._tensors[name]
        if tuple(tensor.shape) != box.shape or tensor.dtype != TYPES[region.dtype]:
            raise UnusableSnapshot(f"{name[:100]}: its regions do not belong together")
        return tensor, box


def _reach(box: Box, part: Box) -> tuple[int, int]:
    """Which element of a box, row-major, is the first of a part of it, and which the last."""
    first = last = 0
    for o, n, at, of in zip(part.offset, part.shape, box.offset, box.shape, strict=True):
        first, last = first * of + o - at, last * of + o - at + n - 1
    return first, last


def _lying(box: Box, dtype: torch.dtype, first_byte: int, element: int) -> torch.Tensor:
    """A fresh tensor; in a large one the element lies, inside its page, as `first_byte` does."""
    num_bytes = math.prod(box.shape) * dtype.itemsize
    before = (first_byte - element * dtype.itemsize) % shard_file.PAGE_BYTES
    if num_bytes < FROM_BYTES or before % dtype.itemsize:
        return _empty(box.shape, dtype)
    flat = private_memory(before + num_bytes)[before:]
    return torch.frombuffer(flat, dtype=dtype).view(box.shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the script's default is


def _inside(region: Region, part: Box, data: memoryview) -> torch.Tensor:
    """A part of a region: `data` begins with its first element and goes on as the region does."""
    flat = torch.frombuffer(data, dtype=TYPES[region.dtype])
    strides = [math.prod(region.shape[d + 1 :]) for d in range(len(region.shape))]
    return flat.as_strided(part.shape, strides)


def _as_live(tensor: torch.Tensor, true_dtype: str) -> torch.Tensor:
    if not true_dtype:
        return tensor
    if true_dtype not in DTYPES or true_dtype.startswith("q"):  # quantized: never captured
        raise UnusableSnapshot(f"a stored tensor has the unknown type {true_dtype[:40]!r}")
    try:
        return tensor.view(DTYPES[true_dtype]).squeeze(-1)
    except RuntimeError as error:
        raise UnusableSnapshot(f"stored bytes are no {true_dtype}: {str(error)[:100]}") from error

"""The memory a restore reads into. The reverse of `staging`.

It is fresh memory; the live tensors are filled from it once everything is verified. State with new
tensors anyway, as an optimizer's, may adopt them (`zero_copy`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import shard_file
from trainckpt.format.layout import whole
from trainckpt.state.staging import TYPES, bytes_of
from trainckpt.state.values import DTYPES
from trainckpt.storage.direct_io import FROM_BYTES, private_memory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from trainckpt.format.layout import Box
    from trainckpt.format.shard_file import Region


class Destination:
    """CPU memory for one box of each restored tensor.

    Attributes:
        borrowed: Names of tensors in memory not this rank's alone.
    """

    def __init__(
        self,
        wanted: Mapping[str, Box | None],
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        own: Collection[str] = (),
    ) -> None:
        """Create a destination; nothing is allocated yet.

        Args:
            wanted: Tensor -> box; None: all of it.
            into: Tensor -> target of its box, instead of fresh memory: dense, row-major.
            own: Tensors to become live themselves; they are never borrowed.
        """
        self._own = own
        self.borrowed: set[str] = set()
        self._wanted = wanted
        self._tensors = dict(into or {})
        self._true = dict.fromkeys(self._tensors, "")
        self._filled = dict.fromkeys(self._tensors, 0)

    def memory_for(self, region: Region, part: Box, first_byte: int = 0) -> memoryview | None:
        """Return the bytes of `part`, aligned like those from `first_byte` of a file if possible.

        None if they are not contiguous.
        """
        tensor, box = self._tensor(region, part, first_byte)
        first, last = _reach(box, part)
        size = math.prod(part.shape)
        if size and last - first + 1 != size:
            return None
        self._filled[region.tensor] += size
        item = tensor.element_size()
        return bytes_of(tensor)[first * item : (first + size) * item]

    def borrow(self, region: Region, part: Box, data: memoryview) -> bool:
        """Use `data` as the tensor's memory if `part` is all of it; False if it cannot be.

        Live tensors are filled from it. Nothing writes to it, and it stays unchanged as long as the
        tensor lives.
        """
        name, box = region.tensor, self._wanted.get(region.tensor) or whole(region.of)
        if name in self._tensors or name in self._own or part != box:
            return False
        self._tensors[name] = torch.frombuffer(data, dtype=TYPES[region.dtype]).view(box.shape)
        self._true[name] = region.true_dtype
        self.borrowed.add(name)
        self._filled[name] = self._tensors[name].numel()
        return True

    def put(self, region: Region, part: Box, data: memoryview) -> None:
        """Copy `part`; `data` begins with its first element, with the strides of `region`."""
        tensor, box = self._tensor(region, part)
        target = tensor
        for d, (o, n, at) in enumerate(zip(part.offset, part.shape, box.offset, strict=True)):
            target = target.narrow(d, o - at, n)
        target.copy_(_inside(region, part, data))
        self._filled[region.tensor] += target.numel()

    def finish(self, dtypes: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return the tensors once everything is read; raise if a part is missing.

        `dtypes`: safetensors type of each tensor, for those without elements on this rank.
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
                fresh = _lying(box, TYPES[region.dtype], first_byte, _reach(box, part)[0])
            except (RuntimeError, OSError, OverflowError) as error:  # out of memory
                raise UnusableSnapshot(f"{name[:100]}: {str(error)[:200]}") from error
            self._tensors[name], self._filled[name] = fresh, 0
            self._true[name] = region.true_dtype
        tensor = self._tensors[name]
        if tuple(tensor.shape) != box.shape or tensor.dtype != TYPES[region.dtype]:
            raise UnusableSnapshot(f"{name[:100]}: its regions do not belong together")
        return tensor, box


def _reach(box: Box, part: Box) -> tuple[int, int]:
    """Return the row-major indices in a box of the first and last element of a part."""
    first = last = 0
    for o, n, at, of in zip(part.offset, part.shape, box.offset, box.shape, strict=True):
        first, last = first * of + o - at, last * of + o - at + n - 1
    return first, last


def _lying(box: Box, dtype: torch.dtype, first_byte: int, element: int) -> torch.Tensor:
    """Return a fresh tensor; if large, `element` gets the page offset of `first_byte`."""
    num_bytes = math.prod(box.shape) * dtype.itemsize
    before = (first_byte - element * dtype.itemsize) % shard_file.PAGE_BYTES
    if num_bytes < FROM_BYTES or before % dtype.itemsize:
        return _empty(box.shape, dtype)
    return torch.frombuffer(private_memory(num_bytes, before), dtype=dtype).view(box.shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")  # not the script's default device


def _inside(region: Region, part: Box, data: memoryview) -> torch.Tensor:
    """Return a part of a region; `data` begins with its first element."""
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

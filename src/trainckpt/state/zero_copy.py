"""Adopt restored tensors where they were read, without a copy, and check them later.

State is applied twice: on resume and at the first boundary. The second time undoes any change by
the script in between. A copied tensor leaves its source for that. An adopted tensor has only the
digests of its verification: if its bytes still match, nothing is done; else it is read again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format import digest
from trainckpt.format.shard_file import LINE_BYTES
from trainckpt.storage.direct_io import at_address
from trainckpt.storage.worker_pool import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from trainckpt.format.digest import Verified

    Again = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

FROM_BYTES = 64 << 10  # below: a copy is quicker than a check


class Proofs:
    """The verified bytes, by the address they were read to."""

    def __init__(self, verified: Iterable[Verified] = ()) -> None:
        self._found = {each.address: each for each in verified}

    def of(self, tensor: torch.Tensor) -> VerifiedTensor | None:
        """Return the proof of a tensor at its address; None unless all of it was verified."""
        if not _lies_in_one_run(tensor) or tensor.nbytes < FROM_BYTES:
            return None
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        tiles: list[Verified] = []
        while at < end and (tile := self._found.get(at)) is not None:
            tiles.append(tile)
            at += tile.num_bytes
        if at != end:
            return None
        return VerifiedTensor(end - tensor.nbytes, tensor.nbytes, tuple(tiles))


class VerifiedTensor(NamedTuple):
    """The digests of a tensor's bytes, and the address they were read to."""

    address: int
    num_bytes: int
    tiles: tuple[Verified, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has these bytes, at any address."""
        if not _lies_in_one_run(tensor) or tensor.nbytes != self.num_bytes:
            return False
        moved = tensor.data_ptr() - self.address
        return all(_has_bytes_of(tile, tile.address + moved) for tile in self.tiles)


def _has_bytes_of(tile: Verified, address: int) -> bool:
    """Return True if the bytes at `address` have the digests of a verified tile."""
    return digest.digests_by_block(at_address(address, tile.num_bytes), tile.block) == tile.digests


class AdoptedTensors:
    """The adopted tensors of one resume.

    Args:
        tensors: All restored tensors; one with no repair in place is replaced there.
        proofs: The verified bytes at their addresses.
        again: Reads tensors once more, into fresh memory; raises as the first read does.
        lent: Names of tensors in memory not owned by this rank.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        proofs: Proofs,
        again: Again,
        lent: Collection[str] = (),
    ) -> None:
        self._tensors, self._proofs, self._again, self._lent = tensors, proofs, again, lent
        self._given: dict[str, VerifiedTensor] = {}  # in the order of their memory

    def give(self, name: str) -> bool:
        """Make the restored tensor live from now on; False: the caller must copy it.

        Memory must be aligned as torch aligns its own, so that kernels compute the same bits.
        """
        tensor = self._tensors[name]
        cannot_be = name in self._given or name in self._lent
        proof = None if cannot_be else self._proofs.of(tensor)
        if proof is None or tensor.data_ptr() % LINE_BYTES:
            return False
        self._given[name] = proof
        return True

    def __contains__(self, name: str) -> bool:
        """Return True if the tensor was adopted."""
        return name in self._given

    @torch.no_grad()
    def mend(self, num_threads: int = 1) -> list[str]:
        """Reset every adopted tensor to its restored bytes, and return the changed names."""
        changed: list[str] = []

        def look(name: str, proof: VerifiedTensor) -> None:
            if not proof.holds(self._tensors[name]):
                changed.append(name)

        with Workers(num_threads, "trainckpt-prove") as workers:
            for name, proof in self._given.items():
                workers.submit(partial(look, name, proof))
            workers.settle()
        if changed:
            self._replace(changed)
        return sorted(changed)

    def _replace(self, changed: Collection[str]) -> None:
        for name, tensor in self._again(changed).items():
            live = self._tensors[name]
            is_alike = (live.shape, live.dtype) == (tensor.shape, tensor.dtype)
            if is_alike and _lies_in_one_run(live):
                live.copy_(tensor)
            else:
                self._tensors[name] = tensor


def _lies_in_one_run(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's bytes can be read by address."""
    dense = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return dense and has_memory(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if a contiguous tensor still has its memory."""
    behind = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    return tensor.untyped_storage().nbytes() >= behind

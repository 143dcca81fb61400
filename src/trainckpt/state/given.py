"""Given: tensors that became live where they were read to, without a copy; and how they are proved.

State is applied twice, on resuming and at the first boundary, and what the script has changed in
between must be as it was saved again. Of a tensor that was copied, what was read is still there. Of
a given one only digests are, those that it was verified by: while its bytes match them nothing is
to be done, and else it is read once more.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format import digest
from trainckpt.format.shard_file import LINE_BYTES
from trainckpt.tiers.direct import at_address
from trainckpt.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from trainckpt.format.digest import Verified

    Again = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

FROM_BYTES = 64 << 10  # what is smaller is copied sooner than it is proved


class Proofs:
    """What was verified, by where it lay then."""

    def __init__(self, verified: Iterable[Verified] = ()) -> None:
        self._found = {each.address: each for each in verified}

    def of(self, tensor: torch.Tensor) -> Proof | None:
        """Of a tensor that was read to this memory; None if not all of it was verified there."""
        if not _lies_in_one_run(tensor) or tensor.nbytes < FROM_BYTES:
            return None
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        tiles: list[Verified] = []
        while at < end and (tile := self._found.get(at)) is not None:
            tiles.append(tile)
            at += tile.num_bytes
        return Proof(end - tensor.nbytes, tensor.nbytes, tuple(tiles)) if at == end else None


class Proof(NamedTuple):
    """The digests of a tensor's bytes, and where they were read to."""

    address: int
    num_bytes: int
    tiles: tuple[Verified, ...]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these bytes, wherever it lies."""
        if not _lies_in_one_run(tensor) or tensor.nbytes != self.num_bytes:
            return False
        moved = tensor.data_ptr() - self.address
        return all(
            digest.digests_by_block(at_address(tile.address + moved, tile.num_bytes), tile.block)
            == tile.digests
            for tile in self.tiles
        )


class Given:
    """The given tensors of one resume.

    Args:
        tensors: All that were read; one that cannot be mended is replaced there.
        proofs: What of it was verified where it lies.
        again: Reads tensors once more, into fresh memory; raises as the first reading.
        lent: Those that lie in memory which is not this rank's own.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        proofs: Proofs,
        again: Again,
        lent: Collection[str] = (),
    ) -> None:
        self._tensors, self._proofs, self._again, self._lent = tensors, proofs, again, lent
        self._given: dict[str, Proof] = {}  # in the order of their memory

    def give(self, name: str) -> bool:
        """Let what was read be live from now on; False: it has to be copied.

        What is aligned as torch aligns its own memory computes what that would compute.
        """
        tensor = self._tensors[name]
        cannot_be = name in self._given or name in self._lent
        proof = None if cannot_be else self._proofs.of(tensor)
        if proof is None or tensor.data_ptr() % LINE_BYTES:
            return False
        self._given[name] = proof
        return True

    def __contains__(self, name: str) -> bool:
        """Whether it was given."""
        return name in self._given

    @torch.no_grad()
    def mend(self, num_threads: int = 1) -> list[str]:
        """Make every given tensor what was read; returns those that were not."""
        changed: list[str] = []

        def look(name: str, proof: Proof) -> None:
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
    """Whether its bytes can be looked at by their address."""
    dense = tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous()
    return dense and has_memory(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor has not given up its memory."""
    behind = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    return tensor.untyped_storage().nbytes() >= behind

"""Given: tensors that became live where they were read to, without a copy; and how they are proved.

State is applied twice, on resuming and at the first boundary, and what the script has changed in
between must be as it was saved again. Of a tensor that was copied, what was read is still there. Of
a given one only digests are, those that it was verified by: while its bytes match them nothing is
to be done, and else it is read once more. Where the system says that nobody has written to a
tensor in between (`Untouched`), it is taken at its word.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format import digest
from trainckpt.format.shard_file import LINE_BYTES
from trainckpt.tiers.direct import at_address
from trainckpt.tiers.workers import Workers
from trainckpt.tiers.write_watch import WriteWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from trainckpt.format.digest import Verified

    Again = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

FROM_BYTES = 64 << 10  # what is smaller is copied sooner than it is proved
WATCHED_FROM_BYTES = 1 << 20  # what is smaller is proved sooner than it is watched


class Proofs:
    """What was verified, by where it lay then.

    Attributes:
        untouched: Live tensors that were made what was read, and were not written to since.
    """

    def __init__(self, verified: Iterable[Verified] = ()) -> None:
        self._found = {each.address: each for each in verified}
        self.untouched = Untouched()

    def of(self, tensor: torch.Tensor) -> Proof | None:
        """Of a tensor that was read to this memory; None if not all of it was verified there."""
        if not _lies_in_one_run(tensor) or tensor.nbytes < FROM_BYTES:
            return None
        at, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        tiles: list[Verified] = []
        while at < end and (tile := self._found.get(at)) is not None:
            tiles.append(tile)
            at += tile.num_bytes
        if at != end:
            return None
        return Proof(end - tensor.nbytes, tensor.nbytes, tuple(tiles), self.untouched)

    def made(self, live: torch.Tensor, found: torch.Tensor) -> None:
        """A live tensor was just made what was read; no step of the script came since."""
        proof = self.of(found)
        is_alike = (live.dtype, live.shape) == (found.dtype, found.shape)
        if proof is not None and is_alike and _lies_in_one_run(live) and _lies_as_it_is(live):
            self.untouched.begin(live, proof)


class Untouched:
    """Tensors that have the bytes of a proof, while nobody writes to them. See `WriteWatch`."""

    def __init__(self) -> None:
        self._watch = WriteWatch()
        self._proved: dict[tuple[int, int], int] = {}  # by where they lie, what was read

    def begin(self, tensor: torch.Tensor, proof: Proof) -> None:
        """From now on; the tensor lies in one run, and has these bytes."""
        where = tensor.data_ptr(), tensor.nbytes
        if tensor.nbytes < WATCHED_FROM_BYTES or _may_be_written_by_a_device(tensor):
            return
        if self._watch.begin(*where):
            self._proved[where] = proof.address

    def written(self, tensor: torch.Tensor, proof: Proof) -> list[tuple[int, int]]:
        """Which bytes of a tensor may not be a proof's any more: begins and ends. Any thread."""
        where, found = (tensor.data_ptr(), tensor.nbytes), None
        if self._proved.get(where) == proof.address:
            found = self._watch.written(*where)
        return [(0, tensor.nbytes)] if found is None else found

    def end(self) -> None:
        """Whoever writes has nothing to wait for any more."""
        self._proved.clear()
        self._watch.end()


class Proof(NamedTuple):
    """The digests of a tensor's bytes, and where they were read to."""

    address: int
    num_bytes: int
    tiles: tuple[Verified, ...]
    untouched: Untouched

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has these bytes, wherever it lies."""
        if not _lies_in_one_run(tensor) or tensor.nbytes != self.num_bytes:
            return False
        written = self.untouched.written(tensor, self)
        at = tensor.data_ptr() - self.address
        return all(
            _has_between(tile, at, first, last)
            for tile in self.tiles
            for first, last in _blocks(tile, tile.address - self.address, written)
        )


def _blocks(
    tile: Verified, before: int, written: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Runs of a tile's blocks in which any of these bytes lie; each block once.

    `before`: bytes before the tile, from where those count.
    """
    first = last = 0
    for begin, end in written:
        at, to = max(begin - before, 0), min(end - before, tile.num_bytes)
        if at >= to:
            continue
        low, high = at // tile.block, -(-to // tile.block)
        if low > last:
            yield first, last
            first = low
        first, last = (low, high) if first == last else (first, max(last, high))
    yield first, last


def _has_between(tile: Verified, moved: int, first: int, last: int) -> bool:
    """Whether blocks `first` to `last` of a tile are as verified, `moved` from where that was."""
    begin, end = first * tile.block, min(last * tile.block, tile.num_bytes)
    if begin >= end:
        return True
    now = digest.digests_by_block(at_address(tile.address + moved + begin, end - begin), tile.block)
    return now == tile.digests[first * digest.NUM_HEX : last * digest.NUM_HEX]


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
        self._proofs.untouched.begin(tensor, proof)  # before the script can see it
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


def _may_be_written_by_a_device(tensor: torch.Tensor) -> bool:
    """Whether a GPU has it mapped: what that writes leaves the marks on pages."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_used and tensor.is_pinned()


def may_be_written_by_others(tensor: torch.Tensor) -> bool:
    """Whether another process, or a device, may write there at any time."""
    is_shared: bool = tensor.is_shared()  # type: ignore[no-untyped-call]
    return is_shared or _may_be_written_by_a_device(tensor)


def _lies_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its values, neither conjugated nor negated."""
    return not (tensor.is_conj() or tensor.is_neg())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor has not given up its memory."""
    behind = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    return tensor.untyped_storage().nbytes() >= behind

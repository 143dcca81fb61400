"""Given: tensors that became live where they were read to, without a copy; and their proof.

State is applied twice, on resuming and at the first boundary, and what the script has changed in
between must be as it was saved again. Of a tensor that was copied, what was read is still there. Of
a given one the digests are, those of the file: while its bytes match them nothing is to be done,
and else it is read once more.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainckpt.format import digest
from trainckpt.format.shard_file import LINE_BYTES
from trainckpt.state.stage import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from trainckpt.format.shard_file import Region

    Again = Callable[[Collection[str]], Mapping[str, torch.Tensor]]

FROM_BYTES = 64 << 10  # what is smaller is copied sooner than it is proved


class Origin(NamedTuple):
    """A whole region that was read into a tensor, from this byte of it on."""

    first_byte: int
    region: Region


class Given:
    """The given tensors of one resume.

    Args:
        tensors: All that were read; one that cannot be mended is replaced there.
        origins: Of every tensor that was read to memory of its own, all of it.
        again: Reads tensors once more, into fresh memory; raises as the first reading.
        num_threads: That may compute digests at once.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        origins: Mapping[str, Sequence[Origin]],
        again: Again,
        num_threads: int = 1,
    ) -> None:
        self._tensors, self._origins = tensors, origins
        self._again, self._num_threads = again, num_threads
        self._names: dict[str, None] = {}  # in the order of their memory

    def give(self, name: str) -> bool:
        """Let what was read be live from now on; False: it has to be copied.

        What is aligned as torch aligns its own memory computes what that would compute.
        """
        tensor = self._tensors[name]
        can = (
            name in self._origins
            and name not in self._names
            and tensor.nbytes >= FROM_BYTES
            and tensor.is_contiguous()
            and tensor.data_ptr() % LINE_BYTES == 0
        )
        if can:
            self._names[name] = None
        return can

    def __contains__(self, name: str) -> bool:
        """Whether it was given."""
        return name in self._names

    @torch.no_grad()
    def mend(self) -> list[str]:
        """Make every given tensor what was read; returns those that were not."""
        names = list(self._names)
        shares = [names[first :: self._num_threads] for first in range(self._num_threads)]
        changed: list[str] = []
        helpers = [
            threading.Thread(target=lambda share=share: changed.extend(self._changed(share)))
            for share in shares[1:]
        ]
        for helper in helpers:
            helper.start()
        changed.extend(self._changed(shares[0]))
        for helper in helpers:
            helper.join()
        if changed:
            self._replace(changed)
        return sorted(changed)

    def _replace(self, changed: Collection[str]) -> None:
        for name, tensor in self._again(changed).items():
            live = self._tensors[name]
            if (live.shape, live.dtype, live.device) == (tensor.shape, tensor.dtype, tensor.device):
                live.copy_(tensor)
            else:
                self._tensors[name] = tensor

    def _changed(self, names: Collection[str]) -> list[str]:
        return [name for name in names if not self._is_as_read(name)]

    def _is_as_read(self, name: str) -> bool:
        tensor, origins = self._tensors[name], self._origins[name]
        if not tensor.is_cpu or tensor.nbytes != sum(o.region.num_bytes for o in origins):
            return False
        data = bytes_of(tensor)
        return all(_matches(data, origin) for origin in origins)


def _matches(data: memoryview, origin: Origin) -> bool:
    first, region = origin
    part = data[first : first + region.num_bytes]
    return digest.digests_by_block(part, region.bytes_per_digest or 1) == region.digest

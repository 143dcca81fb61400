"""Store keys of one save, and when ranks delete them.

    save/<sequence>/groups     reduced: which tensors are equal on their replicas
    save/<sequence>/report/<r> rank r to rank 0: its receipt, or why there is none
    save/<sequence>/verdict    rank 0 to all

The store of torch.distributed holds a key in one process's memory until it is deleted, and a run
saves for weeks. A rank's report has been read once the verdict exists. Rank 0's message has been
read once all have reported on a later save: a rank finishes one save before it begins the next.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement

if TYPE_CHECKING:
    from trainckpt.ranks.store import RankStore


def groups(sequence: int) -> str:
    """Return the key of the reduction of one save."""
    return f"save/{sequence}/groups"


def report(sequence: int, rank: int) -> str:
    """Return the key of a rank's report to rank 0."""
    return f"save/{sequence}/report/{rank}"


def verdict_key(sequence: int) -> str:
    """Return the key of rank 0's verdict for all ranks."""
    return f"save/{sequence}/verdict"


class SaveKeys:
    """Deletes the keys of one rank, save by save. Used by one thread at a time."""

    def __init__(self, channel: RankStore) -> None:
        self._channel = channel
        self._own = self._common = 0  # the keys of saves up to these are deleted

    def delete_read(self, sequence: int) -> None:
        """Delete read keys: the verdict exists; on rank 0, all ranks have reported on this save."""
        rank, keys = self._channel.world.rank, list[str]()
        for number in range(self._own + 1, sequence + 1):
            keys += [f"{groups(number)}/{rank}", report(number, rank)]
        if rank == 0:
            for number in range(self._common + 1, sequence):
                keys += [verdict_key(number), *self._channel.fold_keys(groups(number))]
            self._common = sequence - 1
        self._own = sequence
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to delete
            self._channel.forget(keys)

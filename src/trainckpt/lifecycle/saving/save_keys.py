"""Save keys: what ranks tell each other of one save, and when that is forgotten.

    save/<sequence>/groups     a fold: which tensors are equal on their replicas
    save/<sequence>/report/<r> rank r to rank 0: its receipt, or why there is none
    save/<sequence>/verdict    rank 0 to all
    save/<sequence>/haste      any to all, which it forgets itself: its training waits

The store of torch.distributed keeps a key until it is deleted, in the memory of one process, and a
run saves for weeks. What a rank has told of a save has been read once the verdict is there. What
rank 0 tells all has been read once all have reported on a later save: a rank begins with no save
before it is through with the one before.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.errors import NoAgreement

if TYPE_CHECKING:
    from trainckpt.ranks.channel import Channel


def groups(sequence: int) -> str:
    """The fold of one save."""
    return f"save/{sequence}/groups"


def report(sequence: int, rank: int) -> str:
    """What a rank tells rank 0."""
    return f"save/{sequence}/report/{rank}"


def verdict(sequence: int) -> str:
    """What rank 0 tells all."""
    return f"save/{sequence}/verdict"


def haste(sequence: int) -> str:
    """What a rank tells all whose training waits for the save."""
    return f"save/{sequence}/haste"


class SaveKeys:
    """Forgets the keys of one rank, save by save. Used by one thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._own = self._common = 0  # up to these saves all is forgotten

    def read(self, sequence: int) -> None:
        """The verdict on this save is there; on rank 0: all ranks have reported on it."""
        rank, keys = self._channel.world.rank, list[str]()
        for number in range(self._own + 1, sequence + 1):
            keys += [f"{groups(number)}/{rank}", report(number, rank)]
        if rank == 0:
            for number in range(self._common + 1, sequence):
                keys += [verdict(number), *self._channel.fold_keys(groups(number))]
            self._common = sequence - 1
        self._own = sequence
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to forget
            self._channel.forget(keys)

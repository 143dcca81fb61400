"""A dump without communicators: process groups are taken down before it, and made again after.

Only where a group could not be in a dump, as NCCL's cannot. While they are away whoever holds one
holds a placeholder: nothing trains then, and this package's own keys are in the store, which stays.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import SaveFailed
from trainckpt.process_dump.gpu_signs import NVLS
from trainckpt.ranks import groups
from trainckpt.state import group_holders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.ranks.groups import Torn
    from trainckpt.state.group_holders import Slot

WITHIN_S = 120.0  # for all ranks to have come to the first collective
FIRST_WITH_NVLS = 9  # compute capability of GPUs that NVLink sums for


class Communicators:
    """Of one rank. Sequence of calls, each on all ranks or none: `examine`, `tear_down`, `make`,
    `agree`. The last two are right at any time: they undo what was done."""

    def __init__(self, place: Callable[[], Sequence[int]]) -> None:
        """`place`: where in training this rank is; the same on all."""
        self._place = place
        self._torn: Torn | None = None
        self._slots: list[Slot] = []
        self._times = 0

    @property
    def is_whole(self) -> bool:
        """Whether the groups are there."""
        return self._torn is None

    @property
    def is_needed(self) -> bool:
        """Whether this rank has a group that cannot be in a dump."""
        return groups.must_be_torn_down()

    def examine(self) -> None:
        """Find out whether all of them can be taken down and made again.

        Raises:
            SaveFailed: no; says what is against it.
        """
        if why := groups.why_not() or why_not_nvls() or group_holders.why_not(groups.groups()):
            raise SaveFailed(f"communicators cannot be in a dump, nor be taken down: {why}")
        groups.specs()  # what cannot be read is found now, while nothing has been touched

    def tear_down(self) -> None:
        """Take them down, whatever their backends.

        Raises:
            SaveFailed: somebody still holds one.
        """
        self._times += 1  # on all ranks alike, whatever fails
        held = groups.groups()
        self._slots = group_holders.slots(held)
        old = [weakref.ref(group) for group in held]
        self._torn = groups.noted()  # first: what is destroyed by half is made again
        groups.tear_down()
        group_holders.fill(self._slots, [groups.placeholder() for _ in held])
        del held
        gc.collect()
        if any(group() is not None for group in old):
            raise SaveFailed("a process group was destroyed, and something still holds it")

    def make(self) -> None:
        """The same groups again, where the old ones were; nothing to do if they are there."""
        if self._torn is not None:
            group_holders.fill(self._slots, groups.make(self._torn, self._times))
            self._torn, self._slots = None, []

    def agree(self) -> None:
        """Return once all ranks have used them.

        Raises:
            NoAgreement: they do not work, or the ranks are not where they were.
        """
        groups.agree(self._place(), WITHIN_S)


def why_not_nvls(environment: Any = os.environ) -> str:
    """Why CUDA would be of no use after a restore, or "".

    Reported by others: once NCCL has had the NVLink switch sum for it, every call fails after a
    restore, even though all communicators were gone. It has to be off from the job's start.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return ""
    if torch.distributed.get_world_size() == 1 or environment.get(NVLS) == "0":
        return ""
    if torch.cuda.get_device_capability()[0] < FIRST_WITH_NVLS:
        return ""
    return f"NCCL may use NVLS; launch with {NVLS}=0 trainckpt run ..."

"""Destroy process groups before a dump, and make them again after it.

Only if a group cannot be in a dump, as NCCL's cannot. Meanwhile their holders have a placeholder:
nothing trains then, and this package's own keys are in the store, which stays.
"""

from __future__ import annotations

import gc
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import SaveFailed
from trainckpt.process_dump.gpu_state import NVLS
from trainckpt.ranks import process_groups
from trainckpt.state import process_group_refs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.ranks.process_groups import DestroyedGroups
    from trainckpt.state.process_group_refs import GroupReference

WITHIN_S = 120.0  # for all ranks to have come to the first collective
FIRST_WITH_NVLS = 9  # compute capability of GPUs with sums in NVLink


class Communicators:
    """Process groups of one rank around a dump.

    Sequence of calls, each on all ranks or none: `examine`, `tear_down`, `make`, `agree`. The last
    two may be called at any time: they undo the earlier calls.
    """

    def __init__(self, position: Callable[[], Sequence[int]]) -> None:
        """Store `position`, which returns this rank's position in training; the same on all."""
        self._position = position
        self._torn: DestroyedGroups | None = None
        self._slots: list[GroupReference] = []
        self._times = 0

    @property
    def is_whole(self) -> bool:
        """Return True if the groups exist."""
        return self._torn is None

    @property
    def is_needed(self) -> bool:
        """Return True if this rank has a group that cannot be in a dump."""
        return process_groups.must_be_torn_down()

    def examine(self) -> None:
        """Check that all groups can be destroyed and made again.

        Raises:
            SaveFailed: they cannot; names the obstacle.
        """
        if (
            why := process_groups.why_not()
            or why_not_nvls()
            or process_group_refs.why_not(process_groups.groups())
        ):
            raise SaveFailed(f"communicators cannot be in a dump, nor be taken down: {why}")
        process_groups.specs()  # find unreadable settings now, while nothing has been touched

    def tear_down(self) -> None:
        """Destroy the groups, whatever their backends.

        Raises:
            SaveFailed: a group is still referenced.
        """
        self._times += 1  # on all ranks alike, whatever fails
        held = process_groups.groups()
        self._slots = process_group_refs.slots(held)
        old = [weakref.ref(group) for group in held]
        self._torn = process_groups.noted()  # first: groups destroyed in part can be made again
        process_groups.tear_down()
        process_group_refs.fill(self._slots, [process_groups.placeholder() for _ in held])
        del held
        gc.collect()
        if any(group() is not None for group in old):
            raise SaveFailed("a process group was destroyed, and something still holds it")

    def make(self) -> None:
        """Make the groups again in place of the old ones; nothing to do if they exist."""
        if self._torn is not None:
            process_group_refs.fill(self._slots, process_groups.make(self._torn, self._times))
            self._torn, self._slots = None, []

    def agree(self) -> None:
        """Return once all ranks have used them.

        Raises:
            NoAgreement: they do not work, or the ranks are not where they were.
        """
        process_groups.agree(self._position(), WITHIN_S)


def why_not_nvls(environment: Any = os.environ) -> str:
    """Return why CUDA would be unusable after a restore, or "".

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

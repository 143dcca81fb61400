"""The processes of one tree that use GPUs, as `dump` and `restore` handle them.

    of_tree      asked before a dump: None where there is no GPU, or why it cannot be
    set_aside    before CRIU: nothing of a GPU is left in the tree, or all go on
    put_back     after it, and after a restore

Between the two the processes live, and wait as soon as they call CUDA. One that waits for its GPU
with a bare synchronization just then is known to crash inside the driver; it is found dead, and
there is no dump.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format.dump import Gpu, GpuState
from trainckpt.process_dump import gpu_signs, gpus
from trainckpt.process_dump.gpus import CallFailed, GpusLost, Signs
from trainckpt.tiers import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.process_dump.cuda_driver import CudaDriver
    from trainckpt.process_dump.gpus import Machine

LOCK_WITHIN_S = 30.0
SPARE = 1.1  # of host memory, over what is on the GPUs
MOST_REASONS = 5


@dataclass
class GpuTree:
    """One tree.

    Attributes:
        driver: Who does it.
        pids: The whole tree, parents first.
        state: What is on which GPUs, and of which processes.
        lock_within_s: For all locks together.
        holders: Tells which processes have a GPU's device file.
        why_not_now: What has to end before, though it is no obstacle for good, or "".
    """

    driver: CudaDriver
    pids: Sequence[int]
    state: GpuState
    lock_within_s: float = LOCK_WITHIN_S
    holders: Callable[[Sequence[int]], list[int]] = gpu_signs.holders
    why_not_now: str = ""

    def set_aside(self) -> None:
        """See `gpus.set_aside`."""
        gpus.set_aside(self.driver, self.state.pids, self.lock_within_s)
        try:
            self._must_hold_none()
            self.must_live()
        except BaseException:
            self.put_back()
            raise

    def must_live(self) -> None:
        """Refuse where a process did not survive it."""
        if dead := gpu_signs.gone(self.state.pids):
            raise SaveFailed(f"process {dead[0]} died while its GPU state was set aside")

    def _must_hold_none(self) -> None:
        if still := self.holders(self.pids):
            raise SaveFailed(
                f"process {still[0]} still holds a GPU; was it forked from one that does, or has "
                "it NVML open?",
                hint='DataLoader(multiprocessing_context="spawn"); and a dump at a boundary, '
                "pause --dump, shuts NVML down before",
            )

    def put_back(self, *, together: bool = False) -> None:
        """See `gpus.put_back`.

        Raises:
            GpusLost: some cannot go on.
        """
        left = gpus.put_back(self.driver, self.state.pids, together=together)
        if left.states:
            raise GpusLost(f"GPU state cannot be put back: {left}", left.states)


def of_tree(
    pids: Sequence[int],
    driver: CudaDriver,
    look: Callable[[Sequence[int]], list[Signs]] = gpu_signs.look,
    lock_within_s: float = LOCK_WITHIN_S,
    *,
    will_rest: bool = False,
) -> GpuTree | None:
    """What of these processes is on GPUs; None: nothing is.

    Args:
        pids: The tree.
        driver: Asked only where there are signs of a GPU.
        look, lock_within_s, will_rest: See `gpu_signs`, `GpuTree` and `gpus.why_not`.

    Raises:
        SaveFailed: it cannot be set aside; says all that is against it.
    """
    signs = look(pids)
    if not signs:
        return None
    machine = driver.machine()
    reasons = gpus.why_not(machine, signs, will_rest=will_rest)
    if not reasons:
        try:
            users = driver.users([each.pid for each in signs])
        except CallFailed as error:
            reasons = [str(error)]
        else:
            state = _state(machine, users)
            reasons = [why] if (why := _why_no_room(state, users)) else []
    if reasons:
        _, cure = gpus.why_not_here(machine)
        raise SaveFailed(
            f"it holds a GPU: {'; '.join(reasons[:MOST_REASONS])}",
            hint=cure or gpus.ONLY_SNAPSHOTS,
        )
    driver.will_move(state.num_bytes)
    now = next(filter(None, map(gpus.why_not_communicating, signs)), "")
    return GpuTree(driver, pids, state, lock_within_s, why_not_now=now)


def of_record(state: GpuState, driver: CudaDriver) -> GpuTree:
    """What lies in a dump, to be put back.

    Raises:
        UnusableSnapshot: the GPUs or their driver are others, or have no room.
    """
    if why := gpus.why_not_again(state, driver.machine()):
        raise UnusableSnapshot(why, hint=gpus.ONLY_SNAPSHOTS)
    driver.will_move(state.num_bytes)
    return GpuTree(driver, state.pids, state)


def _state(machine: Machine, users: Sequence[int]) -> GpuState:
    used = {gpu.uuid: machine.used_bytes(gpu.uuid, users) for gpu in machine.devices}
    if not any(used.values()):  # in a container the driver may know other numbers than we do
        used = {gpu.uuid: gpu.total_bytes - gpu.free_bytes for gpu in machine.devices}
    devices = tuple(Gpu(gpu.name, gpu.uuid, used[gpu.uuid]) for gpu in machine.devices)
    return GpuState(machine.driver, devices, tuple(users))


def _why_no_room(state: GpuState, users: Sequence[int]) -> str:
    free = min((host_memory.left_bytes(pid) or 0 for pid in users), default=0)
    needed = int(SPARE * state.num_bytes)
    if users and needed > free:
        return f"{needed >> 20} MB of the host's memory are needed, {free >> 20} MB are free"
    return ""

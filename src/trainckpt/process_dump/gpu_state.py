"""GPU state of a process tree: set aside in host memory before CRIU, put back afterwards.

    of_tree      before a dump: None without GPU use; refuses if GPU state cannot be saved
    set_aside    before CRIU: afterwards no process holds a GPU; on failure all run on
    put_back     after CRIU, and after a restore

NVIDIA's driver moves the state from outside, one process at a time:

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING

A locked process stands still, and others may wait for it on their GPU. So all are locked before any
is checkpointed, and all are restored before any is unlocked. Every lock has a limit: without one it
could wait for kernels waiting for a process locked already.

A failure is undone in the same order, by each state the driver reports. A failed call may have done
its work, or half of it. A call not fitting a process's state has no effect, so for an unknown state
both calls are tried.

In between, processes are alive but block in any CUDA call. A process then in a bare synchronization
is known to crash inside the driver; it is found dead, and there is no dump.

Before that, `look` reads signs in /proc: device files, NCCL, a signal's stop. They prove nothing.
Managed memory is invisible there: every process using CUDA maps /dev/nvidia-uvm. So is memory
shared by CUDA's own handles. The driver refuses to checkpoint both (`set_aside`).
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format.dump import Gpu, GpuState
from trainckpt.process_dump.process_tree import GPU_FILES
from trainckpt.storage import host_resources

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from trainckpt.process_dump.cuda_driver import CudaDriver


PROC = Path("/proc")
# torch runs such a thread for the lifetime of each NCCL process group.
NCCL_THREADS = ("pt_nccl_watchdg", "pt_nccl_heartbt")
NVLS = "NCCL_NVLS_ENABLE"  # a dump cannot be restored with the NVLink switch in use
STOPPED, GONE = "Tt", "ZX"


@dataclass(frozen=True)
class GpuUsage:
    """GPU signs of one process in /proc."""

    pid: int
    holds: bool = False  # it has a device file of NVIDIA's open or mapped
    nccl: bool = False  # it has an NCCL communicator made by torch
    stopped: bool = False  # a signal has stopped it; the driver would wait for ever


def look(pids: Iterable[int]) -> list[GpuUsage]:
    """Return the GPU signs of the processes with any GPU."""
    return [usage for pid in pids if (usage := of(pid)).holds]


def of(pid: int) -> GpuUsage:
    """Return the GPU signs of one process."""
    return GpuUsage(
        pid,
        holds=_holds(pid),
        nccl=any(name in NCCL_THREADS for name in _threads(pid)),
        stopped=_process_state(pid) in STOPPED,
    )


def holders(pids: Iterable[int]) -> list[int]:
    """Return the processes with a GPU's device file open or mapped."""
    return [pid for pid in pids if _holds(pid)]


def gone(pids: Iterable[int]) -> list[int]:
    """Return the ended processes."""
    return [pid for pid in pids if _process_state(pid) in GONE]


def _holds(pid: int) -> bool:
    folder = PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):  # noqa: PTH208 - thousands of them
            with contextlib.suppress(OSError):
                if os.readlink(folder / number).startswith(GPU_FILES):  # noqa: PTH115 - a text
                    return True
    with contextlib.suppress(OSError):
        maps = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
        return any(line[line.find("/") :].startswith(GPU_FILES) for line in maps.splitlines())
    return False


def _threads(pid: int) -> list[str]:
    thread_names = []
    with contextlib.suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                thread_names.append(
                    (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
                )
    return thread_names


def _process_state(pid: int) -> str:
    """Return the state letter in /proc's stat; "X" for a missing process."""
    with contextlib.suppress(OSError, IndexError):
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[0]
    return "X"


RUNNING, LOCKED, CHECKPOINTED, UNKNOWN = "RUNNING", "LOCKED", "CHECKPOINTED", "not known"
TRIES = 2  # per undo call: the second one gets past a passing failure
LEAST_LOCK_MS = 1  # 0 means no limit to the driver
LEAST_DRIVER = 570  # first version with these calls
MOST_NAMED = 5
NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
INSTALL = 'pip install "trainckpt[gpu]"'
ONLY_SNAPSHOTS = "this run is saved by snapshots"


class CallFailed(Exception):
    """One call to the driver failed.

    Attributes:
        code: The driver's, "CUDA_ERROR_NOT_READY", or the reason for a missing answer.
    """

    def __init__(self, call: str, pid: int, code: str) -> None:
        super().__init__(f"{call} of process {pid}: {code}")
        self.code = code


class GpusLost(SaveFailed):
    """Processes with GPU state set aside that cannot be put back; they cannot run on.

    Attributes:
        pids: The processes; the caller has to end them.
    """

    def __init__(self, message: str, pids: Collection[int]) -> None:
        super().__init__(message, hint="trainckpt resume goes on from the newest snapshot")
        self.pids = tuple(pids)


@dataclass(frozen=True)
class UnrestoredProcesses:
    """Processes an undo left in another state than RUNNING."""

    states: dict[int, str]  # process -> its state
    problems: tuple[str, ...]  # failures on the way, in words

    def __str__(self) -> str:
        sentences = [f"process {pid} is {state}" for pid, state in self.states.items()]
        return "; ".join([*sentences, *self.problems[:MOST_NAMED]])


def set_aside(driver: CudaDriver, pids: Sequence[int], lock_within_s: float) -> None:
    """Bring all processes to CHECKPOINTED, or leave all as they were.

    `lock_within_s` limits all locks together.

    Raises:
        SaveFailed: it failed, and all processes run on.
        GpusLost: undoing it failed too, for some.
    """
    deadline = time.monotonic() + lock_within_s
    try:
        for pid in pids:
            if (state := driver.state(pid)) != RUNNING:
                raise SaveFailed(f"process {pid} is {state} already, by another program's hand")
        try:
            for pid in pids:
                left_ms = int(1000 * (deadline - time.monotonic()))
                driver.lock(pid, max(left_ms, LEAST_LOCK_MS))
            for pid in pids:
                driver.checkpoint(pid)
        except BaseException as error:
            unrestored = put_back(driver, pids)
            if unrestored.states:
                raise GpusLost(
                    f"GPU state that was set aside cannot be put back: {unrestored}",
                    unrestored.states,
                ) from error
            raise
    except CallFailed as error:
        message = f"the GPU state could not be set aside: {error}"
        if error.code == NOT_SUPPORTED:
            message += (
                " (the driver does not set aside managed memory, nor memory that processes "
                "share by CUDA's handles)"
            )
        raise SaveFailed(message, hint=ONLY_SNAPSHOTS) from error


def put_back(
    driver: CudaDriver, pids: Sequence[int], *, together: bool = False
) -> UnrestoredProcesses:
    """Bring all processes to RUNNING, from any state; return those in another one, and failures.

    `together`: unlock none unless all were restored.
    """
    problems: list[str] = []
    _until_none(driver, pids, CHECKPOINTED, driver.restore, problems)
    if not (together and _not_in(driver, pids, (RUNNING, LOCKED), problems)):
        _until_none(driver, pids, LOCKED, driver.unlock, problems)
    return UnrestoredProcesses(_not_in(driver, pids, (RUNNING,), problems), tuple(problems))


def _until_none(
    driver: CudaDriver,
    pids: Sequence[int],
    state: str,
    call: Callable[[int], None],
    problems: list[str],
) -> None:
    """Call `call` for every process in this state, and again after a failure."""
    for _ in range(TRIES):
        pending = [pid for pid in pids if _driver_state(driver, pid, problems) in (state, UNKNOWN)]
        if not pending:
            return
        for pid in pending:
            try:
                call(pid)
            except CallFailed as error:
                problems.append(str(error))


def _driver_state(driver: CudaDriver, pid: int, problems: list[str]) -> str:
    for _ in range(TRIES):
        try:
            return driver.state(pid)
        except CallFailed as error:
            problems.append(str(error))
    return UNKNOWN


def _not_in(
    driver: CudaDriver, pids: Iterable[int], states: Collection[str], problems: list[str]
) -> dict[int, str]:
    states_by_pid = {pid: _driver_state(driver, pid, problems) for pid in pids}
    return {pid: state for pid, state in states_by_pid.items() if state not in states}


# ---- checks before any change


@dataclass(frozen=True)
class Device:
    """One GPU: its name and UUID, total and free bytes, and True for `divided` with MIG."""

    name: str
    uuid: str
    total_bytes: int = 0
    free_bytes: int = 0
    divided: bool = False


@dataclass(frozen=True)
class Machine:
    """The driver's report of this machine."""

    driver: str = ""  # its version, "580.65.06"
    devices: tuple[Device, ...] = ()  # GPUs, in the driver's order
    # (process, UUID, bytes) for each GPU a process uses
    used: tuple[tuple[int, str, int], ...] = ()
    shared: tuple[int, ...] = ()  # processes using GPUs through MPS
    persistent: bool = True  # persistence mode is on, on every GPU
    why_not: str = ""  # reason against setting GPU state aside here, or ""
    cure: str = ""  # command or setting to cure it

    def used_bytes(self, uuid: str, pids: Collection[int]) -> int:
        """Return these processes' bytes on one GPU, as far as the driver reports them."""
        return sum(
            size for pid, device_uuid, size in self.used if device_uuid == uuid and pid in pids
        )


def why_not_here(machine: Machine) -> tuple[str, str]:
    """Return the reason against setting GPU state aside on this machine, and the cure. Pure."""
    if machine.why_not:
        return machine.why_not, machine.cure
    major = machine.driver.partition(".")[0]
    if not major.isdecimal() or int(major) < LEAST_DRIVER:
        return (
            f"NVIDIA's driver is {machine.driver or 'not known'}, {LEAST_DRIVER} is needed",
            f"install driver {LEAST_DRIVER} or later; 580 is the best known",
        )
    if divided := [device.name for device in machine.devices if device.divided]:
        return f"{divided[0]} is divided (MIG)", "nvidia-smi -mig 0, or rely on snapshots"
    return "", ""


def why_not(machine: Machine, signs: Sequence[GpuUsage], *, will_rest: bool = False) -> list[str]:
    """Return the reasons against setting these processes' GPU state aside, one sentence each. Pure.

    `will_rest`: the ranks will destroy their communicators first.
    """
    machine_reason, _ = why_not_here(machine)
    reasons = [machine_reason] if machine_reason else []
    for usage in signs:
        if usage.nccl and not will_rest:
            reasons.append(_has_communicator(usage))
        if usage.stopped:
            reasons.append(f"process {usage.pid} is stopped by a signal")
        if usage.pid in machine.shared:
            reasons.append(f"process {usage.pid} uses its GPU through MPS")
    return reasons


def _has_communicator(signs: GpuUsage) -> str:
    return f"process {signs.pid} has a live NCCL communicator"


def why_not_again(recorded: GpuState, machine: Machine) -> str:
    """Return the reason against putting GPU state back on this machine, or "". Pure.

    Checked first, because a restore without enough memory leaves a process beyond repair.
    """
    machine_reason, _ = why_not_here(machine)
    if machine_reason:
        return machine_reason
    if recorded.driver != machine.driver:
        return f"NVIDIA's driver was {recorded.driver}, this is {machine.driver}"
    recorded_gpus = [(gpu.name, gpu.uuid) for gpu in recorded.devices]
    present_gpus = [(device.name, device.uuid) for device in machine.devices]
    if recorded_gpus != present_gpus:
        return f"the GPUs were {_named(recorded_gpus)}; these are {_named(present_gpus)}"
    for gpu, device in zip(recorded.devices, machine.devices, strict=True):
        if device.free_bytes < gpu.used_bytes:
            return (
                f"{gpu.uuid} has {device.free_bytes >> 20} MB free, "
                f"{gpu.used_bytes >> 20} MB are needed"
            )
    return ""


def _named(gpus: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {uuid}" for name, uuid in gpus[:MOST_NAMED]) or "none"


LOCK_WITHIN_S = 30.0
SPARE = 1.1  # needed host memory / bytes on the GPUs
MOST_REASONS = 5


@dataclass
class GpuTree:
    """GPU state of one process tree."""

    driver: CudaDriver  # the driver
    pids: Sequence[int]  # the whole tree, parents first
    state: GpuState  # bytes per GPU, and the processes using GPUs
    lock_within_s: float = LOCK_WITHIN_S  # limit in seconds for all locks together
    # returns the processes with a GPU's device file
    holders: Callable[[Sequence[int]], list[int]] = holders
    why_not_now: str = ""  # a passing obstacle, such as a live communicator, or ""

    def set_aside(self) -> None:
        """Set the GPU state aside and check the result; see the function `set_aside`."""
        set_aside(self.driver, self.state.pids, self.lock_within_s)
        try:
            self._must_hold_none()
            self.must_live()
        except BaseException:
            self.put_back()
            raise

    def must_live(self) -> None:
        """Raise `SaveFailed` if a process has died meanwhile."""
        if dead := gone(self.state.pids):
            raise SaveFailed(f"process {dead[0]} died while its GPU state was set aside")

    def _must_hold_none(self) -> None:
        if holding_pids := self.holders(self.pids):
            raise SaveFailed(
                f"process {holding_pids[0]} still holds a GPU; was it forked from one that does, "
                "or has it NVML open?",
                hint='DataLoader(multiprocessing_context="spawn"); and a dump at a boundary, '
                "pause --dump, shuts NVML down before",
            )

    def put_back(self, *, together: bool = False) -> None:
        """Put the GPU state back; see the function `put_back`.

        Raises:
            GpusLost: some processes cannot run on.
        """
        unrestored = put_back(self.driver, self.state.pids, together=together)
        if unrestored.states:
            raise GpusLost(f"GPU state cannot be put back: {unrestored}", unrestored.states)


def of_tree(
    pids: Sequence[int],
    driver: CudaDriver,
    look: Callable[[Sequence[int]], list[GpuUsage]] = look,
    lock_within_s: float = LOCK_WITHIN_S,
    *,
    will_rest: bool = False,
) -> GpuTree | None:
    """Return the GPU state of a tree; None if /proc shows no sign of any.

    Raises:
        SaveFailed: it cannot be set aside, with all reasons.
    """
    usages = look(pids)
    if not usages:
        return None
    machine = driver.machine()
    reasons = why_not(machine, usages, will_rest=will_rest)
    if not reasons:
        try:
            users = driver.users([usage.pid for usage in usages])
        except CallFailed as error:
            reasons = [str(error)]
        else:
            state = _gpu_state(machine, users)
            reasons = [reason] if (reason := _why_no_room(state, users)) else []
    if reasons:
        _, cure = why_not_here(machine)
        raise SaveFailed(
            f"it holds a GPU: {'; '.join(reasons[:MOST_REASONS])}",
            hint=cure or ONLY_SNAPSHOTS,
        )
    driver.will_move(state.num_bytes)
    why_not_now = next((_has_communicator(usage) for usage in usages if usage.nccl), "")
    return GpuTree(driver, pids, state, lock_within_s, why_not_now=why_not_now)


def of_record(state: GpuState, driver: CudaDriver) -> GpuTree:
    """Return a dump's GPU state, to be put back.

    Raises:
        UnusableSnapshot: other GPUs, another driver, or not enough memory.
    """
    if reason := why_not_again(state, driver.machine()):
        raise UnusableSnapshot(reason, hint=ONLY_SNAPSHOTS)
    driver.will_move(state.num_bytes)
    return GpuTree(driver, state.pids, state)


def _gpu_state(machine: Machine, users: Sequence[int]) -> GpuState:
    used_bytes = {gpu.uuid: machine.used_bytes(gpu.uuid, users) for gpu in machine.devices}
    if not any(used_bytes.values()):  # in a container the driver may use other process ids
        used_bytes = {gpu.uuid: gpu.total_bytes - gpu.free_bytes for gpu in machine.devices}
    devices = tuple(Gpu(gpu.name, gpu.uuid, used_bytes[gpu.uuid]) for gpu in machine.devices)
    return GpuState(machine.driver, devices, tuple(users))


def _why_no_room(state: GpuState, users: Sequence[int]) -> str:
    free_bytes = min((host_resources.free_bytes(pid) or 0 for pid in users), default=0)
    needed_bytes = int(SPARE * state.num_bytes)
    if users and needed_bytes > free_bytes:
        needed, free = needed_bytes >> 20, free_bytes >> 20
        return f"{needed} MB of the host's memory are needed, {free} MB are free"
    return ""

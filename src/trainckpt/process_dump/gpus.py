"""GPU state of a tree of processes: set aside in host memory before CRIU, put back after it.

NVIDIA's driver does that from outside, to one process at a time:

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING

A locked process stands still, and others may wait for it on their GPU. So all of a tree are locked
before any is checkpointed, and all are restored before any is unlocked. Every lock has a limit:
without one it waits for kernels that may wait for a process which is locked already.

Whatever fails is undone in that order too, by what the driver says of each process, not by what we
believe to have done: a call that failed may have done its work, or half of it. A call that does not
fit a process's state has no effect, so where the state cannot be had both are tried.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainckpt.errors import SaveFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from trainckpt.format.dump import GpuState

RUNNING, LOCKED, CHECKPOINTED, FAILED, UNKNOWN = (
    "RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "not known",
)  # fmt: skip
TRIES = 2  # of an undo: a second one heals what only failed in passing
LEAST_LOCK_MS = 1  # to the driver 0 means for ever
LEAST_DRIVER = 570  # since then it has these calls
MOST_NAMED = 5
NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
INSTALL = 'pip install "trainckpt[gpu]"'
ONLY_SNAPSHOTS = "this run is saved by snapshots"


class CallFailed(Exception):
    """One call to the driver failed.

    Attributes:
        code: The driver's, "CUDA_ERROR_NOT_READY", or what happened instead of an answer.
    """

    def __init__(self, call: str, pid: int, code: str) -> None:
        super().__init__(f"{call} of process {pid}: {code}")
        self.code = code


class Driver(Protocol):
    """NVIDIA's driver; each call raises `CallFailed`."""

    def state(self, pid: int) -> str:
        """`RUNNING`, `LOCKED`, `CHECKPOINTED` or `FAILED`."""

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Wait for its work on the GPU, and let it begin none; RUNNING if that takes too long."""

    def checkpoint(self, pid: int) -> None:
        """Take what it has on GPUs into its own memory, and let go of them."""

    def restore(self, pid: int) -> None:
        """Put it back."""

    def unlock(self, pid: int) -> None:
        """Let it go on."""


class GpusLost(SaveFailed):
    """Processes that cannot go on: their GPU state was set aside and cannot be put back.

    Attributes:
        pids: Which. Whoever called has to end them.
    """

    def __init__(self, message: str, pids: Collection[int]) -> None:
        super().__init__(message, hint="trainckpt resume goes on from the newest snapshot")
        self.pids = tuple(pids)


@dataclass(frozen=True)
class Left:
    """What an undo could not do.

    Attributes:
        states: Process -> its state, of those that are not RUNNING.
        problems: What failed on the way, in words.
    """

    states: dict[int, str]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        told = [f"process {pid} is {state}" for pid, state in self.states.items()]
        return "; ".join([*told, *self.problems[:MOST_NAMED]])


def set_aside(driver: Driver, pids: Sequence[int], lock_within_s: float) -> None:
    """All processes CHECKPOINTED, or as they were.

    Args:
        driver, pids: Who does it, to whom.
        lock_within_s: For all locks together.

    Raises:
        SaveFailed: it cannot be done, and all go on.
        GpusLost: nor could it be undone for some.
    """
    until = time.monotonic() + lock_within_s
    try:
        for pid in pids:
            if (state := driver.state(pid)) != RUNNING:
                raise SaveFailed(f"process {pid} is {state} already, by another program's hand")
        try:
            for pid in pids:
                left_ms = int(1000 * (until - time.monotonic()))
                driver.lock(pid, max(left_ms, LEAST_LOCK_MS))
            for pid in pids:
                driver.checkpoint(pid)
        except BaseException:
            _undo(driver, pids)
            raise
    except CallFailed as error:
        why = f"the GPU state could not be set aside: {error}"
        if error.code == NOT_SUPPORTED:
            why += (" (the driver does not set aside managed memory, nor memory that processes "
                    "share by CUDA's handles)")  # fmt: skip
        raise SaveFailed(why, hint=ONLY_SNAPSHOTS) from error


def _undo(driver: Driver, pids: Sequence[int]) -> None:
    left = put_back(driver, pids)
    if left.states:
        raise GpusLost(f"GPU state that was set aside cannot be put back: {left}", left.states)


def put_back(driver: Driver, pids: Sequence[int], *, together: bool = False) -> Left:
    """All processes RUNNING again, from whatever state they are in.

    Args:
        driver, pids: Who does it, to whom.
        together: Unlock none unless all were restored.

    Returns:
        Who is not, and all that failed.
    """
    problems: list[str] = []
    _until_none(driver, pids, CHECKPOINTED, driver.restore, problems)
    if not (together and _not_in(driver, pids, (RUNNING, LOCKED), problems)):
        _until_none(driver, pids, LOCKED, driver.unlock, problems)
    return Left(_not_in(driver, pids, (RUNNING,), problems), tuple(problems))


def _until_none(
    driver: Driver,
    pids: Sequence[int],
    state: str,
    call: Callable[[int], None],
    problems: list[str],
) -> None:
    """Call it for every process in this state, and again where it failed."""
    for _ in range(TRIES):
        found = [pid for pid in pids if _state(driver, pid, problems) in (state, UNKNOWN)]
        if not found:
            return
        for pid in found:
            try:
                call(pid)
            except CallFailed as error:
                problems.append(str(error))


def _state(driver: Driver, pid: int, problems: list[str]) -> str:
    for _ in range(TRIES):
        try:
            return driver.state(pid)
        except CallFailed as error:
            problems.append(str(error))
    return UNKNOWN


def _not_in(
    driver: Driver, pids: Iterable[int], states: Collection[str], problems: list[str]
) -> dict[int, str]:
    found = {pid: _state(driver, pid, problems) for pid in pids}
    return {pid: state for pid, state in found.items() if state not in states}


# ---- what is known before anything is touched


@dataclass(frozen=True)
class Signs:
    """What /proc shows of one process.

    Attributes:
        holds: It has a device file of NVIDIA's open or mapped.
        nccl: It has a communicator of NCCL's, as torch makes them.
        stopped: By a signal, where the driver would wait for ever.
    """

    pid: int
    holds: bool = False
    nccl: bool = False
    stopped: bool = False


@dataclass(frozen=True)
class Device:
    """One GPU: its name and UUID, bytes in all and free, and whether it is divided (MIG)."""

    name: str
    uuid: str
    total_bytes: int = 0
    free_bytes: int = 0
    divided: bool = False


@dataclass(frozen=True)
class Machine:
    """What the driver says of this machine.

    Attributes:
        driver: Its version, "580.65.06".
        devices: The GPUs that it knows, in its order.
        used: Process -> (UUID, bytes) for each GPU that it uses.
        shared: Processes that use them through MPS.
        persistent: Persistence mode is on, on all of them.
        why_not: Why nothing can be set aside here, or "".
        cure: What to type then.
    """

    driver: str = ""
    devices: tuple[Device, ...] = ()
    used: tuple[tuple[int, str, int], ...] = ()
    shared: tuple[int, ...] = ()
    persistent: bool = True
    why_not: str = ""
    cure: str = ""

    def used_bytes(self, uuid: str, pids: Collection[int]) -> int:
        """What these processes have on one GPU, as far as the driver tells."""
        return sum(size for pid, where, size in self.used if where == uuid and pid in pids)


def why_not_here(machine: Machine) -> tuple[str, str]:
    """Why no GPU state can be set aside on this machine, and the cure. Pure."""
    if machine.why_not:
        return machine.why_not, machine.cure
    major = machine.driver.partition(".")[0]
    if not major.isdecimal() or int(major) < LEAST_DRIVER:
        return (f"NVIDIA's driver is {machine.driver or 'not known'}, {LEAST_DRIVER} is needed",
                f"install driver {LEAST_DRIVER} or later; 580 is the best known")  # fmt: skip
    if divided := [device.name for device in machine.devices if device.divided]:
        return f"{divided[0]} is divided (MIG)", "nvidia-smi -mig 0, or rely on snapshots"
    return "", ""


def why_not(machine: Machine, signs: Sequence[Signs], *, will_rest: bool = False) -> list[str]:
    """Why these processes' GPU state cannot be set aside: a sentence each. Pure.

    Args:
        machine, signs: What was found.
        will_rest: The ranks will take their communicators down before.
    """
    here, _ = why_not_here(machine)
    found = [here] if here else []
    for each in signs:
        who = f"process {each.pid}"
        if each.nccl and not will_rest:
            found.append(why_not_communicating(each))
        if each.stopped:
            found.append(f"{who} is stopped by a signal")
        if each.pid in machine.shared:
            found.append(f"{who} uses its GPU through MPS")
    return found


def why_not_communicating(signs: Signs) -> str:
    """What a communicator is in the way of, or ""."""
    return f"process {signs.pid} has a live NCCL communicator" if signs.nccl else ""


def why_not_again(recorded: GpuState, machine: Machine) -> str:
    """Why GPU state that was set aside cannot be put back on this machine, or "". Pure.

    A restore for which memory is lacking leaves a process that can never be restored, so that is
    asked before.
    """
    here, _ = why_not_here(machine)
    if here:
        return here
    if recorded.driver != machine.driver:
        return f"NVIDIA's driver was {recorded.driver}, this is {machine.driver}"
    was = [(gpu.name, gpu.uuid) for gpu in recorded.devices]
    found = [(device.name, device.uuid) for device in machine.devices]
    if was != found:
        return f"the GPUs were {_named(was)}; these are {_named(found)}"
    for gpu, device in zip(recorded.devices, machine.devices, strict=True):
        if device.free_bytes < gpu.used_bytes:
            return (f"{gpu.uuid} has {device.free_bytes >> 20} MB free, "
                    f"{gpu.used_bytes >> 20} MB are needed")  # fmt: skip
    return ""


def _named(gpus: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {uuid}" for name, uuid in gpus[:MOST_NAMED]) or "none"

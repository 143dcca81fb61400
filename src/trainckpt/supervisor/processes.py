"""Processes of this host: who lives, who descends from whom, and an end to all of them.

torchrun puts its ranks into sessions of their own, so the members of a launch are found by their
parents, and orphans by the variable that they inherited. Where there is no /proc (macOS) a process
lives if it can be signalled, and only the launched process's own group can be ended.

Nothing here raises for a process that is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.living import ENDED, lives
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE, namespace_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.supervisor.adopted import Process

PROC = Path("/proc")
HAS_PROC = (PROC / "self" / "stat").exists()
KILL_ROUNDS, KILL_ROUND_S = 50, 0.02
QUIET_ROUNDS = 2  # without any: what is just being executed has no environment for a moment
CLOCKS_DIFFER_S = 1.0


def started(pid: int) -> int | None:
    """When a living process was started, in the kernel's ticks: with its id, its identity."""
    if not HAS_PROC:
        return 0 if lives(pid) else None
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ENDED else None


def is_ours(pid: int, folder: str, told_at: float) -> bool:
    """Whether the living process `pid` is the one that told us of itself at that time.

    A number can be given to another process. Programs that set their title overwrite the
    environment that /proc shows; then the time of their start has to do.
    """
    if not HAS_PROC:
        return True
    mark = environment(pid).get(SUPERVISOR_VARIABLE)
    if mark is not None:
        return mark == folder
    ticks = started(pid)
    if ticks is None or pid <= 1:  # who launches others is none of the ranks
        return False
    booted = next(
        (float(line.split()[1]) for line in (PROC / "stat").read_text().splitlines()
         if line.startswith("btime")), 0.0,
    )  # fmt: skip
    return booted + ticks / os.sysconf("SC_CLK_TCK") <= told_at + CLOCKS_DIFFER_S


def seen_from_here(number: int, namespace: str, ancestor: int) -> int | None:
    """The living descendant of `ancestor` that has this number in that namespace of numbers."""
    parents = {pid: int(fields[1]) for pid, fields in _everybody()}
    for pid in parents:
        above = pid
        while above > 1 and above != ancestor:
            above = parents.get(above, 0)
        if above == ancestor and _numbers(pid)[-1:] == [number] and namespace_of(pid) == namespace:
            return pid
    return None


def _numbers(pid: int) -> list[int]:
    """Of a process, in every namespace that it is in, the outermost first."""
    found = [line.split()[1:] for line in _status(pid) if line.startswith("NSpid:")]
    return [int(word) for words in found for word in words]


def environment(pid: int) -> dict[str, str]:
    """The variables a process was started with; none if that cannot be seen."""
    try:
        block = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return {name: value for name, _, value in (line.partition("=") for line in block.split("\0"))}


def children(parent: int) -> list[int]:
    """Living and ended children of a process that nobody has waited for."""
    return [pid for pid, fields in _everybody() if int(fields[1]) == parent]


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of its own for a signal, or ignores it."""
    masks = [int(line.split()[1], 16) for line in _status(pid)
             if line.startswith(("SigCgt:", "SigIgn:"))]  # fmt: skip
    return any(mask >> (number - 1) & 1 for mask in masks)


def child_above(pid: int, ancestor: int) -> int:
    """The child of `ancestor` that `pid` descends from, or is; `pid` if there is none."""
    at = pid
    while (fields := _stat(at)) and int(fields[1]) > 1:
        if int(fields[1]) == ancestor:
            return at
        at = int(fields[1])
    return pid


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(process: Process, folder: str, told: Iterable[int] = ()) -> None:
    """Kill it, all that descends from it, and all that was told to tell us of its attempt.

    Args:
        process: What was launched; it may be gone.
        folder: The value of TRAINCKPT_SUPERVISOR in its environment, or "".
        told: Ids of ranks that are known by their own word.
    """
    also = tuple(told)
    if not HAS_PROC:  # nobody else can be found
        send(also, signal.SIGKILL)
    nobody = 0
    for _ in range(KILL_ROUNDS):  # a process may be forking while the list is made
        leader = [process.pid] if process.returncode is None else []
        members = _members([*leader, *also], folder)
        send(members, signal.SIGKILL)
        nobody = 0 if members else nobody + 1
        if nobody == QUIET_ROUNDS:
            break
        time.sleep(KILL_ROUND_S)
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)


def kill_session(process: Process) -> None:
    """End the launched process and all it started, as the loss of a host would."""
    kill_all(process, environment(process.pid).get(SUPERVISOR_VARIABLE, ""))


def _members(leaders: Iterable[int], folder: str) -> list[int]:
    """Living processes that descend from `leaders`, or whose environment holds `folder`."""
    families: dict[int, list[int]] = {}
    living, queue = set(), list(leaders)
    for pid, fields in _everybody():
        families.setdefault(int(fields[1]), []).append(pid)
        if fields[0] not in ENDED:
            living.add(pid)
            if folder and environment(pid).get(SUPERVISOR_VARIABLE) == folder:
                queue.append(pid)
    found: set[int] = set()
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += families.get(pid, [])
    return sorted(found & living - {os.getpid()})


def _everybody() -> list[tuple[int, list[str]]]:
    """Every process, with the fields of its `stat` from the state on."""
    pids = (int(entry.name) for entry in PROC.glob("[0-9]*"))
    return [(pid, fields) for pid in pids if (fields := _stat(pid))]


def _status(pid: int) -> list[str]:
    """Its lines; none of a process that is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.splitlines()


def _stat(pid: int) -> list[str]:
    try:
        # A name is cut at 15 bytes, and may be no text at all.
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return stat.rpartition(")")[2].split()

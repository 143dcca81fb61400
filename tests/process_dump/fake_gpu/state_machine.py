"""NVIDIA's driver as far as setting GPU state aside goes: its states, what it refuses and how.

    RUNNING --lock--> LOCKED --checkpoint--> CHECKPOINTED --restore--> LOCKED --unlock--> RUNNING

A call that does not fit a process's state has no effect: CUDA_ERROR_ILLEGAL_STATE. A process
without CUDA is CUDA_ERROR_NOT_INITIALIZED, none at all CUDA_ERROR_OPERATING_SYSTEM. A lock that
takes longer than its limit leaves the process RUNNING: CUDA_ERROR_NOT_READY. One without a limit,
of a process that is busy for ever, never returns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

SUCCESS, ILLEGAL, NOT_READY = "CUDA_SUCCESS", "CUDA_ERROR_ILLEGAL_STATE", "CUDA_ERROR_NOT_READY"
NO_CUDA, NO_PROCESS = "CUDA_ERROR_NOT_INITIALIZED", "CUDA_ERROR_OPERATING_SYSTEM"
UNKNOWN = "CUDA_ERROR_UNKNOWN"
STEPS = {
    "lock": ("RUNNING", "LOCKED"),
    "checkpoint": ("LOCKED", "CHECKPOINTED"),
    "restore": ("CHECKPOINTED", "LOCKED"),
    "unlock": ("LOCKED", "RUNNING"),
}
BEFORE, AFTER, FATAL = "before", "after", "fatal"  # a failure: nothing done; all done; FAILED


class NeverReturns(Exception):
    """A call that hangs."""


@dataclass
class StateMachine:
    """The processes that it knows.

    Attributes:
        states: Process -> its state.
        busy: Processes with a kernel that does not end.
        refuses: (call, process) -> code, always.
        fails: Number of a call -> how it fails, once.
        calls: All that were made, with their answers.
        misordered: Where one was checkpointed while another ran, or unlocked while another was
            not restored yet.
    """

    states: dict[int, str]
    busy: tuple[int, ...] = ()
    refuses: dict[tuple[str, int], str] = field(default_factory=dict)
    fails: dict[int, str] = field(default_factory=dict)
    calls: list[tuple[str, int, str]] = field(default_factory=list)
    misordered: list[str] = field(default_factory=list)

    def call(self, name: str, pid: int, timeout_ms: int = 0) -> str:
        """Make a call; returns the driver's code."""
        others = [state for at, state in self.states.items() if at != pid]
        against = {"checkpoint": "RUNNING", "unlock": "CHECKPOINTED"}.get(name)
        if against in others and self.states.get(pid) == "LOCKED":
            self.misordered.append(f"{name} of {pid} while {self.states}")
        fails = self.fails.get(len(self.calls), "")
        if fails == FATAL and pid in self.states and name != "state":
            self.states[pid], code = "FAILED", UNKNOWN
        elif fails in (BEFORE, FATAL):
            code = UNKNOWN
        else:
            code = self._do(name, pid, timeout_ms)
            code = UNKNOWN if fails == AFTER and code == SUCCESS else code
        self.calls.append((name, pid, code))
        return code

    def _do(self, name: str, pid: int, timeout_ms: int) -> str:
        if not Path(f"/proc/{pid}").exists() and pid not in self.states:
            return NO_PROCESS
        if pid not in self.states:
            return NO_CUDA
        if name == "state":
            return SUCCESS
        before, after = STEPS[name]
        if self.states[pid] != before:
            return ILLEGAL
        if (name, pid) in self.refuses:
            return self.refuses[name, pid]
        if name == "lock" and pid in self.busy:
            if timeout_ms == 0:
                raise NeverReturns
            return NOT_READY
        self.states[pid] = after
        return SUCCESS


def running(number: int = 3) -> StateMachine:
    """So many processes, RUNNING; none of them exists."""
    return StateMachine(
        dict.fromkeys(range(os.getpid() + 10**7, os.getpid() + 10**7 + number), "RUNNING")
    )

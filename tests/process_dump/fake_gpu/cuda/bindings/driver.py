"""cuda-bindings' `driver` over a state machine that outlives its processes: the file FAKE_GPU.

The names, the types of arguments and the numbers are those of cuda-bindings 13.5.
"""

# ruff: noqa: N802, N803 - the names are the real module's
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from enum import IntEnum
from pathlib import Path

from state_machine import NeverReturns, StateMachine


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


class CUprocessState(IntEnum):
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3


class CUcheckpointLockArgs:
    def __init__(self):
        self.timeoutMs = 0


_initialized = False


@contextlib.contextmanager
def _file():
    with Path(os.environ["FAKE_GPU"]).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        body = json.load(file)
        yield body
        file.seek(0)
        file.truncate()
        json.dump(body, file)


def _call(name, pid, timeout_ms=0):
    assert type(pid) is int
    if not _initialized:
        return CUresult.CUDA_ERROR_NOT_INITIALIZED
    try:
        with _file() as body:
            states = {int(at): state for at, state in body["states"].items()}
            refuses = {(call, at): code for call, at, code in body.get("refuses", [])}
            machine = StateMachine(states, tuple(body.get("busy", ())), refuses)
            code = machine.call(name, pid, timeout_ms)
            body["states"] = machine.states
            body["calls"] = body.get("calls", []) + machine.calls
        if name in body.get("hangs", []):
            time.sleep(10**6)
    except NeverReturns:
        time.sleep(10**6)
    return CUresult[code]


def cuInit(Flags):
    global _initialized
    with _file() as body:
        code = body.get("init", "CUDA_SUCCESS")
    _initialized = code == "CUDA_SUCCESS"
    return (CUresult[code],)


def cuCheckpointProcessLock(pid, args):
    assert args is None or isinstance(args, CUcheckpointLockArgs)
    return (_call("lock", pid, args.timeoutMs if args else 0),)


def cuCheckpointProcessCheckpoint(pid, args):
    assert args is None
    return (_call("checkpoint", pid),)


def cuCheckpointProcessRestore(pid, args):
    assert args is None
    return (_call("restore", pid),)


def cuCheckpointProcessUnlock(pid, args):
    assert args is None
    return (_call("unlock", pid),)


def cuCheckpointProcessGetState(pid):
    code = _call("state", pid)
    if code != CUresult.CUDA_SUCCESS:
        return code, None
    with _file() as body:
        return code, CUprocessState[f"CU_PROCESS_STATE_{body['states'][str(pid)]}"]


def cuCheckpointProcessGetRestoreThreadId(pid):
    code = _call("state", pid)
    return (code, pid) if code == CUresult.CUDA_SUCCESS else (code, None)

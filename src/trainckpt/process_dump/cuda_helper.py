"""Program calling NVIDIA's driver in a process of its own; `cuda_driver` starts it.

A line of JSON in, a line of JSON out: {"value": ...} or {"error": <code>}. Some calls hang. A hung
call blocks only this process, and the supervisor can kill it.

    {"call": "machine"}                      driver and GPUs, or an error
    {"call": "users", "pids": [...]}         the processes among them using CUDA
    {"call": "state" | "checkpoint" | "restore" | "unlock", "pid": 1}
    {"call": "lock", "pid": 1, "timeout_ms": 1000}

The packages are cuda-bindings and nvidia-ml-py, both in the extra `gpu`.
"""

from __future__ import annotations

import contextlib
import json
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDS = "cuCheckpointProcessLock"


class DriverRefused(Exception):
    """The driver's error code, or the reason for a missing driver."""


class Cuda:
    """The `driver` module of cuda-bindings, initialized once."""

    def __init__(self) -> None:
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverRefused(f"cuda-bindings is not installed ({error})") from error
        if not hasattr(self._driver, NEEDS):
            raise DriverRefused("cuda-bindings is too old to set GPU state aside; 12.8 is needed")
        try:
            self._answer(self._driver.cuInit(0))
        except Exception as error:  # the loader's errors without a driver vary
            raise DriverRefused(f"CUDA cannot be initialized: {error}") from error

    def users(self, pids: list[int]) -> list[int]:
        """Return the processes with a CUDA restore thread: only they need a checkpoint."""
        return [pid for pid in pids if self._uses(pid)]

    def state(self, pid: int) -> str:
        """Return the driver's name of the state, without its prefix."""
        state_number = self._answer(self._driver.cuCheckpointProcessGetState(pid))
        prefix = "CU_PROCESS_STATE_"
        return str(self._driver.CUprocessState(state_number).name).removeprefix(prefix)

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Lock with a limit of at least 1 ms: 0 would mean no limit."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = max(timeout_ms, 1)
        self._answer(self._driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        """Move GPU state into the process's host memory."""
        self._answer(self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """Move GPU state back to the same GPUs."""
        self._answer(self._driver.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> None:
        """Let the process run on."""
        self._answer(self._driver.cuCheckpointProcessUnlock(pid, None))

    def _uses(self, pid: int) -> bool:
        code, *_ = self._driver.cuCheckpointProcessGetRestoreThreadId(pid)
        return int(code) == 0

    def _answer(self, found: Any) -> Any:
        code, *values = found
        if int(code) != 0:
            raise DriverRefused(self._driver.CUresult(code).name)
        return values[0] if values else None


def machine() -> dict[str, Any]:
    """Return the facts of this machine, from NVML; see `gpu_state.Machine`."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError as error:
        raise DriverRefused(f"nvidia-ml-py is not installed ({error})") from error
    try:
        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        return {
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "devices": [_device(nvml, handle) for handle in handles],
            "used": [usage for handle in handles for usage in _used(nvml, handle)],
            "shared": [pid for handle in handles for pid in _shared(nvml, handle)],
            "persistent": all(_is_persistent(nvml, handle) for handle in handles),
        }
    except nvml.NVMLError as error:
        raise DriverRefused(f"NVML does not work: {error}") from error


def _device(nvml: Any, handle: Any) -> dict[str, Any]:
    memory, divided = nvml.nvmlDeviceGetMemoryInfo(handle), False
    with contextlib.suppress(nvml.NVMLError):  # most GPUs cannot be divided
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "total_bytes": int(memory.total),
        "free_bytes": int(memory.free),
        "divided": divided,
    }


def _used(nvml: Any, handle: Any) -> Iterator[list[Any]]:
    with contextlib.suppress(nvml.NVMLError):
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            yield [int(process.pid), uuid, int(process.usedGpuMemory or 0)]


def _shared(nvml: Any, handle: Any) -> list[int]:
    with contextlib.suppress(nvml.NVMLError):
        mps_processes = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        return [int(process.pid) for process in mps_processes]
    return []


def _is_persistent(nvml: Any, handle: Any) -> bool:
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED)
    return True


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def main() -> None:
    """Answer requests until stdin ends."""
    cuda: Cuda | None = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        try:
            cuda = cuda or Cuda()
            value = machine() if call == "machine" else getattr(cuda, call)(**request)
            answer = {"value": value}
        except DriverRefused as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()

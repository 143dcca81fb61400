"""The program that speaks to NVIDIA's driver, in a process of its own: `cuda_driver` starts it.

A line of JSON in, a line of JSON out: {"value": ...} or {"error": <code>}. A call that hangs, as
some do, hangs this process, which can be killed; the supervisor goes on.

    {"call": "machine"}                      what is here, or why nothing can be done
    {"call": "users", "pids": [...]}         those of them that use CUDA
    {"call": "state" | "checkpoint" | "restore" | "unlock", "pid": 1}
    {"call": "lock", "pid": 1, "timeout_ms": 1000}

The packages are cuda-bindings and nvidia-ml-py, both of the extra `gpu`.
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


class Refused(Exception):
    """The driver's code, or why there is no driver."""


class Cuda:
    """cuda-bindings' `driver`, initialized once."""

    def __init__(self) -> None:
        try:
            self._driver: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise Refused(f"cuda-bindings is not installed ({error})") from error
        if not hasattr(self._driver, NEEDS):
            raise Refused("cuda-bindings is too old to set GPU state aside; 12.8 is needed")
        try:
            self._answer(self._driver.cuInit(0))
        except Exception as error:  # whatever its loader raises where there is no driver
            raise Refused(f"CUDA cannot be initialized: {error}") from error

    def users(self, pids: list[int]) -> list[int]:
        """Those that have a thread which restores them: nobody else has to be set aside."""
        return [pid for pid in pids if self._uses(pid)]

    def state(self, pid: int) -> str:
        """By its name in the driver, less the prefix."""
        found = self._answer(self._driver.cuCheckpointProcessGetState(pid))
        prefix = "CU_PROCESS_STATE_"
        return str(self._driver.CUprocessState(found).name).removeprefix(prefix)

    def lock(self, pid: int, timeout_ms: int) -> None:
        """With a limit: 0 would be none."""
        arguments = self._driver.CUcheckpointLockArgs()
        arguments.timeoutMs = max(timeout_ms, 1)
        self._answer(self._driver.cuCheckpointProcessLock(pid, arguments))

    def checkpoint(self, pid: int) -> None:
        """To the process's own memory."""
        self._answer(self._driver.cuCheckpointProcessCheckpoint(pid, None))

    def restore(self, pid: int) -> None:
        """To the same GPUs."""
        self._answer(self._driver.cuCheckpointProcessRestore(pid, None))

    def unlock(self, pid: int) -> None:
        """It goes on."""
        self._answer(self._driver.cuCheckpointProcessUnlock(pid, None))

    def _uses(self, pid: int) -> bool:
        code, *_ = self._driver.cuCheckpointProcessGetRestoreThreadId(pid)
        return int(code) == 0

    def _answer(self, found: Any) -> Any:
        code, *values = found
        if int(code) != 0:
            raise Refused(self._driver.CUresult(code).name)
        return values[0] if values else None


def machine() -> dict[str, Any]:
    """Facts of this machine, by NVML; see `gpus.Machine`."""
    try:
        nvml: Any = import_module("pynvml")
    except ImportError as error:
        raise Refused(f"nvidia-ml-py is not installed ({error})") from error
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(at) for at in range(nvml.nvmlDeviceGetCount())]
        return {
            "driver": _text(nvml.nvmlSystemGetDriverVersion()),
            "devices": [_device(nvml, handle) for handle in handles],
            "used": [one for handle in handles for one in _used(nvml, handle)],
            "shared": [pid for handle in handles for pid in _shared(nvml, handle)],
            "persistent": all(_is_persistent(nvml, handle) for handle in handles),
        }
    except nvml.NVMLError as error:
        raise Refused(f"NVML does not work: {error}") from error


def _device(nvml: Any, handle: Any) -> dict[str, Any]:
    memory, divided = nvml.nvmlDeviceGetMemoryInfo(handle), False
    with contextlib.suppress(nvml.NVMLError):  # most GPUs cannot be divided
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return {
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "total_bytes": int(memory.total), "free_bytes": int(memory.free), "divided": divided,
    }  # fmt: skip


def _used(nvml: Any, handle: Any) -> Iterator[list[Any]]:
    with contextlib.suppress(nvml.NVMLError):
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            yield [int(process.pid), uuid, int(process.usedGpuMemory or 0)]


def _shared(nvml: Any, handle: Any) -> list[int]:
    with contextlib.suppress(nvml.NVMLError):
        found = nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)
        return [int(process.pid) for process in found]
    return []


def _is_persistent(nvml: Any, handle: Any) -> bool:
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED)
    return True


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def main() -> None:
    """Answer until nobody asks any more."""
    cuda: Cuda | None = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        try:
            cuda = cuda or Cuda()
            value = machine() if call == "machine" else getattr(cuda, call)(**request)
            answer = {"value": value}
        except Refused as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()

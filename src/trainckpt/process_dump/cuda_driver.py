"""NVIDIA's driver for `gpu_state`, through a helper process with a limit on every call.

Some calls are known never to return (a process stopped by a signal, memory shared between
processes), and no timeout of the driver ends them. Then the helper is killed, and the next call
starts a new one. A checkpoint or restore under way completes without it.

The helper is this module as a program. A line of JSON in, a line of JSON out: {"value": ...} or
{"error": <code>}.

    {"call": "machine"}                      driver and GPUs, or an error
    {"call": "users", "pids": [...]}         the processes among them using CUDA
    {"call": "state" | "checkpoint" | "restore" | "unlock", "pid": 1}
    {"call": "lock", "pid": 1, "timeout_ms": 1000}

It calls cuda-bindings and nvidia-ml-py, both in the extra `gpu`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainckpt.process_dump import gpu_state
from trainckpt.process_dump.gpu_state import CallFailed, Device, Machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROGRAM = ("-m", "trainckpt.process_dump.cuda_driver")
ANSWERS_WITHIN_S = 60.0  # the first call starts CUDA
SLOWEST_BYTES_PER_S = 0.2e9  # published measurements: 0.4e9 and more
DRIVER = (
    f"install NVIDIA's driver, {gpu_state.LEAST_DRIVER} or later; nvidia-smi says whether it works"
)
OUR_VARIABLES = ("TRAINCKPT_SUPERVISOR",)  # removed: the helper's import is not a rank's


class CudaDriver:
    """The driver; a context ending the helper on exit.

    Args:
        environment: Extra environment variables of the helper.

    Attributes:
        look_within_s: Limit in seconds of each call touching no process.

    Every call raises `CallFailed` if the driver refuses, or does not answer in time.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {
            name: value
            for name, value in {**os.environ, **(environment or {})}.items()
            if name not in OUR_VARIABLES
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._move_within_s = self.look_within_s = ANSWERS_WITHIN_S

    def __enter__(self) -> CudaDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the helper."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def machine(self) -> Machine:
        """Return this machine's driver and GPUs, or the reason against using them."""
        try:
            reply = self._ask("machine", 0, self.look_within_s)
        except CallFailed as error:
            lacks = "not installed" in error.code or "too old" in error.code
            return Machine(why_not=error.code, cure=gpu_state.INSTALL if lacks else DRIVER)
        return Machine(
            reply["driver"],
            tuple(Device(**device) for device in reply["devices"]),
            tuple((pid, uuid, size) for pid, uuid, size in reply["used"]),
            tuple(reply["shared"]),
            reply["persistent"],
        )

    def will_move(self, num_bytes: int) -> None:
        """Set the limits of checkpoint and restore for `num_bytes` on the GPUs."""
        self._move_within_s = ANSWERS_WITHIN_S + num_bytes / SLOWEST_BYTES_PER_S

    def users(self, pids: Sequence[int]) -> list[int]:
        """Return the processes using CUDA."""
        return list(self._ask("users", 0, self.look_within_s, pids=list(pids)))

    def state(self, pid: int) -> str:
        """Return the checkpoint state of a process; waits for a call in progress on it."""
        return str(self._ask("state", pid, self._move_within_s, pid=pid))

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Wait for a process's GPU work and block new work; after `timeout_ms` it is RUNNING."""
        limit_s = timeout_ms / 1000 + ANSWERS_WITHIN_S
        self._ask("lock", pid, limit_s, pid=pid, timeout_ms=timeout_ms)

    def checkpoint(self, pid: int) -> None:
        """Move a process's GPU state to its host memory."""
        self._ask("checkpoint", pid, self._move_within_s, pid=pid)

    def restore(self, pid: int) -> None:
        """Move a process's GPU state back."""
        self._ask("restore", pid, self._move_within_s, pid=pid)

    def unlock(self, pid: int) -> None:
        """Let a locked process run on."""
        self._ask("unlock", pid, pid=pid)

    def _ask(self, call: str, about: int, limit_s: float = ANSWERS_WITHIN_S, **more: Any) -> Any:
        process = self._helper()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"call": call, **more}).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(_line(process, limit_s))
        except TimeoutError as error:
            self.close()
            raise CallFailed(call, about, f"no answer within {limit_s:g} s") from error
        except (OSError, ValueError) as error:
            self.close()
            raise CallFailed(call, about, f"no answer: {error}") from error
        if "error" in answer:
            raise CallFailed(call, about, str(answer["error"]))
        return answer["value"]

    def _helper(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM],
                env=self._environment,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self._process


def _line(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Return the helper's next line. One request at a time, so nothing follows the line."""
    assert process.stdout is not None
    deadline, received = time.monotonic() + limit_s, b""
    while not received.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise TimeoutError
        block = os.read(process.stdout.fileno(), 1 << 16)
        if not block:
            raise ValueError("it has ended")
        received += block
    return received


# ---- the helper


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
        thread_of = self._driver.cuCheckpointProcessGetRestoreThreadId
        return [pid for pid in pids if int(thread_of(pid)[0]) == 0]

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
    """Answer requests, a line of JSON each, until stdin ends."""
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

"""NVIDIA's driver for `gpu_state`, through a helper process with a limit on every call.

Some calls are known never to return (a process stopped by a signal, memory shared between
processes), and no timeout of the driver ends them. Then the helper is killed, and the next call
starts a new one. A checkpoint or restore under way completes without it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from trainckpt.process_dump import gpu_state
from trainckpt.process_dump.gpu_state import CallFailed, Device, Machine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = ("-m", "trainckpt.process_dump.cuda_helper")
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
        """Wait for a process's GPU work and block new work; `timeout_ms` limits the wait."""
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

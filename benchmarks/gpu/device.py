"""The device that is judged: a CUDA GPU, or the CPU in a rehearsal of the same calls."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from tests.state.slow_device import SlowDevice

from trainckpt.state.device_copy import CudaCalls

if TYPE_CHECKING:
    from collections.abc import Callable

GB = 10**9


class Cuda:
    """The first GPU.

    Attributes:
        sizes: Bytes of the large buffers.
        num_small: Tensors of the measurement of small copies.
    """

    kind, on_card = "cuda", True
    large_bytes, registered_bytes, num_small = GB, 2 * GB, 3000

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", 0)

    def platform(self) -> Any:
        """Return trainckpt's calls of this device."""
        return CudaCalls()

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def busy(self, seconds: float) -> None:
        """Have the current stream do nothing for a while."""
        torch.cuda._sleep(int(seconds * 1.7e9))  # cycles, at most as fast as a clock goes

    def forget_peak(self) -> None:
        """Let `peak_bytes` be of what follows."""
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """Return the most memory allocated since `forget_peak`, beyond what is now."""
        self.synchronize()
        return torch.cuda.max_memory_allocated()


class Rehearsal:
    """The CPU, with small sizes. Its copies are those of the tests' device."""

    kind, on_card = "cpu", False
    large_bytes, registered_bytes, num_small = 4 << 20, 4 << 20, 60

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def platform(self) -> Any:
        """Return the tests' device."""
        return SlowDevice()

    def synchronize(self) -> None:
        """Nothing is under way."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Return host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def busy(self, seconds: float) -> None:
        """Do nothing: what follows is not on a stream."""

    def forget_peak(self) -> None:
        """No memory is counted."""

    def peak_bytes(self) -> int:
        """Return 0."""
        return 0


def open_device(kind: str) -> Any:
    """Return the device "cuda" or "cpu".

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if kind == "cpu":
        return Rehearsal()
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    return Cuda()


def fastest(act: Callable[[], object], device: Any, times: int = 5) -> float:
    """Return the shortest of several times, seconds until the device is idle."""
    found = []
    for _ in range(times):
        device.synchronize()
        begun = time.perf_counter()
        act()
        device.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)

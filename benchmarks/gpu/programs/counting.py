"""Count in a tensor on a GPU, and check it, until killed; with --nvml also watch the GPU's health.

Prints a number each time. What it counts on is what a dump has to bring back.
"""

from __future__ import annotations

import sys
import threading
import time

import torch

from trainckpt.preemption.gpu_health import GpuHealth

SIZE = 1 << 20


def main() -> None:
    """Count for ever."""
    device = sys.argv[1]
    if "--nvml" in sys.argv:
        import pynvml

        watcher = GpuHealth(pynvml)
        watcher()
        threading.Thread(target=watch, args=(watcher,), daemon=True).start()
    state = torch.arange(SIZE, device=device, dtype=torch.int64)
    expected = torch.arange(SIZE)
    for number in range(10**9):
        state += 1
        expected += 1
        if not torch.equal(state.cpu(), expected):
            sys.exit(f"the GPU's memory is wrong at {number}")
        print(number, flush=True)
        time.sleep(0.02)


def watch(watcher: GpuHealth) -> None:
    """Look at the GPU's health again and again."""
    while True:
        watcher()


if __name__ == "__main__":
    main()

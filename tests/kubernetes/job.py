"""The example as it is, but slow enough to be stopped while the file `slow` is there.

PAUSE_S seconds pass after each micro-batch, from the PACED_FROM-th of the process on. After the
FAIL_AT-th micro-batch of a process, and the commit of the step before it, the process fails, by an
`exception` or by taking `memory` until it is killed, as FAIL_BY says: once in a run, or at each
start with FAIL_ALWAYS. While the file `slow-disk` is there, each write of a shard takes a minute.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

SLOW_DISK = "slow-disk"
MICRO_BATCHES = 3  # of a step
COMMITTED_WITHIN_S = 60.0


def fail_at(wanted: int, how: str, *, always: bool) -> None:
    """Have this process fail after its micro-batch of that number."""
    from training_trace import Trace

    record, numbers = Trace.micro_batch, itertools.count(1)

    def record_and_fail(trace: Trace, *facts) -> None:
        record(trace, *facts)
        if next(numbers) != wanted:
            return
        failed = trace.folder.parent / "failed"
        if always or not failed.exists():
            wait_for_commit(trace.folder.parent / "run", (wanted - 1) // MICRO_BATCHES)
            failed.touch()
            if how == "exception":
                raise RuntimeError("a batch is broken")
            taken = []
            while True:
                taken.append(b"x" * (1 << 24))

    Trace.micro_batch = record_and_fail


def wait_for_commit(run: Path, step: int) -> None:
    """Wait until the snapshot of this step is committed."""
    until_s = time.monotonic() + COMMITTED_WITHIN_S
    while step and not [*run.glob(f"snapshots/s{step}~*/manifest.json")]:
        if time.monotonic() > until_s:
            raise TimeoutError(f"step {step} is not committed")
        time.sleep(0.01)


def slow_down_shards() -> None:
    from trainckpt.storage.local import Disk

    write = Disk.write

    def write_slowly(disk: Disk, path: Path, descriptor: int, block, first_byte: int) -> None:
        run = next((p for p in path.parents if p.name == "run"), None)
        if path.name.startswith("rank") and run and (run.parent / SLOW_DISK).exists():
            time.sleep(60)
        write(disk, path, descriptor, block, first_byte)

    Disk.write = write_slowly


if __name__ == "__main__":
    from tests.start_commands import pace

    pace.PAUSE_S = float(os.environ.get("PAUSE_S", "1"))
    pace.FIRST = int(os.environ.get("PACED_FROM", "1"))
    pace.pace()
    slow_down_shards()
    if "FAIL_AT" in os.environ:
        always = "FAIL_ALWAYS" in os.environ
        fail_at(int(os.environ["FAIL_AT"]), os.environ["FAIL_BY"], always=always)
    runpy.run_path(str(ROOT / "examples" / "char_gpt.py"), run_name="__main__")

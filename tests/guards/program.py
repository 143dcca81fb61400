"""Run an example, stop it at one micro-batch, and record the keys that ranks put in their store.

    python tests/guards/program.py SCRIPT ARGUMENTS

SCENARIO_STOP is "STEP.MICRO:SIGNAL" and counts in the first attempt only. Behind that micro-batch
rank 0 sends the signal to its own process (SIGKILL: every rank does; PAUSE: none does), and all
ranks wait. So the ranks agree on the stop while each has passed the same boundary, and the snapshot
is the same in every recording. SCENARIO_KEYS names a folder that gets one file of keys per rank.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

WAIT_S = 2.0  # far longer than ranks need to agree on a stop
RANK = int(os.environ.get("RANK", "0"))
_NUMBER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{8,}|\d+")


def record_keys(folder: Path) -> None:
    """Append each new key of the ranks' store to a file; numbers and tokens are replaced by `#`."""
    folder.mkdir(parents=True, exist_ok=True)
    file, known = folder / f"rank{RANK}.txt", set()

    def record(keys) -> None:
        for key in keys:
            plain = _NUMBER.sub("#", key if isinstance(key, str) else key.decode())
            if plain not in known:
                known.add(plain)
                with file.open("a") as out:
                    out.write(f"{plain}\n")

    for kind in (dist.Store, dist.PrefixStore):
        for name in ("set", "compare_set", "add"):
            if name in vars(kind):
                setattr(kind, name, recorded(vars(kind)[name], record, many=False))
        if "multi_set" in vars(kind):
            kind.multi_set = recorded(vars(kind)["multi_set"], record, many=True)


def recorded(method, record, *, many: bool):
    """Return the store's method, which first records its key or keys."""

    def call(self, key, *args):
        record(key if many else [key])
        return method(self, key, *args)

    return call


def stop_in(trace: type, where: str) -> None:
    """Send the signal behind the micro-batch that `where` names."""
    place, _, name = where.partition(":")
    step, micro = (int(part) for part in place.split("."))
    number = getattr(signal, name, None)
    write, attempt = trace.micro_batch, trace.attempt

    def note(self, ckpt):
        self.is_first = ckpt.attempt == 1
        attempt(self, ckpt)

    def micro_batch(self, began, samples, loss):
        write(self, began, samples, loss)
        if self.is_first and (began.step, began.micro) == (step, micro):
            if number == signal.SIGKILL:
                time.sleep(WAIT_S)  # the save of an earlier boundary becomes durable
                if dist.is_initialized():
                    dist.barrier()
            if number is None:
                (self.folder / "waits").touch()
            elif number == signal.SIGKILL or RANK == 0:
                os.kill(os.getpid(), number)
            time.sleep(WAIT_S)

    trace.attempt, trace.micro_batch = note, micro_batch


def main() -> None:
    """Prepare the process, then run the script as `__main__`."""
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(script.parent))
    if folder := os.environ.get("SCENARIO_KEYS"):
        record_keys(Path(folder))
    if where := os.environ.get("SCENARIO_STOP"):
        import training_trace

        stop_in(training_trace.Trace, where)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()

"""An example as a rank of a case: python tests/chaos/train.py EXAMPLE ARGUMENT...

    CHAOS_GATE=17,FILE      ranks wait before the run's last micro-batches until FILE is there
    CHAOS_PACE_S=0.03       a micro-batch takes so much longer, for somebody has to hit it
    CHAOS_BF16=1            the model is in bfloat16
    CHAOS_SPLIT=1           Accelerate splits batches instead of dealing them
    CHAOS_ENDPOINTS=URL,... each rank reaches the object store by a door of its own
    CHAOS_CLOCK=FILE        the clock of the host goes by so many seconds as FILE says

The example uses trainckpt; see `tests.campaign.gate` for why that has to be said here.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from functools import partialmethod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Prepare what a case asks for, and be the example that the arguments name."""
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    _choose_door()
    if "CHAOS_CLOCK" in os.environ:
        _follow(Path(os.environ["CHAOS_CLOCK"]))
    if "CHAOS_BF16" in os.environ:
        import torch

        torch.set_default_dtype(torch.bfloat16)
    if "CHAOS_SPLIT" in os.environ:
        import accelerate

        split = accelerate.DataLoaderConfiguration(split_batches=True)
        begin = accelerate.Accelerator.__init__
        accelerate.Accelerator.__init__ = partialmethod(begin, dataloader_config=split)
    _keep_pace(float(os.environ["CHAOS_PACE_S"]))
    if "CHAOS_GATE" in os.environ:
        runpy.run_path(str(ROOT / "tests/campaign/gate.py"))["stand_before"](
            *os.environ["CHAOS_GATE"].split(",", 1)
        )
    runpy.run_path(str(script), run_name="__main__")


def _choose_door() -> None:
    if "CHAOS_ENDPOINTS" in os.environ:
        doors = os.environ["CHAOS_ENDPOINTS"].split(",")
        os.environ["AWS_ENDPOINT_URL"] = doors[int(os.environ.get("RANK", "0"))]


def _follow(file: Path) -> None:
    """Shift the clock of this process by what `file` says at the moment."""
    true_ns = time.time_ns

    def shifted_ns() -> int:
        return true_ns() + int(float(file.read_text() or 0) * 1e9)

    time.time_ns = shifted_ns
    time.time = lambda: shifted_ns() / 1e9


def _keep_pace(pace_s: float) -> None:
    from training_trace import Trace

    write = Trace.micro_batch

    def micro_batch(trace, *line) -> None:
        write(trace, *line)
        time.sleep(pace_s)

    Trace.micro_batch = micro_batch


if __name__ == "__main__":
    main()

"""The example, one of whose micro-batches lasts for as long as the file that HOLD names is there.

Each rank says that it has come to it by a file beside that one. The hold is in the third step.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_gpt.py"
HOLD = os.environ.get("HOLD")
steps = 0


def hold(*_):
    global steps
    steps += 1
    if HOLD and steps == 3:
        Path(f"{HOLD}.rank{os.environ['RANK']}").touch()
        while Path(HOLD).exists():
            time.sleep(0.05)


if __name__ == "__main__":
    register_optimizer_step_pre_hook(hold)
    sys.argv[0] = str(EXAMPLE)
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")

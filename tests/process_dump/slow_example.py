"""The example, whose micro-batches last EACH_S seconds each; in the third rank 0 makes BEGUN."""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "char_gpt.py"
EACH_S = float(os.environ.get("EACH_S", "0"))
begun = 0


def last(module, _):
    global begun
    if isinstance(module, DistributedDataParallel):
        begun += 1
        if begun == 3 and os.environ["RANK"] == "0" and "BEGUN" in os.environ:
            Path(os.environ["BEGUN"]).touch()
        time.sleep(EACH_S)


if __name__ == "__main__":
    register_module_forward_pre_hook(last)
    sys.argv[0] = str(EXAMPLE)
    sys.path.insert(0, str(EXAMPLE.parent))
    runpy.run_path(str(EXAMPLE), run_name="__main__")

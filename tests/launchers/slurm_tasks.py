"""The example as a task of `srun python`: Slurm's variables say which rank this process is."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]

sys.path.insert(0, str(EXAMPLES))
runpy.run_path(str(EXAMPLES / "char_gpt.py"), run_name="__main__")

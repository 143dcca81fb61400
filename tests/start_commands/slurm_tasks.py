"""The example as a task of `srun python`: Slurm's variables say which rank this process is."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]

if __name__ == "__main__":
    from tests.start_commands.pace import pace

    pace()
    runpy.run_path(str(ROOT / "examples" / "char_gpt.py"), run_name="__main__")

"""The example as it is, but slow enough to be stopped while the file `slow` is there.

Slurm looks for jobs that are near their limit every 30 s: a run must last longer than that.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    from tests.start_commands import pace

    pace.PAUSE_S = 1.5
    pace.pace()
    runpy.run_path(str(ROOT / "examples" / "char_gpt.py"), run_name="__main__")

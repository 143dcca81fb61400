"""The example as it is, but slow enough to be stopped while the file `slow` is there.

PAUSE_S seconds pass after each micro-batch, from the PACED_FROM-th of the process on.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    from tests.start_commands import pace

    pace.PAUSE_S = float(os.environ.get("PAUSE_S", "1"))
    pace.FIRST = int(os.environ.get("PACED_FROM", "1"))
    pace.pace()
    runpy.run_path(str(ROOT / "examples" / "char_gpt.py"), run_name="__main__")

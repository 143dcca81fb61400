"""The example as it is, but see `pace`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    from tests.start_commands.pace import pace

    pace()
    runpy.run_path(str(ROOT / "examples" / "char_gpt.py"), run_name="__main__")

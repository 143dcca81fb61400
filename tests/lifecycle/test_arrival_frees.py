"""What was read is given back beside training, and the interpreter ends well meanwhile."""

from __future__ import annotations

import subprocess
import sys

# To give the memory back takes longer than the script has left.
SCRIPT = """
import mmap, sys
import torch
from trainckpt.lifecycle.resuming import arrival

tensor = torch.frombuffer(memoryview(mmap.mmap(-1, 512 << 20)), dtype=torch.uint8)
tensor.fill_(1)
last = [tensor]
del tensor
arrival.free(last)
sys.exit(3)
"""


def test_a_process_that_ends_right_after_a_resume_ends_as_it_wants_to():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]

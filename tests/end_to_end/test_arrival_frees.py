"""What was read is given back beside training, and the interpreter ends well meanwhile."""

from __future__ import annotations

import subprocess
import sys

# To give the memory back takes a second, longer than the script has left; and what does it comes
# back to the interpreter again and again.
SCRIPT = """
import mmap, sys, threading, time
import torch
from trainckpt.resume import apply_phases as arrival

begun = threading.Event()

class Slow(mmap.mmap):
    def __del__(self):
        begun.set()
        for _ in range(200):
            time.sleep(0.005)

tensor = torch.frombuffer(memoryview(Slow(-1, 1 << 20)), dtype=torch.uint8)
last = [tensor]
del tensor
arrival.free(last)
begun.wait()
sys.exit(3)
"""


def test_a_process_that_ends_right_after_a_resume_ends_as_it_wants_to():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]

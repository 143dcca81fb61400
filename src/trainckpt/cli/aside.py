"""What people are told beside a verb's output: on stderr, as it happens.

`trainckpt run ... 2>&1 | tee log`, and Ctrl-C ends `tee` first: that nobody reads it any more
stops nothing, and changes no exit code.
"""

from __future__ import annotations

import contextlib
import sys


def tell(line: str) -> None:
    """One line; the reader may be gone, the terminal hung up, the disk of the log full."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)

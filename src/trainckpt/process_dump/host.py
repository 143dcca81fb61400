"""What a dump is tied to: this host, its kernel, its processor."""

from __future__ import annotations

import contextlib
import platform
import socket
from pathlib import Path

from trainckpt.format.dump import Host


def this_host() -> Host:
    """What a dump that is taken here will need."""
    flags: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                flags = sorted(line.partition(":")[2].split())
                break
    return Host(socket.gethostname(), platform.release(), tuple(flags))

"""The fingerprint: what besides the state decides the bits of the next loss.

Recorded in every manifest and compared at resume: no recorded difference reads *bitwise*, any
other *same data, not bitwise*, with every reason.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

EXACT = "bitwise"
INEXACT = "same data, not bitwise"


def fingerprint(world: int) -> dict[str, Any]:
    """Facts of this process, as JSON values."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "world": world,
        "hash seed": os.environ.get("PYTHONHASHSEED", "random"),
        "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
    }
    if torch.cuda.is_available():
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["cuda"] = torch.version.cuda
        found["cudnn benchmark"] = torch.backends.cudnn.benchmark
        found["cublas workspace"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        found["nccl"] = {k: v for k, v in os.environ.items() if k in ("NCCL_ALGO", "NCCL_PROTO")}
    return found


def compare(
    then: dict[str, Any], now: dict[str, Any], problems: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """`EXACT` or `INEXACT`, and every difference or known problem as a sentence."""
    differences = [
        f"{key} was {then.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    ]
    reasons = [*problems, *differences]
    return (INEXACT if reasons else EXACT), reasons

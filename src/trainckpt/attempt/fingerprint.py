"""The fingerprint: facts besides the state that decide the bits of the next loss.

Recorded in every manifest and compared at resume: with any difference a resume is not bitwise (see
`format.exactness`). Facts that count only on GPUs are in `gpu_settings`.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.attempt import gpu_settings
from trainckpt.attempt.gpu_settings import fp32_precision
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE, DEVICES = "device", "devices"
_MKLDNN_MATMUL = "torch.backends.mkldnn.matmul.fp32_precision"
_CUDA_MATMUL = "torch.backends.cuda.matmul.fp32_precision"
# The values torch.set_float32_matmul_precision sets, for CUDA and for mkldnn.
_LEGACY_MATMUL = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}


def take_fingerprint(
    world: int, devices: Sequence[torch.device] = (), ranks_devices: Sequence[str] = ()
) -> dict[str, Any]:
    """Return facts of this process, as JSON values.

    Args:
        world: Number of ranks.
        devices: Those of this process that hold tracked state.
        ranks_devices: Each rank's devices, from `gpu_settings.describe`; none: of this rank alone.
    """
    own = gpu_settings.training_devices(devices)
    everyone = list(ranks_devices) or [gpu_settings.describe(own)]
    mkldnn: Any = torch.backends.mkldnn
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        _MKLDNN_MATMUL: _mkldnn_matmul(mkldnn),
        "default dtype": str(torch.get_default_dtype()),
        "world": world,
        "hash seed": os.environ.get("PYTHONHASHSEED", "random"),
        "numpy": getattr(sys.modules.get("numpy"), "__version__", None),
        DEVICE: everyone[0] if len(set(everyone)) == 1 else everyone,
        "collectives": gpu_settings.collectives(own[0].type) if world > 1 else None,
    }
    for kind in ("conv", "rnn"):
        facts[f"torch.backends.mkldnn.{kind}.fp32_precision"] = fp32_precision(
            getattr(mkldnn, kind, mkldnn)
        )
    if own[0].type == gpu_settings.CUDA:
        facts |= gpu_settings.gpu_facts(world)
    return facts


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[Restored]:
    """Return every difference, named after the setting.

    Facts missing on one side are not compared: an older release recorded less, and GPU settings are
    recorded only where there are GPUs, as `DEVICE` shows.
    """
    then = _as_recorded_now(then, now)
    return [
        Restored(key, How.NOT_KEPT, f"{key} was {then[key]!r}, is {now[key]!r}")
        for key in sorted(then.keys() & now.keys())
        if then[key] != now[key]
    ]


def _mkldnn_matmul(mkldnn: Any) -> str:
    try:
        return fp32_precision(mkldnn.matmul)
    except AttributeError:  # before torch 2.9, whose own setting the older question refuses
        return _LEGACY_MATMUL[torch.get_float32_matmul_precision()][1]


def _as_recorded_now(then: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Translate older releases' facts into today's."""
    then = dict(then)
    if "matmul precision" in then:
        legacy = _LEGACY_MATMUL.get(str(then.pop("matmul precision")), ("?", "?"))
        then = {_CUDA_MATMUL: legacy[0], _MKLDNN_MATMUL: legacy[1], **then}
    visible = then.pop(DEVICES, None)
    if DEVICE not in then and "machine" in then and isinstance(now.get(DEVICE), str):
        # The names of all visible GPUs, whether the training used them or not.
        names = ["cpu", *map(str, visible)] if isinstance(visible, list) else ["cpu"]
        is_one = now[DEVICE].partition(",")[0] in names
        then[DEVICE] = now[DEVICE] if is_one else " or ".join(dict.fromkeys(names))
    return then

"""doctor: whether processes can be dumped here, tried with two small ones; and their GPU state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.machine import Item
from trainckpt.process_dump import criu, gpus, toy
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_signs import NVLS

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME, GPUS = "process dumps", "dumps of GPU state"
NVIDIA = Path("/dev/nvidiactl")


def examine() -> Item:
    """One item; a run does without."""
    found = criu.examine()
    if found.why_not or found.program is None:
        return Item(NAME, ok=False, value=found.why_not, cure=found.cure, needed=False)
    trial = toy.run(found.program)
    if trial.why_not:
        return Item(NAME, ok=False, value=trial.why_not, cure=criu.INSTALL, needed=False)
    took = f"two processes were dumped in {trial.dump_s:.1f} s, restored in {trial.restore_s:.1f} s"
    return Item(NAME, ok=True, value=f"CRIU {found.version}: {took}", needed=False)


def examine_gpus() -> Item:
    """One item: whether what processes have on GPUs can be set aside. Nothing of it is tried."""
    if not NVIDIA.exists():
        return Item(GPUS, ok=True, value="no GPU of NVIDIA's here", needed=False)
    with CudaDriver() as driver:
        return of_gpus(driver.machine())


def of_gpus(machine: gpus.Machine, environment: Mapping[str, str] = os.environ) -> Item:
    """The item for a machine. Pure."""
    why, cure = gpus.why_not_here(machine)
    if why:
        return Item(GPUS, ok=False, value=why, cure=cure, needed=False)
    value = f"driver {machine.driver}, GPUs: {len(machine.devices)}"
    if not machine.persistent:
        value += "; persistence mode is off, so the first call takes longer (nvidia-smi -pm 1)"
    if len(machine.devices) > 1 and environment.get(NVLS) != "0":
        value += f"; ranks over NCCL are to be launched with {NVLS}=0"
    return Item(GPUS, ok=True, value=value, needed=False)

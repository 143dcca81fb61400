"""Stage A: what this machine is. The link's figures are what later stages are judged by.

`link` is the payload that a PCIe link can carry in one direction: its lanes' rate after encoding,
less the headers of packets of 256 bytes. It is computed from the generation and width that NVML
reports, at most as both ends can (an idle link is slower).
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.process_dump import criu, gpu_state
from trainckpt.process_dump.cuda_driver import CudaDriver

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.gpu.findings import Findings

# Bytes per second of one lane, by PCIe generation.
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
PAYLOAD = 256 / (256 + 24)  # a packet's data, beside its header, sequence number and checksum
PACKAGES = ("numpy", "cuda-bindings", "nvidia-ml-py", "xxhash", "safetensors")


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Add every fact."""
    findings.add("python", platform.python_version())
    findings.add("torch", torch.__version__)
    findings.add("packages", {name: version(name) for name in PACKAGES})
    findings.add("kernel", platform.release())
    findings.add("cores", len(os.sched_getaffinity(0)))
    findings.add("host_memory", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "bytes")
    findings.add("folder_free", free_bytes(str(folder)), "bytes")
    findings.add("shared_memory_free", free_bytes("/dev/shm"), "bytes")
    findings.add("root", os.geteuid() == 0)
    with findings.attempt("criu"):
        ability = criu.examine()
        findings.add("criu", ability.version or None, why=ability.why_not)
    if not device.on_card:
        for name in ("card", "driver", "link", "dumps_of_gpus"):
            findings.needs_card(name)
        return
    properties = torch.cuda.get_device_properties(0)
    findings.add("card", properties.name)
    findings.add("card_memory", properties.total_memory, "bytes")
    findings.add("multiprocessors", properties.multi_processor_count)
    findings.add("cuda", torch.version.cuda)
    findings.add("cudnn", torch.backends.cudnn.version())
    with findings.attempt("nccl"):
        findings.add("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    with findings.attempt("driver"):
        with CudaDriver() as driver:
            machine = driver.machine()
        why = gpu_state.why_not_here(machine)[0]
        findings.add("driver", machine.driver)
        findings.add("persistence_mode", machine.persistent)
        findings.add("dumps_of_gpus", not why, goal="possible", passed=not why, why=why)
    with findings.attempt("link"):
        link = pcie_link()
        findings.add("link", link["bytes_per_s"], "bytes/s", why=str(link))


def pcie_link() -> dict[str, Any]:
    """Return generation, width and payload bytes per second of the first GPU's PCIe link.

    Raises:
        NVMLError: NVML does not report it, as in some virtual machines.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        current = (
            pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
        )
    finally:
        pynvml.nvmlShutdown()
    rate = LANE[generation] * width * PAYLOAD
    return {"generation": generation, "width": width, "now": current, "bytes_per_s": rate}


def free_bytes(folder: str) -> int:
    """Return the free space of a file system."""
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""The fingerprint: facts besides the state that decide the bits of the next loss.

Recorded in every manifest and compared at resume: with any difference a resume is not bitwise (see
`format.exactness`). Facts that count only on GPUs are in `gpu_facts`.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# ---- GPU facts: what decides the bits on CUDA devices
#
#     gpu_facts           hardware, libraries and settings, for the fingerprint; only of a run that
#                         has tracked state on such a device
#     not_deterministic   from those facts: the settings with which two equal runs may differ, each
#                         with the line to change
#
# A fact is named after the setting itself, so that a difference names the setting to change.


CUDA = "cuda"
DRIVER = Path("/sys/module/nvidia/version")
BENCHMARK, WORKSPACE = "cudnn benchmark", "cublas workspace"
ALGORITHMS, WARN_ONLY = "deterministic algorithms", "deterministic algorithms only warn"
NCCL_VARIABLES = "nccl variables"
REPEATABLE_WORKSPACES = (":4096:8", ":16:8")  # as torch's own check has them
PINNED = ("NCCL_ALGO", "NCCL_PROTO")
# They divide a sum over channels, threads and links, and so decide the order of additions.
_NCCL = (
    *PINNED,
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_GRAPH_FILE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_TOPO_FILE",
    "NCCL_TUNER_PLUGIN",
)
_MATMUL = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")


def describe(devices: Iterable[torch.device], lib: Any = torch) -> str:
    """Return a text of the devices' hardware: "NVIDIA H100, capability 9.0, 132 SMs".

    Devices without a name of their own are called by their kind: "cpu".
    """
    texts = []
    for device in devices:
        if device.type == CUDA:
            what = lib.cuda.get_device_properties(device)
            capability, sms = f"{what.major}.{what.minor}", what.multi_processor_count
            texts.append(f"{what.name}, capability {capability}, {sms} SMs")
        else:
            texts.append(device.type)
    return " + ".join(texts)


def training_devices(devices: Sequence[torch.device]) -> list[torch.device]:
    """Return the CUDA devices among those that hold tracked state; without any, the first, or CPU.

    State on the CPU beside a GPU, such as a lookup table, does not make it another machine.
    """
    return [d for d in devices if d.type == CUDA] or list(devices[:1]) or [torch.device("cpu")]


def fp32_precision(module: Any) -> str:
    """Return "ieee", "tf32" or "bf16" of a backend, such as `torch.backends.cuda.matmul`."""
    try:
        precision = str(module.fp32_precision)
    except AttributeError:  # before torch 2.9
        return "tf32" if getattr(module, "allow_tf32", False) else "ieee"
    return "ieee" if precision == "none" else precision  # which is what torch takes it for


def gpu_facts(
    world: int,
    lib: Any = torch,
    environment: Mapping[str, str] | None = None,
    driver: Path = DRIVER,
) -> dict[str, Any]:
    """Return facts of this process's CUDA libraries and their settings, as JSON values.

    Args:
        world: Ranks.
        lib: torch, or what stands for it.
        environment: Variables; None: the process's own.
        driver: File with the version of NVIDIA's driver.
    """
    environment = os.environ if environment is None else environment
    cudnn, cuda = lib.backends.cudnn, lib.backends.cuda
    facts: dict[str, Any] = {
        "cuda": lib.version.cuda or lib.version.hip,
        "driver": _read(driver),
        "cudnn": cudnn.version(),
        "torch.backends.cudnn.enabled": cudnn.enabled,
        "torch.backends.cudnn.deterministic": cudnn.deterministic,
        BENCHMARK: cudnn.benchmark,
        WARN_ONLY: lib.is_deterministic_algorithms_warn_only_enabled(),
        WORKSPACE: environment.get("CUBLAS_WORKSPACE_CONFIG"),
        "CUBLASLT_WORKSPACE_SIZE": environment.get("CUBLASLT_WORKSPACE_SIZE"),
        "NVIDIA_TF32_OVERRIDE": environment.get("NVIDIA_TF32_OVERRIDE"),
        "torch.backends.cuda.matmul.fp32_precision": fp32_precision(cuda.matmul),
        "attention backends": [k for k in _ATTENTION if getattr(cuda, f"{k}_sdp_enabled")()],
    }
    for kind in ("conv", "rnn"):
        facts[f"torch.backends.cudnn.{kind}.fp32_precision"] = fp32_precision(
            getattr(cudnn, kind, cudnn)
        )
    for name in _MATMUL:
        if hasattr(cuda.matmul, name):
            facts[f"torch.backends.cuda.matmul.{name}"] = getattr(cuda.matmul, name)
    if hasattr(cuda, "preferred_blas_library"):
        facts["blas library"] = cuda.preferred_blas_library().name
    if world > 1 and collectives(CUDA, lib) == "nccl":
        facts["nccl version"] = ".".join(map(str, lib.cuda.nccl.version()))
        facts[NCCL_VARIABLES] = {k: environment[k] for k in _NCCL if k in environment}
    return facts


def collectives(kind: str, lib: Any = torch) -> str | None:
    """Return the backend of the default process group for a kind of device; None without one."""
    distributed = lib.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    backends = dict(
        p.split(":", 1) for p in distributed.get_backend_config().split(",") if ":" in p
    )
    return backends.get(kind)


def not_deterministic(facts: Mapping[str, Any]) -> list[str]:
    """Return why a training with these facts may not repeat itself to the bit, a sentence each.

    Two ranks add the same sum in any order, so NCCL is left to choose how.
    """
    if BENCHMARK not in facts or WARN_ONLY not in facts:
        return []
    reasons = []
    if not facts[ALGORITHMS]:
        reasons.append(
            "CUDA kernels may add up in another order each time; call "
            "torch.use_deterministic_algorithms(True)"
        )
    elif facts[WARN_ONLY]:
        reasons.append(
            "CUDA kernels that add up in another order each time are only warned of; call "
            "torch.use_deterministic_algorithms(True) without warn_only"
        )
    if facts[BENCHMARK]:
        reasons.append(
            "cuDNN times its algorithms anew in each process, and may choose others; set "
            "torch.backends.cudnn.benchmark = False"
        )
    if facts[WORKSPACE] not in REPEATABLE_WORKSPACES:
        reasons.append(
            "cuBLAS may add up in another order each time; launch with "
            f"CUBLAS_WORKSPACE_CONFIG={REPEATABLE_WORKSPACES[0]}"
        )
    variables = facts.get(NCCL_VARIABLES)
    if variables is not None and facts["world"] > 2 and not variables.keys() >= set(PINNED):
        reasons.append(
            "NCCL may choose other algorithms for its sums; launch with NCCL_ALGO=Ring "
            "NCCL_PROTO=Simple"
        )
    return reasons


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


# ---- the fingerprint


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
        ranks_devices: Each rank's devices, from `describe`; none: of this rank alone.
    """
    own = training_devices(devices)
    everyone = list(ranks_devices) or [describe(own)]
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
        "collectives": collectives(own[0].type) if world > 1 else None,
    }
    for kind in ("conv", "rnn"):
        facts[f"torch.backends.mkldnn.{kind}.fp32_precision"] = fp32_precision(
            getattr(mkldnn, kind, mkldnn)
        )
    if own[0].type == CUDA:
        facts |= gpu_facts(world)
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

"""nvidia-ml-py's `pynvml`, of one GPU that the file FAKE_GPU describes."""

# ruff: noqa: N802 - the names are the real module's
from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_DEVICE_MIG_ENABLE, NVML_FEATURE_ENABLED = 1, 1


class NVMLError(Exception):
    """Whatever it refuses."""


def _body():
    return json.loads(Path(os.environ["FAKE_GPU"]).read_text())


def nvmlInit():
    if not _body().get("nvml", True):
        raise NVMLError("Driver Not Loaded")


def nvmlSystemGetDriverVersion():
    return _body()["driver"]


def nvmlDeviceGetCount():
    return len(_body()["devices"])


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetName(handle):
    return _body()["devices"][handle]["name"]


def nvmlDeviceGetUUID(handle):
    return _body()["devices"][handle]["uuid"]


def nvmlDeviceGetMemoryInfo(handle):
    device = _body()["devices"][handle]
    return SimpleNamespace(total=device["total"], free=device["free"])


def nvmlDeviceGetMigMode(handle):
    mode = _body()["devices"][handle].get("mig")
    if mode is None:
        raise NVMLError("Not Supported")
    return [mode, mode]


def nvmlDeviceGetPersistenceMode(handle):
    return NVML_FEATURE_ENABLED


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in _body().get("used", [])]


def nvmlDeviceGetMPSComputeRunningProcesses(handle):
    return [SimpleNamespace(pid=pid, usedGpuMemory=0) for pid in _body().get("mps", [])]

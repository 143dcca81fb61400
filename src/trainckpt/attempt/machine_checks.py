"""Machine checks of `doctor`: each fact is tried where possible, with its cure."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.preemption.signals import SignalSource
from trainckpt.storage import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
OLDEST_TORCH = (2, 6)
CLONE_SINCE = "2.8"
SHM = Path("/dev/shm")  # noqa: S108 - only looked at
LEAST_SHM_BYTES = 512_000_000  # containers start with 64 MB
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
WAIT_S = 5.0


@dataclass(frozen=True)
class MachineCheck:
    """One checked fact.

    Attributes:
        name: Of the fact.
        ok: The fact is as it should be.
        value: The finding, for people.
        cure: Advice if it is not ok.
        needed: A run cannot do without.
    """

    name: str
    ok: bool
    value: str
    cure: str = ""
    needed: bool = True


def examine(size: Callable[[int], str]) -> list[MachineCheck]:
    """Return all facts of this machine, in the order in which they depend on each other.

    Args:
        size: Formats a number of bytes.
    """
    checks = [_python(), _torch()]
    if checks[-1].ok:
        checks += [_distributed(), _store(), _own_connection(), _devices()]
    return [*checks, _signals(), _memory(size), _shared_memory(size), _cores()]


def _python() -> MachineCheck:
    version = sys.version_info[:2]
    return MachineCheck(
        "python",
        OLDEST_PYTHON <= version <= NEWEST_PYTHON,
        ".".join(map(str, sys.version_info[:3])),
        "use Python 3.10 to 3.14; others were not tested",
        needed=version < OLDEST_PYTHON,
    )


def _torch() -> MachineCheck:
    try:
        version = metadata.version("torch")
        import torch  # noqa: F401 - that it loads is the question
    except (ImportError, OSError) as error:
        return MachineCheck("torch", ok=False, value=str(error), cure="pip install 'torch>=2.6'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    return MachineCheck("torch", numbers >= OLDEST_TORCH, version, "pip install -U 'torch>=2.6'")


def _distributed() -> MachineCheck:
    """Make a real group of one, which resolves the host's name; several ranks need one."""
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    name, cure = "torch.distributed", "install a torch that was built with it"
    if not dist.is_available():
        return MachineCheck(name, ok=False, value="not in this torch", cure=cure, needed=False)
    if not dist.is_gloo_available():
        return MachineCheck(
            name, ok=False, value="gloo is not in this torch", cure=cure, needed=False
        )
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        why = str(error).splitlines()[0][:120]
        cure = "name the network interface: GLOO_SOCKET_IFNAME=lo on one host"
        return MachineCheck(name, ok=False, value=f"gloo: {why}", cure=cure, needed=False)
    return MachineCheck(name, ok=True, value="gloo", needed=False)


def _store() -> MachineCheck:
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    name = "store of the ranks"
    if not dist.is_available():
        return MachineCheck(name, ok=False, value="not in this torch", needed=False)
    wait = timedelta(seconds=WAIT_S)
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=wait)
        store.set("question", "answer")
        ok = other.get("question") == b"answer"
    except RuntimeError as error:
        why = str(error).splitlines()[0][:120]
        cure = "let processes of this host connect to each other over 127.0.0.1"
        return MachineCheck(name, ok=False, value=why, cure=cure, needed=False)
    return MachineCheck(name, ok, "answers over 127.0.0.1", needed=False)


def _own_connection() -> MachineCheck:
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    has = hasattr(getattr(dist, "TCPStore", None), "clone")
    return MachineCheck(
        "TCPStore.clone",
        has,
        "each thread clones a connection" if has else "each thread opens a connection",
        f"torch {CLONE_SINCE} or later, where the ranks' store admits no second client",
        needed=False,
    )


def _devices() -> MachineCheck:
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(at) for at in range(number)}
    return MachineCheck(
        "GPUs", ok=True, value=f"{number} {', '.join(sorted(names))}".strip(), needed=False
    )


def _signals() -> MachineCheck:
    """Send this process a real signal, and receive it the way a run does."""
    number = signal.SIGTERM
    source = SignalSource(signals=(number,))
    source.start()
    try:
        if not source.available:
            cure = "make the Checkpointer on the main thread; notice files are heard anywhere"
            return MachineCheck("signals", ok=False, value=source.why, cure=cure, needed=False)
        signal.raise_signal(number)
        until = time.monotonic() + WAIT_S
        while not (heard := source.poll()) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        source.stop()
    value = f"{heard[0].reason} is heard" if heard else f"{number.name} is not heard"
    return MachineCheck(
        "signals", bool(heard), value, "unblock signals before the script is started"
    )


def _memory(size: Callable[[int], str]) -> MachineCheck:
    limit = host_memory.limit_bytes()
    if limit is None:
        return MachineCheck("memory", ok=True, value="not known", needed=False)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    value = f"{size(limit)}, by the cgroup, of {size(host)}" if limit < host else size(host)
    return MachineCheck("memory", ok=True, value=value, needed=False)


def _shared_memory(size: Callable[[int], str]) -> MachineCheck:
    if not SHM.is_dir():
        return MachineCheck(
            "shared memory",
            ok=False,
            value=f"no {SHM}",
            needed=False,
            cure=f"mount a tmpfs at {SHM}; data loader workers need one",
        )
    usage = shutil.disk_usage(SHM)
    return MachineCheck(
        "shared memory",
        usage.free >= LEAST_SHM_BYTES,
        f"{size(usage.free)} free of {size(usage.total)} in {SHM}",
        "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir of medium Memory there",
        needed=False,
    )


def _cores() -> MachineCheck:
    host_cores = os.cpu_count() or 1
    usable_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host_cores
    value = f"{usable_cores} of {host_cores}"
    try:
        quota, period = CPU_QUOTA.read_text(encoding="utf-8").split()
        if quota.isdecimal():
            value += f", {int(quota) / int(period):g} by the cgroup's quota"
    except (OSError, ValueError):
        pass
    return MachineCheck("cores", ok=True, value=value, needed=False)

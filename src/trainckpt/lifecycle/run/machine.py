"""What this machine can do for a run: each fact tried where it can be, with its cure."""

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
from trainckpt.tiers import host_memory, large_pages, memfd, past_cache, userfault
from trainckpt.tiers.direct import HUGE_BYTES, memory

if TYPE_CHECKING:
    from collections.abc import Callable

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
OLDEST_TORCH = (2, 6)
CLONE_SINCE = "2.8"
SHM = Path("/dev/shm")  # noqa: S108 - only looked at
LEAST_SHM_BYTES = 512_000_000  # containers start with 64 MB
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
WAIT_S = 5.0
TRIED_PAGES = 64


@dataclass(frozen=True)
class Item:
    """One fact.

    Attributes:
        name: Of what was looked at.
        ok: Whether it is as it should be.
        value: What was found, for people.
        cure: What to do if it is not ok.
        needed: Whether a run cannot do without.
    """

    name: str
    ok: bool
    value: str
    cure: str = ""
    needed: bool = True


def examine(size: Callable[[int], str]) -> list[Item]:
    """All facts of this machine, in the order in which they depend on each other.

    Args:
        size: Spells a number of bytes.
    """
    found = [_python(), _torch()]
    if found[-1].ok:
        found += [_distributed(), _store(), _own_connection(), _devices()]
    pages = large_pages_of(), fresh_memory_of(), copies_of()
    return [*found, _signals(), _memory(size), *pages, _shared_memory(size), _cores()]


def _python() -> Item:
    version = sys.version_info[:2]
    return Item(
        "python",
        OLDEST_PYTHON <= version <= NEWEST_PYTHON,
        ".".join(map(str, sys.version_info[:3])),
        "use Python 3.10 to 3.14; others were not tested",
        needed=version < OLDEST_PYTHON,
    )


def _torch() -> Item:
    try:
        version = metadata.version("torch")
        import torch  # noqa: F401 - that it loads is the question
    except (ImportError, OSError) as error:
        return Item("torch", ok=False, value=str(error), cure="pip install 'torch>=2.6'")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())
    return Item("torch", numbers >= OLDEST_TORCH, version, "pip install -U 'torch>=2.6'")


def _distributed() -> Item:
    """More than one rank needs it; a real group of one is made, which resolves the host's name."""
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    name, cure = "torch.distributed", "install a torch that was built with it"
    if not dist.is_available():
        return Item(name, ok=False, value="not in this torch", cure=cure, needed=False)
    if not dist.is_gloo_available():
        return Item(name, ok=False, value="gloo is not in this torch", cure=cure, needed=False)
    try:
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        why = str(error).splitlines()[0][:120]
        cure = "name the network interface: GLOO_SOCKET_IFNAME=lo on one host"
        return Item(name, ok=False, value=f"gloo: {why}", cure=cure, needed=False)
    return Item(name, ok=True, value="gloo", needed=False)


def _store() -> Item:
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    name = "store of the ranks"
    if not dist.is_available():
        return Item(name, ok=False, value="not in this torch", needed=False)
    wait = timedelta(seconds=WAIT_S)
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
        other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=wait)
        store.set("question", "answer")
        found = other.get("question") == b"answer"
    except RuntimeError as error:
        why = str(error).splitlines()[0][:120]
        cure = "let processes of this host connect to each other over 127.0.0.1"
        return Item(name, ok=False, value=why, cure=cure, needed=False)
    return Item(name, found, "answers over 127.0.0.1", needed=False)


def _own_connection() -> Item:
    dist: Any = import_module("torch.distributed")  # its classes lack annotations

    has = hasattr(getattr(dist, "TCPStore", None), "clone")
    return Item(
        "TCPStore.clone",
        has,
        "each thread clones a connection" if has else "each thread opens a connection",
        f"torch {CLONE_SINCE} or later, where the ranks' store admits no second client",
        needed=False,
    )


def _devices() -> Item:
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(at) for at in range(number)}
    return Item("GPUs", ok=True, value=f"{number} {', '.join(sorted(names))}".strip(), needed=False)


def _signals() -> Item:
    """A real signal to ourselves, heard the way a run hears one."""
    number = signal.SIGTERM
    source = SignalSource(signals=(number,))
    source.start()
    try:
        if not source.available:
            cure = "make the Checkpointer on the main thread; notice files are heard anywhere"
            return Item("signals", ok=False, value=source.why, cure=cure, needed=False)
        signal.raise_signal(number)
        until = time.monotonic() + WAIT_S
        while not (heard := source.poll()) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        source.stop()
    value = f"{heard[0].reason} is heard" if heard else f"{number.name} is not heard"
    return Item("signals", bool(heard), value, "unblock signals before the script is started")


def _memory(size: Callable[[int], str]) -> Item:
    limit = host_memory.limit_bytes()
    if limit is None:
        return Item("memory", ok=True, value="not known", needed=False)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    value = f"{size(limit)}, by the cgroup, of {size(host)}" if limit < host else size(host)
    return Item("memory", ok=True, value=value, needed=False)


def large_pages_of(settings: Path = large_pages.SETTINGS) -> Item:
    """Of what a restore makes its fresh memory; those of 2 MiB are tried if there are no others."""
    name, found = "large pages", large_pages.given(settings)
    middle = min((size for size in found if size < HUGE_BYTES), default=None)
    if middle is not None:
        return Item(name, ok=True, value=f"from {middle >> 10} KiB on", needed=False)
    value, pages = "none", large_pages.LargePages(settings)
    if pages.huge:
        pages.prepare(memory(TRIED_PAGES * HUGE_BYTES))
        value = "2 MiB, which come slowly here" if pages.is_slow else "2 MiB"
    elif HUGE_BYTES in found:
        value = "2 MiB, for everybody"
    cure = f"as root: echo madvise > {settings}/hugepages-64kB/enabled (Linux 6.8 and later)"
    ok = HUGE_BYTES in found and not pages.is_slow
    return Item(name, ok, value, cure, needed=False)


def fresh_memory_of() -> Item:
    """How a restore fills what it makes of small pages."""
    name = "fresh memory"
    if large_pages.large_pages().come_by_themselves:
        return Item(name, ok=True, value="is made of large pages", needed=False)
    if userfault.is_available():
        return Item(name, ok=True, value="is made with what is read (userfaultfd)", needed=False)
    cure = "let programs call userfaultfd (Linux 5.11 and later; a container's seccomp profile)"
    return Item(name, ok=False, value="is made a page at a time", cure=cure, needed=False)


def copies_of() -> Item:
    """How large tensors are copied while training waits."""
    name = "copies"
    if past_cache.functions() is not None:
        return Item(name, ok=True, value="go past the cache", needed=False)
    ok, cure = not past_cache.is_for_this_machine(), "pip install 'stringzilla>=5.0'"
    return Item(name, ok, "go through the cache", cure, needed=False)


def _shared_memory(size: Callable[[int], str]) -> Item:
    if not SHM.is_dir():
        return Item("shared memory", ok=False, value=f"no {SHM}", needed=False,
                    cure=f"mount a tmpfs at {SHM}; data loader workers need one")  # fmt: skip
    usage = shutil.disk_usage(SHM)
    enough = usage.free >= LEAST_SHM_BYTES
    beyond = "" if enough or not memfd.is_available() else "; `trainckpt run` holds what needs more"
    return Item(
        "shared memory",
        enough,
        f"{size(usage.free)} free of {size(usage.total)} in {SHM}{beyond}",
        "docker run --shm-size=8g, or --ipc=host; in Kubernetes an emptyDir of medium Memory there",
        needed=False,
    )


def _cores() -> Item:
    here = os.cpu_count() or 1
    ours = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else here
    value = f"{ours} of {here}"
    try:
        quota, period = CPU_QUOTA.read_text(encoding="utf-8").split()
        if quota.isdecimal():
            value += f", {int(quota) / int(period):g} by the cgroup's quota"
    except (OSError, ValueError):
        pass
    return Item("cores", ok=True, value=value, needed=False)

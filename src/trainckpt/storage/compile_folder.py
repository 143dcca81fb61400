"""The private folder on this host for the compile caches of torch.compile and Triton.

    /var/tmp/trainckpt-<uid>/compile/<toolchain>/
        shared/         of all commands of this user
        <command>/      of one command alone, copied through the tiers
            inductor/   TORCHINDUCTOR_CACHE_DIR
            triton/     TRITON_CACHE_DIR

torch's default, /tmp/torchinductor_<user>, is lost with a job's private /tmp and at a reboot, and
another user may have made it. /var/tmp is on a local disk and survives both. TRAINCKPT_CACHE names
another folder than /var/tmp/trainckpt-<uid>.

torch loads what it finds there without a check: pickles, and machine code for one processor and C
library. So the folder is closed to other users, and `toolchain` is the digest of all that the code
depends on: another processor, system or version begins with an empty folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import threading
import time
from importlib import metadata
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from trainckpt.format import json_io
from trainckpt.storage.local import TEMPORARY
from trainckpt.storage.private_files import must_be_private

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INDUCTOR_VARIABLE, TRITON_VARIABLE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
ROOT_VARIABLE = "TRAINCKPT_CACHE"
SHARED = "shared"
_INDUCTOR, _TRITON = "inductor", "triton"
_COMPILE = "compile"
DAY_S = 24 * 3600.0
MOST_IDLE_S = 60 * DAY_S  # since the last launch
MOST_TEMPORARY_S = DAY_S  # for a fetch to unpack a folder, beside its place
_NUM_HEX = 32
_TOOLCHAIN = re.compile(rf"[0-9a-f]{{{_NUM_HEX}}}")
_COMMAND = re.compile(rf"{SHARED}|[0-9a-f]{{16}}")  # see `attempt.launch.command_hash`
_FIRST_CPU = 1 << 14  # bytes with the first of many processors
_PACKAGES = ("torch", "triton", "pytorch-triton")
# Lines of /proc/cpuinfo with the processor's model and instructions, on x86 and ARM.
_CPU_LINES = {
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
}


def variables(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make torch and Triton use a folder of this host.

    Args:
        folder: `SHARED`, or a name for one command.
        environment: Of the command; empty is returned if it names a folder for either cache.

    Raises:
        OSError: the folder cannot be made, is open to other users, or may hold no programs.
    """
    if INDUCTOR_VARIABLE in environment or TRITON_VARIABLE in environment:
        return {}
    place = cache_root(environment)
    must_be_private(place)
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        raise OSError(errno.EACCES, f"{place} is on a file system mounted with noexec")
    for name in (_COMPILE, toolchain(), folder):
        place = place / name
        must_be_private(place)
    os.utime(place)
    _remove_idle(cache_root(environment) / _COMPILE, time.time())
    return {INDUCTOR_VARIABLE: str(place / _INDUCTOR), TRITON_VARIABLE: str(place / _TRITON)}


@contextlib.contextmanager
def in_use(environment: Mapping[str, str]) -> Iterator[None]:
    """Renew the time of a launch's folder, now and each day of the block, so that it stays."""
    folder, ended = folder_in_use(environment), threading.Event()

    def renew_daily(folder: Path) -> None:
        while not ended.wait(DAY_S):
            _renew(folder)

    if folder is not None:
        _renew(folder)
        name = "trainckpt-compile-folder"
        with contextlib.suppress(RuntimeError):  # no thread left: then it is renewed once
            threading.Thread(target=renew_daily, args=(folder,), name=name, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _renew(folder: Path) -> None:
    with contextlib.suppress(OSError):
        os.utime(folder)


def _remove_idle(folder: Path, now_s: float) -> None:
    """Remove folders of commands without a launch for long, and remains of dead writers."""
    for place in folder.glob("*/*"):
        if not _TOOLCHAIN.fullmatch(place.parent.name):
            continue
        limit_s = MOST_IDLE_S if _COMMAND.fullmatch(place.name) else None
        limit_s = MOST_TEMPORARY_S if place.name.startswith(TEMPORARY) else limit_s
        with contextlib.suppress(OSError):
            status = place.lstat()
            if limit_s is None or status.st_mtime >= now_s - limit_s:
                continue
            if S_ISDIR(status.st_mode):
                shutil.rmtree(place)
            else:
                place.unlink()


def cache_root(environment: Mapping[str, str]) -> Path:
    """Return this user's folder for caches of this host."""
    named = environment.get(ROOT_VARIABLE)
    return Path(named).absolute() if named else Path(f"/var/tmp/trainckpt-{os.getuid()}")  # noqa: S108


def folder_in_use(environment: Mapping[str, str]) -> Path | None:
    """Return the folder set by `variables`; None if the caches lie elsewhere."""
    folder = Path(environment.get(INDUCTOR_VARIABLE, "")).parent
    inside = cache_root(environment) / _COMPILE
    return folder if folder.parent.parent == inside else None


def is_ours(name: str, environment: Mapping[str, str]) -> bool:
    """Return True if the variable was set by `variables`: a fact of this host, not of the run."""
    if name not in (INDUCTOR_VARIABLE, TRITON_VARIABLE):
        return False
    inside = cache_root(environment) / _COMPILE
    return inside in Path(environment.get(name, "")).parents


def toolchain() -> str:
    """Return the digest of what compiled code depends on, as 32 hex digits."""
    facts = {
        "python": [platform.python_implementation(), platform.python_version()],
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": platform.machine(),
        "cpu": cpu_facts(_text(Path("/proc/cpuinfo"), _FIRST_CPU)),
        "c library": list(platform.libc_ver()),
        "system": _text(Path("/etc/os-release")),
        "gpus": _gpu_models(),
        "gpu driver": _text(Path("/sys/module/nvidia/version")),
    }
    return hashlib.sha256(json_io.canonical(facts)).hexdigest()[:_NUM_HEX]


def cpu_facts(cpuinfo: str) -> dict[str, str]:
    """Return model and instructions of the first processor, from /proc/cpuinfo. Pure."""
    first = cpuinfo.split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip() in _CPU_LINES}


def _gpu_models() -> list[str]:
    """Return the models of NVIDIA's GPUs. torch's own keys have the one that a graph is for."""
    texts = map(_text, Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = {line.strip() for text in texts for line in text.splitlines()}
    return sorted(line for line in lines if line.startswith("Model:"))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path, num_chars: int = -1) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(num_chars).strip()
    except OSError:
        return ""

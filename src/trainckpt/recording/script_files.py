"""Protect a script's files from its proof: back up tracked files, and record other writes.

A script under proof writes to its own files, whatever name it opens them by: only the run directory
can be moved elsewhere. So each file is copied when the proof tracks it first, and restored at the
end.

    <file>.before-proof    beside the file; an existing one is from a proof that was killed
    <folder>/<digest>      in the proof's folder: the file's path, and if it existed

The file itself is cut back or written over, never replaced: others may have it open.

`record_writes` lists the files written outside the proof's own folder. Python reports every file
opened for writing, and every new folder, to the audit hooks of its process (PEP 578). A library's
own writes, such as `torch.save(x, path)`, are seen only by the new folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.tracked_files import TrackedFiles
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.state.registry import Registry


SUFFIX, FOLDER = ".before-proof", "files"
PIECE = 1 << 20


def tracked_files(registry: Registry, run: str | os.PathLike[str] | None) -> TrackedFiles:
    """Return the files of this rank; a proof backs each up before anything is done to it.

    Args:
        registry: The tracked state.
        run: The user's own run directory, which a proof leaves alone.
    """
    return TrackedFiles(registry, _backup_hook(run))


def _backup_hook(run: str | os.PathLike[str] | None) -> Callable[[Path], None] | None:
    plan = json.loads(os.environ.get(run_url.PROVE_VARIABLE) or "{}")
    if FOLDER not in plan:
        return None
    folder = Path(plan[FOLDER])
    own = run if run is not None else os.environ.get(run_url.NAME_VARIABLE)

    def keep(path: Path) -> None:
        path = path.resolve()  # the proof works in a folder of links to the user's files
        note = folder / hashlib.sha256(os.fsencode(path)).hexdigest()
        if note.exists():  # an earlier attempt of this proof has
            return
        _refuse(path, own)
        folder.mkdir(parents=True, exist_ok=True)
        is_there = path.exists()
        if is_there:
            _copy(path)
        note.write_text(json.dumps({"path": str(path), "is_there": is_there}), encoding="utf-8")

    return keep


def restore_files(folder: Path) -> list[str]:
    """Restore the files at the end of a proof, however it ends; return a sentence per changed
    file."""
    sentences = []
    for note in sorted(folder.glob("*")):
        record = json.loads(note.read_text(encoding="utf-8"))
        path = Path(record["path"])
        try:
            changed = _restore(path) if record["is_there"] else _remove(path)
        except OSError as error:
            sentences.append(
                f"{path} could not be put back ({error.strerror or error}): what it held is in "
                f"{path}{SUFFIX}"
            )
            continue
        note.unlink()
        if changed:
            sentences.append(f"{path} {changed}")
    return sentences


def _refuse(path: Path, run: str | os.PathLike[str] | None) -> None:
    copy = Path(f"{path}{SUFFIX}")
    if copy.exists():
        raise ConfigurationError(
            f"{copy} is what {path.name} held before another proof, which was killed or still runs",
            hint=f"once none runs: mv {copy} {path}; or delete it, if the file is right as it is",
        )
    if run is not None and _is_training(run):
        raise ConfigurationError(
            f"{os.fspath(run)} is training, and a proof would write to its file {path}",
            hint="prove the script when the run has ended, or a copy of it that writes elsewhere",
        )


def _is_training(run: str | os.PathLike[str]) -> bool:
    with suppress(TrainckptError, OSError):
        tier = run_url.open_tier_at(run)
        newest = attempt_history.newest(tier)
        record = attempt_history.read_attempt(tier, newest)
        return (
            record is not None
            and record.outcome is None
            and heartbeat.attempt_is_alive(tier, newest)
        )
    return False


def _copy(path: Path) -> None:
    """Copy the file beside itself; the copy is whole, or absent."""
    unfinished = Path(f"{path}{SUFFIX}.part")
    shutil.copy2(path, unfinished)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.rename(f"{path}{SUFFIX}")


def _restore(path: Path) -> str:
    copy = Path(f"{path}{SUFFIX}")
    length = copy.stat().st_size
    changed = not path.exists() or path.stat().st_size != length
    path.touch()  # the script may have removed it
    with copy.open("rb") as source, path.open("r+b") as file:
        while piece := source.read(PIECE):
            if file.read(len(piece)) != piece:
                file.seek(source.tell() - len(piece))
                file.write(piece)
                changed = True
        file.truncate(length)
        file.flush()
        os.fsync(file.fileno())
    copy.unlink()
    return f"holds again the {length} bytes it held before" if changed else ""


def _remove(path: Path) -> str:
    if not path.exists():
        return ""
    path.unlink()
    return "is removed: it was not there before"


NAME = "written"
PROOF_FOLDER = "folder"  # the proof's own, in its plan
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_TEMPORARY = ("tmp", "torch", "pymp-", "trainckpt")  # prefixes of libraries' temporary files


def record_writes(into: Path, own: Path) -> None:
    """Append to `<into>/written-<pid>.jsonl` each path outside `own` that this process writes.

    Caches and temporary files are left out. The hook stays until the process ends.
    """
    file = os.open(into / f"{NAME}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    temporary = os.path.realpath(tempfile.gettempdir())
    folders = [f"{os.path.realpath(folder)}/" for folder in (own, cache)]
    ignored = (*_SYSTEM, *folders, *(f"{temporary}/{name}" for name in _TEMPORARY))
    seen: set[str] = set()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = _written(event, arguments)
        if path is None:
            return
        real = os.path.realpath(os.fsdecode(path))
        is_new_folder = event != "os.mkdir" or not os.path.lexists(real)
        if real in seen or real.startswith(ignored) or "/__pycache__/" in real or not is_new_folder:
            return
        seen.add(real)
        os.write(file, json.dumps(real).encode() + b"\n")

    sys.addaudithook(hook)


def read_written(folder: Path) -> list[str]:
    """Return the recorded paths that still exist; for a new folder, only the folder itself."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob(f"{NAME}-*.jsonl")]
    paths = {Path(json.loads(line)) for text in texts for line in text.splitlines()}
    whole = [path for path in sorted(paths) if not paths & set(path.parents)]
    return [str(path) for path in whole if os.path.lexists(path)]


def _written(event: str, arguments: tuple[Any, ...]) -> Any:
    """Return the path that this event writes, or None."""
    if event == "open":
        path, _, flags = arguments
        is_path = isinstance(path, (str, bytes, os.PathLike))
        return path if is_path and isinstance(flags, int) and flags & _WRITES else None
    if event == "os.mkdir":
        return arguments[0]
    return arguments[1] if event == "os.rename" else None

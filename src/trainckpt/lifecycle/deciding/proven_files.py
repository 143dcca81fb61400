"""What tracked files hold before a proof, and that they hold it again after it.

A script under proof writes to its own files, whatever name it opens them by: only the run's place
can be moved elsewhere. So each file is copied when the proof tracks it first, and put back at the
end.

    <file>.before-proof    beside it; one that is there already is of a proof that was killed
    <folder>/<digest>      in the proof's folder: the file's path, and whether it was there

The file itself is cut back or written over, never replaced: others may have it open.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.run import heartbeat
from trainckpt.lifecycle.run.tracked_files import TrackedFiles
from trainckpt.snapshot import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.state.registry import Registry

SUFFIX, FOLDER = ".before-proof", "files"
PIECE = 1 << 20


def tracked_files(registry: Registry, run: str | os.PathLike[str] | None) -> TrackedFiles:
    """The files of this rank; in a proof, what each holds is kept before anything is done to it.

    Args:
        registry: Of what is tracked.
        run: The user's own place of the run, which a proof leaves alone.
    """
    return TrackedFiles(registry, _keeper(run))


def _keeper(run: str | os.PathLike[str] | None) -> Callable[[Path], None] | None:
    plan = json.loads(os.environ.get(place.PROVE_VARIABLE) or "{}")
    if FOLDER not in plan:
        return None
    folder = Path(plan[FOLDER])
    own = run if run is not None else os.environ.get(place.NAME_VARIABLE)

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


def put_back(folder: Path) -> list[str]:
    """At the end of a proof, however it ends: a sentence for each file that had changed."""
    said = []
    for note in sorted(folder.glob("*")):
        told = json.loads(note.read_text(encoding="utf-8"))
        path = Path(told["path"])
        try:
            changed = _restore(path) if told["is_there"] else _remove(path)
        except OSError as error:
            said.append(
                f"{path} could not be put back ({error.strerror or error}): what it held is in "
                f"{path}{SUFFIX}"
            )
            continue
        note.unlink()
        if changed:
            said.append(f"{path} {changed}")
    return said


def _refuse(path: Path, run: str | os.PathLike[str] | None) -> None:
    copy = Path(f"{path}{SUFFIX}")
    if copy.exists():
        raise ConfigurationError(
            f"{copy} is what {path.name} held before another proof, which was killed or still runs",
            hint=f"once none runs: mv {copy} {path}; or delete it, if the file is right as it is",
        )
    if run is not None and _lives(run):
        raise ConfigurationError(
            f"{os.fspath(run)} is training, and a proof would write to its file {path}",
            hint="prove the script when the run has ended, or a copy of it that writes elsewhere",
        )


def _lives(run: str | os.PathLike[str]) -> bool:
    with suppress(TrainckptError, OSError):
        tier = place.open_other_place(run)
        newest = attempts.newest(tier)
        record = attempts.read_attempts(tier).get(newest) if newest else None
        return record is not None and record.outcome is None and heartbeat.is_alive(tier, newest)
    return False


def _copy(path: Path) -> None:
    """Whole, or not there."""
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

"""Record a run from inside it for `trainckpt prove`.

With TRAINCKPT_PROVE set (a JSON object, set by `prove` alone) each rank appends to
`<dir>/rank<r>.jsonl` one line a boundary, with a digest of every part of its state, and one line a
batch. It also strikes: at a given micro-batch one rank sends itself the planned signal, a real one,
and the others hold still until the notice has arrived, so that a proof is repeatable.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import heartbeat
from trainckpt.attempt.tracked_files import TrackedFiles
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format.digest import digest
from trainckpt.format.json_io import canonical
from trainckpt.run_directory import run_url
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.snapshot import attempt_history
from trainckpt.state import staging, values
from trainckpt.state.adapters import requires_grad
from trainckpt.state.adapters.tracked_file import PART as FILES
from trainckpt.state.capture import capture
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from trainckpt.format.cursor import Cursor
    from trainckpt.state.registry import Registry


# ---- Protect a script's files from its proof: back up tracked files, and record other writes.
#
# A script under proof writes to its own files, whatever name it opens them by: only the run
# directory can be moved elsewhere. So each file is copied when the proof tracks it first, and
# restored at the end.
#
#     <file>.before-proof    beside the file; an existing one is from a proof that was killed
#     <folder>/<digest>      in the proof's folder: the file's path, and if it existed
#
# The file itself is cut back or written over, never replaced: others may have it open.
#
# `record_writes` lists the files written outside the proof's own folder. Python reports every file
# opened for writing, and every new folder, to the audit hooks of its process (PEP 578). A library's
# own writes, such as `torch.save(x, path)`, are seen only by the new folder.


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
    if run is not None and _is_training(run):
        raise ConfigurationError(
            f"{os.fspath(run)} is training, and a proof would write to its file {path}",
            hint="prove the script when the run has ended, or a copy of it that writes elsewhere",
        )


def _is_training(run: str | os.PathLike[str]) -> bool:
    with suppress(TrainckptError, OSError):
        tier = run_url.open_other_place(run)
        newest = attempt_history.newest(tier)
        record = attempt_history.read_attempts(tier).get(newest) if newest else None
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


HOLD_S = 15.0


class Recorder:
    """Append digests of this rank's state and batches, and strike as planned."""

    def __init__(self, plan: dict[str, Any], rank: int, registry: Registry) -> None:
        self._rank = rank
        self._registry = registry
        self._strike = plan.get("strike") or {}
        self._at = 0
        folder = Path(plan["dir"])
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = os.open(
            folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    def boundary(self, cursor: Cursor, *, evaluation: bool) -> None:
        """Append the digests of the state as it is at this boundary."""
        self._at = cursor.micro_batches
        line = {
            "at": self._at,
            "evaluation": evaluation,
            "in_pass": any(kind.loader.in_pass for kind in self._registry.loaders[:1]),
            "cursor": cursor.to_json(),
            "parts": state_digests(self._registry),
        }
        self._append(line)

    def batch(self, batch: Any) -> None:
        """Append the digest of the batch to be trained next."""
        self._append({"at": self._at, "batch": batch_digest(batch)})

    def strike(self, cursor: Cursor, has_open_round: Callable[[], bool]) -> None:
        """Send the signal if planned here, and hold until the notice has arrived."""
        if cursor.micro_batches != self._strike.get("at") or (self._folder / "struck").exists():
            return
        number = signal.Signals[self._strike["signal"]]
        if self._rank == self._strike["rank"]:
            if number == signal.SIGKILL:
                (self._folder / "struck").touch()
            os.kill(os.getpid(), number)
        until = time.monotonic() + HOLD_S
        while not has_open_round() and time.monotonic() < until:
            time.sleep(0.001)

    def _append(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def recorder_from_environment(rank: int, registry: Registry) -> Recorder | None:
    """Return a recorder if `prove` launched this process, else None."""
    text = os.environ.get(PROVE_VARIABLE, "")
    if not text:
        return None
    plan = json.loads(text)
    recorder = Recorder(plan, rank, registry)
    if PROOF_FOLDER in plan:
        record_writes(Path(plan["dir"]), Path(plan[PROOF_FOLDER]))
    return recorder


def state_digests(registry: Registry) -> dict[str, str]:
    """Return part of the state -> description, over the whole contents of a snapshot.

    The description is type, shape and digest of a tensor, the text of a short value, else a digest.
    Untracked objects that look relevant are named too: they are often the reason that a resumed run
    differs. `prove/compare.py` knows the common name of each part.
    """
    captured = capture(registry)
    kinds = {f"{m.name} {kind}s": f"{kind}/" for m in registry.models for kind in _OF_MODELS}
    found = {
        kinds.get(captured.groups.get(name, ""), "") + name: _tensor_text(tensor)
        for name, tensor in captured.tensors.items()
    }
    optimizers = {optimizer.name for optimizer in registry.optimizers}
    models = {model.name for model in registry.models}
    for part, tree in captured.values.items():
        if part == FILES:
            continue  # every run of a proof appends to the same files
        rest = tree
        if part in models:  # attributes set in each micro-batch may differ
            rest = {key: value for key, value in tree.items() if key != requires_grad.KEY}
        if part in optimizers:
            rest = {key: value for key, value in tree.items() if key != "state"}
            for parameter, pairs in tree["state"].items():
                for key, value in pairs:
                    found.update(_texts(value, f"{part}/{parameter}/{key}"))
        found.update(_texts(rest, part))
    for name, digests in untracked(registry).items():
        found[f"{name}, which is not tracked"] = digest(canonical(digests))
    streams = [loader.name for loader in registry.loaders if loader.loader.is_stream]
    return {part: text for part, text in found.items() if not _is_place_in(part, streams)}


def _is_place_in(part: str, streams: Sequence[str]) -> bool:
    """Return True for a stream's report on its own position.

    A resumed stream may spell the same position otherwise. Its batches show if it is the same.
    """
    return any(re.match(rf"{name}[./](own|trial|last end)\b", part) for name in streams)


_OF_MODELS = ("parameter", "buffer")
SHOWN_CHARACTERS = 40


def _texts(tree: Any, part: str) -> dict[str, str]:
    return {
        path: text if len(text) <= SHOWN_CHARACTERS else digest(text.encode())
        for path, text in values.leaves(tree, part).items()
    }


def _tensor_text(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    return f"{kind}[{shape}] {staging.tensor_digest(tensor)}"


def batch_digest(batch: Any) -> str:
    """Return the digest of all digestible parts of a batch."""
    seen = Captured()
    try:
        tree = seen.encode(batch, "batch")
    except TrainckptError:
        return f"a {type(batch).__name__} that cannot be compared"
    parts = [staging.tensor_digest(tensor) for tensor in seen.tensors.values()]
    return digest(canonical([tree, parts]))


def untracked(registry: Registry) -> dict[str, list[str]]:
    """Return class -> digests of its living, unregistered objects with state.

    Schedulers, optimizers, scalers, and modules with tensors outside every tracked model.
    """
    import gc

    import torch

    kinds: tuple[type, ...] = (
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.Optimizer,
        torch.amp.GradScaler,
    )
    objects = [o for o in gc.get_objects() if issubclass(type(o), (*kinds, torch.nn.Module))]
    modules = [o for o in objects if isinstance(o, torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    ours = {id(t) for model in registry.models for t in _tensors(model.wrapped).values()}
    found: dict[str, list[str]] = {}
    for candidate in objects:
        if registry.tracks(candidate):
            continue
        state: dict[str, Any] = {}
        if isinstance(candidate, kinds):
            state = candidate.state_dict()  # type: ignore[attr-defined]
        elif id(candidate) not in inner:
            state = {k: t for k, t in _tensors(candidate).items() if id(t) not in ours}
        text = _digest_of(state) if state else ""
        if text:
            found.setdefault(type(candidate).__name__, []).append(text)
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest_of(state: dict[str, Any]) -> str:
    seen = Captured()
    try:
        tree = seen.encode(state, "untracked")
    except (TrainckptError, RuntimeError):
        return ""  # of an untrackable kind
    return digest(canonical([tree, [staging.tensor_digest(t) for t in seen.tensors.values()]]))

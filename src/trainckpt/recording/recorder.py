"""Record a run from inside it for `trainckpt prove`.

With TRAINCKPT_PROVE set (a JSON object, set by `prove` alone) each rank appends to
`<dir>/rank<r>.jsonl` one line a boundary, with a digest of every part of its state, and one line a
batch. It also strikes: at a given micro-batch one rank sends itself the planned signal, a real one,
and the others hold still until the notice has arrived, so that a proof is repeatable.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.format.digest import digest
from trainckpt.format.json_io import canonical
from trainckpt.recording.script_files import PROOF_FOLDER, record_writes
from trainckpt.run_directory.run_url import PROVE_VARIABLE
from trainckpt.state import script_variables, staging, values
from trainckpt.state.adapters.model import FROZEN, MODES
from trainckpt.state.adapters.tracked_file import PART as FILES
from trainckpt.state.adapters.tracked_run import PART as RUNS
from trainckpt.state.capture import capture
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trainckpt.format.cursor import Cursor
    from trainckpt.state.registry import Registry

HOLD_S = 15.0


class Recorder:
    """Append digests of this rank's state and batches, and strike as planned."""

    def __init__(self, plan: dict[str, Any], rank: int, registry: Registry) -> None:
        self._rank = rank
        self._registry = registry
        self._strike = plan.get("strike") or {}
        self._at = 0
        self._folder = Path(plan["dir"])
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = self._folder / f"rank{rank}.jsonl"
        self._file = os.open(lines, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

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
        if part in (FILES, RUNS, script_variables.PART):
            continue  # files are common to all runs of a proof; variables are often only printed
        rest = tree
        if part in models:  # attributes set in each micro-batch may differ
            rest = {key: value for key, value in tree.items() if key not in (FROZEN, MODES)}
        if part in optimizers:
            rest = {key: value for key, value in tree.items() if key != "state"}
            for parameter, pairs in tree["state"].items():
                for key, value in pairs:
                    found.update(_texts(value, f"{part}/{parameter}/{key}"))
        found.update(_texts(rest, part))
    for name, digests in untracked(registry).items():
        found[f"{name}, which is not tracked"] = digest(canonical(digests))
    # A resumed stream may spell the same position otherwise. Its batches show if it is the same.
    streams = "|".join(re.escape(kind.name) for kind in registry.loaders if kind.loader.is_stream)
    position = re.compile(rf"({streams})[./](own|trial|last end)\b")
    return {part: text for part, text in found.items() if not (streams and position.match(part))}


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
    return _digest_of(batch) or f"a {type(batch).__name__} that cannot be compared"


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
        if state and (text := _digest_of(state)):
            found.setdefault(type(candidate).__name__, []).append(text)
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest_of(value: Any) -> str:
    """Return the digest of a value with tensors; "" if it is of a kind that cannot be tracked."""
    seen = Captured()
    try:
        tree = seen.encode(value, "value")
    except (TrainckptError, RuntimeError):
        return ""
    return digest(canonical([tree, [staging.tensor_digest(t) for t in seen.tensors.values()]]))

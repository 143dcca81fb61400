"""The recorder: what `trainckpt prove` sees of a run, from inside it.

With TRAINCKPT_PROVE set (a JSON object, set by `prove` alone) each rank appends to
`<dir>/rank<r>.jsonl` one line a boundary, with a digest of every part of its state, and one line
a batch. It also strikes: at a given micro-batch one rank sends itself the planned signal, a real
one, and the others hold still until the notice has arrived, so that a proof is repeatable.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import TrainckptError
from trainckpt.format.digest import digest
from trainckpt.format.strict import canonical
from trainckpt.lifecycle.place import PROVE_VARIABLE
from trainckpt.state import stage, values
from trainckpt.state.capture import capture
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.cursor import Cursor
    from trainckpt.state.registry import Registry

HOLD_S = 15.0


class Recorder:
    """Appends digests of this rank's state and batches, and strikes as planned."""

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
            "cursor": cursor.to_json(),
            "parts": state_digests(self._registry),
        }
        self._append(line)

    def batch(self, batch: Any) -> None:
        """Append the digest of the batch that is trained next."""
        self._append({"at": self._at, "batch": batch_digest(batch)})

    def strike(self, cursor: Cursor, has_open_round: Callable[[], bool]) -> None:
        """If the plan says so: send the signal, and hold until it has been noticed."""
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
    """A recorder if `prove` launched this process, else None."""
    text = os.environ.get(PROVE_VARIABLE, "")
    return Recorder(json.loads(text), rank, registry) if text else None


def state_digests(registry: Registry) -> dict[str, str]:
    """Readable part of the state -> digest, over everything a snapshot would hold.

    Parts that are not tracked but look as if they should be are named too: they are often what
    makes a resumed run differ.
    """
    captured = capture(registry)
    found = {name: stage.tensor_digest(tensor) for name, tensor in captured.tensors.items()}
    for part, tree in captured.values.items():
        for path, text in values.leaves(tree, part).items():
            found[path] = digest(text.encode())
    for name, tree in _untracked(registry):
        found[f"{name}, which is not tracked"] = digest(canonical(tree))
    return found


def batch_digest(batch: Any) -> str:
    """Digest of everything in a batch that can be digested."""
    seen = Captured()
    try:
        tree = seen.encode(batch, "batch")
    except TrainckptError:
        return f"a {type(batch).__name__} that cannot be compared"
    parts = [stage.tensor_digest(tensor) for tensor in seen.tensors.values()]
    return digest(canonical([tree, parts]))


def _untracked(registry: Registry) -> list[tuple[str, Any]]:
    """Live schedulers, optimizers and scalers that nobody registered, with their state."""
    import gc

    import torch

    kinds: tuple[type, ...] = (
        torch.optim.lr_scheduler.LRScheduler,
        torch.optim.Optimizer,
        torch.amp.GradScaler,
    )
    found: list[tuple[str, Any]] = []
    for candidate in gc.get_objects():
        if issubclass(type(candidate), kinds) and not registry.tracks(candidate):
            seen = Captured()
            try:
                tree = seen.encode(candidate.state_dict(), "untracked")
            except (TrainckptError, RuntimeError):
                continue
            digests = [stage.tensor_digest(tensor) for tensor in seen.tensors.values()]
            found.append((f"{type(candidate).__name__}", [tree, digests]))
    return [(name, tree) for name, tree in sorted(found, key=lambda pair: pair[0])]

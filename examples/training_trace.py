"""The trace: every micro-batch a run has trained, so that two runs can be compared byte for byte.

Order of events: `Trace()` cuts off what a killed process left half written and counts the lines
(rank 0 does both; nobody goes on before it has), `attempt` says where this attempt goes on,
`micro_batch` appends a line for each, `finish` writes the digest of the state at the end.
Each line is one O_APPEND write: a kill leaves whole lines, or at worst one unterminated.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import trainckpt


class Trace:
    """Writes `rank<r>.jsonl`, `attempts.jsonl` and `final<r>.json` in a folder; None: nothing."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self.folder = Path(folder) if folder else None
        self.rank = rank
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lines = cut_and_count(self.folder) if rank == 0 else []
            if dist.is_initialized():
                dist.barrier()

    def attempt(self, ckpt: trainckpt.Checkpointer) -> None:
        """Record where this attempt goes on."""
        if self.folder and self.rank == 0:
            record = {
                "attempt": ckpt.attempt,
                "world": dist.get_world_size() if dist.is_initialized() else 1,
                "resumed_from": ckpt.resumed_from and place(ckpt.resumed_from),
                "lines": self.lines,
            }
            append_line(self.folder / "attempts.jsonl", record)

    def micro_batch(self, began: trainckpt.Cursor, samples: torch.Tensor, loss: float) -> None:
        """Record a micro-batch: where the run was when it began, its samples and its loss."""
        if self.folder:
            at = place(began)
            record = {
                "step": at["step"],
                "micro": at["micro"],
                "epoch": at["epoch"],
                "samples": samples.tolist(),
                "loss": loss.hex(),
            }
            append_line(self.folder / f"rank{self.rank}.jsonl", record)

    def finish(self, ckpt: trainckpt.Checkpointer, **state: Any) -> None:
        """Write the digest of `state`, the generators and the cursor, at the end of the run."""
        if self.folder:
            digest = state_digest({**state, "rng": generators(), "cursor": ckpt.cursor.to_json()})
            whole = self.folder / f"final{self.rank}.json"
            part = whole.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"digest": digest}) + "\n")
            part.replace(whole)


def place(cursor: trainckpt.Cursor) -> dict[str, int]:
    """The part of a cursor that names a micro-batch."""
    return {"epoch": cursor.epoch, "step": cursor.step, "micro": cursor.micro}


def append_line(file: Path, record: dict[str, Any]) -> None:
    """Append one line by one write."""
    line = json.dumps(record).encode() + b"\n"
    fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if os.write(fd, line) != len(line):
            raise OSError(f"{file}: the line was written in part")
    finally:
        os.close(fd)


def cut_and_count(folder: Path) -> list[int]:
    """Cut off unterminated last lines; gives the line count of each rank's file."""
    counts = {}
    for file in folder.glob("*.jsonl"):
        text = file.read_bytes()
        os.truncate(file, text.rfind(b"\n") + 1)
        counts[file.stem] = text.count(b"\n")
    ranks = [int(name[4:]) for name in counts if name.startswith("rank")]
    return [counts.get(f"rank{r}", 0) for r in range(max(ranks, default=-1) + 1)]


def generators() -> dict[str, Any]:
    """The state of the three generators of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }


def state_digest(state: dict[str, Any]) -> str:
    """SHA-256 over the tensors by name (name, dtype, shape, bytes), then the rest as JSON.

    Of a DTensor: the part that is on this rank.
    """
    leaves = dict(flatten("", state))
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    rest = {name: leaf for name, leaf in leaves.items() if name not in tensors}
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sha.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
        sha.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    sha.update(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
    return sha.hexdigest()


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested state with its path; objects are asked for their `state_dict`."""
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.copy())
    if isinstance(value, (list, tuple)):
        value = {f"{i:04}": item for i, item in enumerate(value)} or "empty"
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(f"{name}/{key}", item)
    else:
        yield name, value

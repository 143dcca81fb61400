"""What a save writes when 1 % of a model is trained: a frozen base with low-rank adapters.

The first save is a full one. Each later one is taken after a step; what it writes is the bytes of
the files that were not there before. Then the older snapshots are pruned, and the newest is loaded
and compared, byte for byte.

    floor_share        what has changed, of all: the adapters and their optimizer's state, which is
                       twice as much again with AdamW, once with momentum, nothing with plain SGD
    beside_bytes       what a later save writes beside that: headers, manifest, generators, names
    share              of the first save's bytes
    of_full_training   of the bytes of a save of the same model with every parameter trained

    python -m benchmarks.lora --json benchmarks/results/lora.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import trainckpt

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH, RANK = 1024, 5  # an adapter has 2 x 1024 x 5 parameters, its layer 1024 x 1024: 1 %

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "sgd with momentum": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


class Adapted(nn.Module):
    """A frozen layer, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        # As large behind a hundred layers as before them: else gradients vanish, nothing changes,
        # and nothing is written.
        nn.init.normal_(self.base.weight, std=WIDTH**-0.5)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def written(folder: Path, known: set[int]) -> int:
    """Bytes of files that were not there; they are known from now on."""
    num_bytes = 0
    for path in folder.rglob("*"):
        found = path.stat()
        if path.is_file() and found.st_ino not in known:
            known.add(found.st_ino)
            num_bytes += found.st_size
    return num_bytes


def saved(ckpt: trainckpt.Checkpointer) -> None:
    """One save, to its end."""
    pending = ckpt.save()
    while pending.snapshot is None and pending.error is None:
        ckpt.boundary()
        time.sleep(0.001)
    pending.wait("durable")


def bytes_of_saves(run: Path, model: nn.Module, optimizer: Any, saves: int) -> list[int]:
    """Train and save; what each save wrote. Nothing is pruned, so no file is taken for another."""
    inputs, known, each = torch.randn(1, WIDTH), set[int](), []
    ckpt = trainckpt.Checkpointer(
        run, model=model, optimizer=optimizer, every="never", keep_last=1 + saves
    )
    ckpt.resume()
    for _ in range(1 + saves):
        ckpt.boundary()
        model(inputs).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # whatever the optimizer: all changes
        optimizer.step()
        optimizer.zero_grad()
        saved(ckpt)
        each.append(written(run, known))
    ckpt.__exit__(InterruptedError, InterruptedError("measured"), None)
    return each


def full_training_bytes(run: Path, kind: str, layers: int) -> int:
    """What a save of such a model writes when all of it is trained."""
    model = nn.Sequential(*(Adapted() for _ in range(layers))).requires_grad_(requires_grad=True)
    return bytes_of_saves(run, model, OPTIMIZERS[kind](model.parameters(), lr=1e-3), 0)[0]


def measure(run: Path, kind: str, gigabytes: float, saves: int) -> dict[str, object]:
    """Train, save, prune, load."""
    torch.manual_seed(0)
    layers = max(1, round(gigabytes * 1e9 / 4 / WIDTH**2))
    model = nn.Sequential(*(Adapted() for _ in range(layers)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[kind](trained, lr=1e-3)
    each = bytes_of_saves(run, model, optimizer, saves)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    changed = sum(tensor.nbytes for tensor in (*trained, *moments))
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *moments))
    command = [sys.executable, "-m", "trainckpt.cli.main", "prune", str(run), "--keep-last", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loaded = trainckpt.load(run)
    usual = statistics.median(each[1:])
    weights = {f"model/{name}": value for name, value in model.state_dict().items()}
    return {
        "optimizer": kind,
        "trainable": round(len_of(trained) / len_of(model.parameters()), 4),
        "floor_share": round(changed / whole, 4),
        "saves": saves,
        "full_bytes": each[0],
        "save_bytes": usual,
        "beside_bytes": usual - changed,
        "share": round(usual / each[0], 4),
        "of_full_training": round(
            usual / full_training_bytes(run.with_name("full " + kind), kind, layers), 4
        ),
        "loses_nothing": all(torch.equal(loaded[name], value) for name, value in weights.items()),
    }


def len_of(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of all of them."""
    return sum(tensor.numel() for tensor in tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--saves", type=int, default=5)
    given = parser.parse_args()
    logging.getLogger("trainckpt").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="trainckpt-lora-", dir=Path.cwd()) as folder:
        rows = [
            measure(Path(folder) / kind, kind, given.gigabytes, given.saves) for kind in OPTIMIZERS
        ]
    for row in rows:
        print(json.dumps(row))
    if given.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        command = f"python -m benchmarks.lora --gigabytes {given.gigabytes} --saves {given.saves}"
        result = {"machine": machine, "command": command, "rows": rows}
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Saves and resumes of many small tensors: the cost of a tensor, not of a byte.

    python -m benchmarks.many_tensors --json OUT [--png OUT] [--tensors 3000,30000,120000]
                                      [--shapes linear,moe,fsdp2] [--systems a,b,...] [--rounds N]

    linear    a stack of nn.Linear(16, 16) with AdamW, one rank
    moe       8 layers, each with a router and equal experts of three matrices, one rank
    fsdp2     the stack of linear layers, sharded over two ranks, a hundred layers a unit

Tensors are parameters and both moments of AdamW; its step counts come on top. Each round is one
process (two for fsdp2), as a first save is the first of its process; the systems take turns in it,
in an order that moves on by one each round. A turn attaches to the training, saves a few times,
detaches, and restores into a training that was just built; what is restored must be what was saved.
fsdp2 is for a few thousand tensors: above, torch's own first step takes minutes. Seconds are those
of the slowest rank, medians over the rounds:

    first_s      steps with the first save of a turn, less as many without
    stall_s      the same of later saves
    durable_s    from the request of a later save until it is fsynced
    resume_s     restoring from files in the page cache
    boundary_s   a boundary without a save, the median of many; only trainckpt has one
    bytes        memory that a turn takes at most

A step is a boundary and the optimizer's, which changes every tensor. A save is requested before
one, and steps follow until the save needs training no more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from benchmarks import machine
from benchmarks.compare import job as compare
from benchmarks.compare import systems
from benchmarks.compare.caches import forget_peak, give_back
from benchmarks.compare.lowest import LowestAvailable
from benchmarks.compare.together import slowest, timed
from benchmarks.compare.training import state_tensors
from benchmarks.panels import label_panel, panels
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.compare.systems.base import Pending, System

SHAPES = {"linear": 1, "moe": 1, "fsdp2": 2}  # -> ranks
SYSTEMS = "trainckpt,torch.save,dcp,dcp-async"
WIDTH, LAYERS, UNIT = 16, 8, 100
MATRICES = ("w1", "w2", "w3")
FIGURES = ("first_s", "stall_s", "durable_s", "resume_s", "boundary_s", "bytes")
DRAWN = FIGURES[:4]
BOUNDARIES = 200


class Router(nn.Module):
    """One layer of experts. No forward: only the state matters here."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("w1", "w2", "w3")}
            )
            for _ in range(experts)
        )


def build(shape: str, tensors: int) -> nn.Module:
    """Return a model with a third of `tensors` as parameters."""
    parameters = tensors // 3
    if shape == "moe":
        experts = max(1, (parameters // LAYERS - 1) // len(MATRICES))
        return nn.Sequential(*[Router(experts) for _ in range(LAYERS)])
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(parameters // 2)])
    if shape == "fsdp2":
        model = nn.Sequential(*[model[i : i + UNIT] for i in range(0, len(model), UNIT)])
        for unit in model:
            fully_shard(unit)
        fully_shard(model)
    return model


class TouchingAdamW(torch.optim.AdamW):
    """AdamW whose step adds to every tensor in one call. Its first step makes the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.state:
            super().step()
        torch._foreach_add_([local(t) for t in state_tensors(self) if t.ndim], 1e-3)


class Training:
    """A model and its optimizer, as `benchmarks.compare.systems` expect it."""

    device = "cpu"

    def __init__(self, shape: str, tensors: int, *, fresh: bool = False) -> None:
        torch.manual_seed(1 if fresh else 0)
        self.model = self.plain = build(shape, tensors)
        self.optimizer = TouchingAdamW(self.model.parameters(), 1e-4, foreach=True)
        if not fresh:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def digest(self) -> str:
        """Return a digest of every byte of this rank's state."""
        hashed = xxhash.xxh3_128()
        for tensor in state_tensors(self.optimizer):
            hashed.update(local(tensor).detach().reshape(-1).view(torch.uint8).numpy())
        return hashed.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- one process


# System -> figure -> values. No attribute of an object: a resume would set it back.
SAMPLES: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))


class Turns:
    """The measurements of one shape and number of tensors."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.training = Training(arguments.shape, arguments.number)

    def measure(self) -> None:
        """Run one round."""
        names = self.arguments.systems.split(",")
        if self.arguments.shape == "fsdp2":  # rank 0 alone saves by torch.save, and has a half
            names = [name for name in names if name != "torch.save"]
        first = self.arguments.round % len(names)
        for name in names[first:] + names[:first]:
            begun = time.perf_counter()
            self._turn(name, systems.load(name)(Path(self.arguments.folder, name)))
            if dist.get_rank() == 0:
                took = time.perf_counter() - begun
                said = f"round {self.arguments.round + 1}: {name}: {took:.1f} s"
                print(said, file=sys.stderr, flush=True)

    def _turn(self, name: str, system: System) -> None:
        samples = SAMPLES[name]
        give_back()
        forget_peak()
        with LowestAvailable() as available:
            system.begin(self.training)
            plain = statistics.median(self._window(system)[0] for _ in range(5))
            samples["first_s"].append(self._save(system, plain)[0])
            for _ in range(system.warm_saves - 1):
                self._save(system)
            pairs = []
            for _ in range(self.arguments.saves):
                plain, _ = self._window(system)
                pairs.append(self._save(system, plain))
            samples["stall_s"].append(statistics.median(stall for stall, _ in pairs))
            samples["durable_s"].append(statistics.median(durable for _, durable in pairs))
            if name.startswith("trainckpt"):
                samples["boundary_s"].append(self._boundary(system))
            expected = self.training.digest()
            pending = system.save_now()
            pending.wait()
            system.end()
        samples["bytes"].append(available.taken_bytes)
        del self.training
        give_back()
        self.training = Training(self.arguments.shape, self.arguments.number, fresh=True)
        samples["resume_s"].append(timed(lambda: system.restore(self.training, memory=False)))
        system.restored()
        if self.training.digest() != expected:
            raise AssertionError(f"{name}: what was restored is not what was saved")
        dist.barrier()
        if dist.get_rank() == 0:
            system.discard()
        dist.barrier()

    def _window(self, system: System, pending: Pending | None = None) -> tuple[float, int]:
        """Train until the save is taken; return the seconds, and how many steps that were."""
        steps = 0

        def train() -> None:
            nonlocal steps
            while not steps or (pending is not None and not pending.taken()):
                system.boundary()
                with system.fence():
                    self.training.optimizer.step()
                steps += 1

        return timed(train), steps

    def _save(self, system: System, plain_s: float = 0.0) -> tuple[float, float]:
        """Return the seconds that a save adds to its steps, and those until it is durable.

        Args:
            system: Saves.
            plain_s: Seconds of a step without a save.
        """
        dist.barrier()
        begun = time.perf_counter()
        pending = system.save()
        requested = slowest(time.perf_counter() - begun)
        trained, steps = self._window(system, pending)
        durable = slowest(pending.wait() - begun)
        dist.barrier()
        if dist.get_rank() == 0:
            system.forget()
        dist.barrier()
        return requested + trained - steps * plain_s, durable

    @staticmethod
    def _boundary(system: System) -> float:
        seconds = []
        for _ in range(BOUNDARIES):
            begun = time.perf_counter()
            system.boundary()
            seconds.append(time.perf_counter() - begun)
        return slowest(statistics.median(seconds))  # some after a save digest a sample of weights


def rank_main(arguments: argparse.Namespace) -> None:
    """Measure in this process; rank 0 writes the samples."""
    compare.start("cpu", 1)
    turns = Turns(arguments)
    turns.measure()
    if dist.get_rank() == 0:
        number = sum(1 for tensor in state_tensors(turns.training.optimizer) if tensor.ndim)
        found = {"tensors": number, "samples": SAMPLES}
        Path(arguments.folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    compare.leave()


# ---- the launcher, the table and the plot


def launch(arguments: argparse.Namespace, shape: str, number: int) -> Iterator[dict[str, Any]]:
    """Run one shape and number, each round in a process of its own; yield a row for each system."""
    rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    tensors = 0
    for round_ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.place) as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(SHAPES[shape]), "-m", "benchmarks.many_tensors"]
            command += ["--shape", shape, "--number", str(number), "--folder", folder]
            command += ["--systems", arguments.systems, "--saves", str(arguments.saves)]
            command += ["--round", str(round_)]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            found = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        tensors = found["tensors"]
        for system, samples in found["samples"].items():
            for figure, values in samples.items():
                rounds[system][figure] += values
    for system, samples in rounds.items():
        row = {"shape": shape, "ranks": SHAPES[shape], "tensors": tensors}
        row |= {"system": system, "rounds": arguments.rounds}
        for figure in FIGURES:
            values = samples.get(figure)
            row[figure] = statistics.median(values) if values else None
        yield {**row, "samples": samples}


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print microseconds of a tensor for each row."""
    print(
        "shape   tensors system          first   stall durable  resume  (us a tensor)  boundary us"
    )
    for row in rows:
        each = [f"{row[figure] / row['tensors'] * 1e6:7.1f}" for figure in DRAWN]
        boundary = "" if row["boundary_s"] is None else f"{row['boundary_s'] * 1e6:8.1f}"
        print(f"{row['shape']:7} {row['tensors']:7} {row['system']:12}", *each, boundary)


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG: seconds against the number of tensors, a panel for each shape and figure."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row["system"] for row in rows))
    size = 3.4 * len(DRAWN), 2.8 * len(shapes)
    with panels(file, len(shapes), len(DRAWN), dpi=120, figsize=size) as axes:
        for line, shape in zip(axes, shapes, strict=True):
            for panel, column in zip(line, DRAWN, strict=True):
                for name in names:
                    points = [r for r in rows if r["shape"] == shape and r["system"] == name]
                    points = [r for r in points if r[column] > 0]  # a stall below the noise
                    x, y = [r["tensors"] for r in points], [r[column] for r in points]
                    width = 2.4 if name == "trainckpt" else 1.2
                    panel.plot(x, y, marker="o", markersize=3, linewidth=width, label=name)
                title = f"{shape}: {column.removesuffix('_s')}, seconds"
                label_panel(panel, title, "tensors")
        axes[0][0].legend(fontsize=8)


def main() -> None:
    """Run all shapes and numbers; print and write the rows after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="a plot too; needs matplotlib")
    parser.add_argument("--tensors", default="3000,30000,120000")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--systems", default=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=5, help="later saves in each turn")
    parser.add_argument("--place", help="folder of a file system to save to")
    for name in ("--shape", "--folder"):  # of one process
        parser.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--number", "--round"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        rank_main(arguments)
        return
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes.split(","):
        for number in map(int, arguments.tensors.split(",")):
            rows += launch(arguments, shape, number)
            if arguments.json is not None:
                words = {"machine": machine.words(), "torch": torch.__version__, "rows": rows}
                arguments.json.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    show(rows)
    if arguments.png is not None:
        draw(rows, arguments.png)


if __name__ == "__main__":
    main()

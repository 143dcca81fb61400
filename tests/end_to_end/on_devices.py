"""A training on a device, with one thing in it that a resume could get wrong there."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.state.helpers import frozen
from trainckpt import Checkpointer

ITEMS, BATCH, ACCUMULATE, WIDTH = 32, 2, 3, 160  # a weight of 100 kB: copied beside training
ASKED_AT, CRASHED_AT = 4, 7  # saved at the boundary after micro-batch 4: inside a window
KINDS = {
    "dropout": {},
    "fused": {"optimizer": {"fused": True}},
    "foreach": {"optimizer": {"foreach": True}},
    "capturable": {"optimizer": {"capturable": True}},
    "amsgrad": {"optimizer": {"fused": True, "amsgrad": True}},
    "bfloat16": {"autocast": torch.bfloat16},
    "float16 with a scaler": {"autocast": torch.float16, "scaled": True},
    "half weights": {"weights": torch.bfloat16},
    "frozen": {"freezes": True},
    "compiled": {"compiles": True},
    "channels last": {"images": True},
}
ONLY_ON_A_GPU = ("capturable", "float16 with a scaler", "foreach", "amsgrad")

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA begins


class Crash(Exception):
    """The script fails."""


class Parts:
    """What the script builds; the same every time."""

    def __init__(self, device, kind, rank=0, ddp=False):
        how = KINDS[kind]
        self.device, self.how = torch.device(device), how
        torch.manual_seed(0)
        head = [nn.Conv2d(2, 4, 3, padding=1), nn.Flatten()] if how.get("images") else []
        first = nn.Linear(64 if head else 16, WIDTH)
        layers = [first, nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)]
        self.model = nn.Sequential(*head, *layers, nn.Dropout(0.3), nn.Linear(WIDTH, 1))
        self.model.to(self.device, how.get("weights"))
        if head:
            self.model.to(memory_format=torch.channels_last)
        if how.get("freezes"):
            layers[3].requires_grad_(False)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 0.01, **how.get("optimizer", {}))
        self.scaler = torch.amp.GradScaler(self.device.type) if how.get("scaled") else None
        self.called = DistributedDataParallel(self.model) if ddp else self.model
        self.tracked_model = self.called
        if how.get("compiles"):
            backend = "inductor" if self.device.type == "cuda" else "aot_eager"
            self.called = torch.compile(self.model, backend=backend)
        shape = (2, 4, 4) if head else (16,)
        data = TensorDataset(torch.randn(ITEMS, *shape), torch.arange(ITEMS))
        sampler = DistributedSampler(data) if ddp else None
        self.loader = DataLoader(
            data, BATCH, shuffle=not ddp, sampler=sampler, pin_memory=self.device.type == "cuda"
        )
        torch.manual_seed(5 + rank)

    def tracked(self):
        found = {"model": self.tracked_model, "optimizer": self.optimizer, "loader": self.loader}
        return found | ({"scaler": self.scaler} if self.scaler else {})

    def train_on(self, batch, last):
        """One micro-batch; what was seen and what came of it."""
        x, ids = batch
        x = x.to(self.device, self.how.get("weights"), non_blocking=True)
        noise = torch.rand(x.shape, device=self.device)  # of the device's own generator
        enabled = "autocast" in self.how
        with torch.autocast(self.device.type, self.how.get("autocast"), enabled=enabled):
            loss = self.called((x + 0.1 * noise).to(x.dtype)).float().square().mean() / ACCUMULATE
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if last and self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif last:
            self.optimizer.step()
        if last:
            self.optimizer.zero_grad()
        return ids.tolist(), loss.item().hex()

    def state(self):
        """All that must be equal in the end."""
        generators = [torch.get_rng_state()]
        if self.device.type == "cuda":
            generators.append(torch.cuda.get_rng_state(self.device))
        objects = [each for name, each in self.tracked().items() if name != "loader"]
        return frozen([each.state_dict() for each in objects]), frozen(generators)


def attempt(place, parts, crash=False, **options):
    """Train to the end, or fail behind a save inside a window: lines by micro-batch, the cursor
    that it went on from."""
    lines = {}
    options = {"every": "never", **options}
    with Checkpointer(place, **parts.tracked(), **options) as ckpt:
        for _ in ckpt.epochs(1):
            for batch in ckpt.batches():
                at = ckpt.cursor
                if crash and at.micro_batches == ASKED_AT:
                    save = ckpt.save()
                if crash and at.micro_batches == CRASHED_AT:
                    save.wait("durable")
                    raise Crash
                lines[at.micro_batches] = parts.train_on(batch, at.micro + 1 == ACCUMULATE)
    return lines, ckpt.resumed_from


def of_ranks(rank, place, world, device):
    """DDP: the difference of a resumed run from a straight one, "" if none."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    if device == "cuda":
        torch.cuda.set_device(0)
    straight = Parts(device, "fused", rank, ddp=True)
    expected, _ = attempt(f"{place}/straight", straight)
    dist.barrier()
    try:
        attempt(f"{place}/run", Parts(device, "fused", rank, ddp=True), crash=True)
    except Crash:
        dist.barrier()
    resumed = Parts(device, "fused", rank, ddp=True)
    lines, begun = attempt(f"{place}/run", resumed)
    return difference(expected, lines, begun, straight, resumed)


def difference(expected, lines, begun, straight, resumed):
    """What a resumed run did otherwise, "" if nothing."""
    if begun is None or (begun.micro_batches, begun.micro) != (5, 2):
        return f"resumed from {begun}"
    if lines != {at: line for at, line in expected.items() if at >= begun.micro_batches}:
        return f"trained {lines}, not {expected}"
    return "" if straight.state() == resumed.state() else "the state in the end differs"

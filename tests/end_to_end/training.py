"""A tiny real training, attempt after attempt in one process."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.state.helpers import frozen
from trainckpt import Checkpointer
from trainckpt.snapshot.attempt_history import read_attempts, run_id
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.storage.local import LocalTier

ITEMS, BATCH, ACCUMULATE = 10, 2, 2  # 5 micro-batches an epoch: a window spans its end


def content_bytes(path):
    """Length of the shard file in a file that may be longer."""
    data = Path(path).read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:length])
    return length + max(e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")


class Crash(Exception):
    """The script fails."""


class Parts:
    """What a script builds before it trains; the same every time."""

    def __init__(self, items=ITEMS, width=4, workers=0):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(items, 4), torch.arange(items))
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers)

    def tracked(self):
        return vars(self)

    def train_on(self, batch, last):
        """One micro-batch; a line of what was seen and what came of it."""
        x, ids = batch
        noise = random.random() + float(np.random.rand())
        loss = (self.model(x) + 0.01 * noise).square().mean() / ACCUMULATE
        loss.backward()
        if last:
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return ids.tolist(), loss.item().hex()

    def state(self):
        """All that must be equal in the end."""
        rng = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())
        kept = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        return frozen(kept), rng


def attempt(place, epochs=2, crash_at=None, seen=None, inside=None, parts=None, **options):
    """Train to the end, or until micro-batch `crash_at` begins; the parts, and the Checkpointer.

    Args:
        place: Of the run.
        epochs: To train.
        crash_at: Micro-batches since the run began at which the script fails, before training it.
        seen: Gets one line a micro-batch, under its number.
        inside: Called with (ckpt, parts) in each loop body before training.
        parts: Objects to train; fresh ones if None.
        options: Of the Checkpointer.
    """
    parts = parts or Parts()
    with Checkpointer(place, **parts.tracked(), **{"every": "2 steps", **options}) as ckpt:
        for _ in ckpt.epochs(epochs):
            for batch in ckpt.batches():
                at = ckpt.cursor
                if at.micro_batches == crash_at:
                    raise Crash
                if inside is not None:
                    inside(ckpt, parts)
                line = parts.train_on(batch, at.micro + 1 == ACCUMULATE)
                if seen is not None:
                    seen.setdefault(at.micro_batches, []).append((at, *line))
    return parts, ckpt


def crashed(place, crash_at, **how):
    """An attempt that fails at that micro-batch."""
    try:
        attempt(place, crash_at=crash_at, **how)
    except Crash:
        return
    raise AssertionError("it did not get there")


def catalog(place):
    """Candidates of the run, newest first."""
    tier = LocalTier(place)
    return read_catalog(tier, run_id(tier), read_attempts(tier))


def usable(place):
    """Their names, oldest first."""
    return [str(c.name) for c in reversed(catalog(place)) if c.usable]


def record(place, number):
    """An attempt's record, as others read it."""
    return json.loads((Path(place) / "attempts" / f"{number}.json").read_text())


def notice(place, number, **fields):
    """A notice, as `trainckpt pause` writes one."""
    folder = Path(place) / "notices"
    folder.mkdir(exist_ok=True)
    temporary = folder / ".writing"
    temporary.write_text(json.dumps({"reason": "test", **fields}))
    temporary.rename(folder / f"{number}-test.json")

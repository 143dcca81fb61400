"""A training whose saves stay in the memory of its hosts; programs for `farm`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainckpt import Checkpointer


def train(place, until, marks):
    """Leaves marks/<rank>/<step> at each step: what there was, and what was known to be kept."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Dropout(0.2), nn.Linear(300, 1))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(rank + 1)
    folder = Path(marks) / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpointer(place, model=wrapped, optimizer=optimizer) as ckpt:
        note(folder, "began", ckpt, model, optimizer)
        while ckpt.cursor.step < until and ckpt.boundary():
            time.sleep(float(os.environ.get("TEST_STEP_S", "0")))
            wrapped(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            note(folder, str(ckpt.cursor.step), ckpt, model, optimizer)
    torch.distributed.destroy_process_group()


def note(folder, name, ckpt, model, optimizer):
    """Atomically, for whoever kills this."""
    protection = ckpt._attempt.saver.protecting.protection
    newest = (protection and protection.newest) or ""
    facts = {
        "step": ckpt.cursor.step,
        "kept": newest.rpartition("/")[2],
        "state": state(model, optimizer),
        "generator": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
    }
    (folder / ".now").write_text(json.dumps(facts))
    (folder / ".now").rename(folder / name)


def state(model, optimizer):
    """Digest of parameters and moments."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        moments = [moment for _, moment in sorted(optimizer.state[parameter].items())]
        for tensor in (parameter, *moments):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()

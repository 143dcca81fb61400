"""A training whose saves stay in the memory of its hosts; programs for `farm`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import time
import warnings
from pathlib import Path

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, StackDataset, TensorDataset

from trainckpt import Checkpointer

BATCH, STEPS_AN_EPOCH = 4, 10
SLOW_FROM, SLOW_STEP_S = 30, 0.5


def train(place, until, marks):
    """Leaves marks/<rank>/<step> at each step: what there was, and what was known to be kept.

    With TEST_DIES=RANK,STEP,AT that rank dies at the boundary of that step, with TEST_OWN_BYTES of
    its own on the way to its partner, or at the step itself.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Dropout(0.2), nn.Linear(300, 1))
    wrapped = DistributedDataParallel(model)
    if own_bytes := int(os.environ.get("TEST_OWN_BYTES", "0")):
        model.register_buffer("own", torch.zeros(own_bytes, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(rank + 1)
    folder = Path(marks) / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpointer(place, model=wrapped, optimizer=optimizer) as ckpt:
        note(folder, "began", ckpt, model, optimizer)
        while ckpt.cursor.step < until and ckpt.boundary():
            die_at(rank, ckpt.cursor.step, "boundary")
            pace(ckpt.cursor.step)
            wrapped(torch.randn(4, 64)).square().mean().backward()
            die_at(rank, ckpt.cursor.step, "step")
            optimizer.step()
            optimizer.zero_grad()
            note(folder, str(ckpt.cursor.step), ckpt, model, optimizer)
    torch.distributed.destroy_process_group()


def die_at(rank, step, at):
    """Die, if this is the moment that TEST_DIES names."""
    if os.environ.get("TEST_DIES") == f"{rank},{step},{at}":
        os.kill(os.getpid(), signal.SIGKILL)


def train_on_data(place, epochs, marks):
    """As `train`, with a loader, and with running statistics that each rank has for itself."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # `broadcast_buffers`
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(BATCH * STEPS_AN_EPOCH * world, 64))
    model = nn.Sequential(
        nn.Linear(64, 300),
        nn.BatchNorm1d(300),
        nn.Dropout(0.2),
        nn.Linear(300, 64),
        nn.Linear(64, 1),
    )
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data = StackDataset(x=data, index=range(len(data)))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, seed=1))
    torch.manual_seed(rank + 1)
    folder = Path(marks) / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpointer(
        place, model=wrapped, optimizer=optimizer, scheduler=scheduler, loader=loader
    ) as ckpt:
        note(folder, "began", ckpt, model, optimizer)
        for epoch in ckpt.epochs(epochs):
            for batch in ckpt.batches():
                pace(ckpt.cursor.step)
                wrapped(batch["x"][0]).square().mean().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                note(
                    folder,
                    str(ckpt.cursor.step),
                    ckpt,
                    model,
                    optimizer,
                    epoch=epoch,
                    samples=batch["index"].tolist(),
                )
    torch.distributed.destroy_process_group()


def pace(step):
    """With TEST_STEP_S: so long at least, and from a step on that nobody needs so long that
    it does not end before somebody looks, however busy the machine is.
    """
    step_s = os.environ.get("TEST_STEP_S")
    if step_s is not None:
        time.sleep(float(step_s) if step < SLOW_FROM else SLOW_STEP_S)


def note(folder, name, ckpt, model, optimizer, **more):
    """Atomically, for whoever kills this."""
    protection = ckpt._attempt.saver.replication.replicator
    newest = (protection and protection.newest) or ""
    facts = {
        "step": ckpt.cursor.step,
        "attempt": ckpt.attempt,
        "kept": newest.rpartition("/")[2],
        "state": state(model, optimizer),
        **more,
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
    for buffer in model.buffers():
        found.update(buffer.numpy().tobytes())
    return found.hexdigest()

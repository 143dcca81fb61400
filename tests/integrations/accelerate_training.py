"""A tiny training with Accelerate, again and again in one process: straight, stopped, resumed."""

from __future__ import annotations

import os
import random
import sys

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainckpt.accelerate
from tests.integrations.sigterm_at_boundary import strike
from tests.state.helpers import frozen

ITEMS, BATCH, ACCUMULATE, EPOCHS = 22, 2, 4, 3


class Noisy(Dataset):
    """Each item draws from the three generators, in the worker or in the main process."""

    def __init__(self, items=ITEMS):
        self.x = torch.linspace(-1, 1, items * 4).view(items, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        return self.x[i] + 0.1 * noise, i


class Harder(Noisy):
    """Grows with the epoch, which Accelerate tells a dataset that wants to know."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        x, i = super().__getitem__(i)
        return x * (1 + self.epoch), i


class Stream(IterableDataset):
    """Data without indices."""

    def __iter__(self):
        return iter(torch.zeros(4, 1))


class Counter:
    """An object for `register_for_checkpointing`."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def fresh(accumulate=ACCUMULATE, fsdp=False, mixed=None, windows=None, **data):
    """An Accelerator as in a new process; its state is kept by the classes.

    Args:
        accumulate: Micro-batches a window.
        fsdp: Shard the model by FSDP2. Accelerate takes it for GPUs alone, and trains with DDP on
            CPUs without a word; there it is told that it may. What follows is its own code.
        mixed: Precision of Accelerate's autocast.
        windows: Options of the GradientAccumulationPlugin.
        data: Options of Accelerate's DataLoaderConfiguration.
    """
    AcceleratorState._reset_state()
    GradientState._reset_state()
    on_gpu = fsdp and torch.cuda.is_available()
    accelerator = Accelerator(
        cpu=not on_gpu,
        fsdp_plugin=sharding() if on_gpu else None,
        dataloader_config=DataLoaderConfiguration(**data),
        mixed_precision=mixed,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=accumulate, **(windows or {})
        ),
    )
    if fsdp and not on_gpu:
        accelerator.state.fsdp_plugin = sharding()
        accelerator.state.distributed_type = DistributedType.FSDP
    return accelerator


def sharding():
    """FSDP2 with each layer by itself."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=20,
        cpu_ram_efficient_loading=False,
    )


class Training:
    """What a script builds before it trains; the same every time.

    Args:
        workers: Of the loader.
        own: Options of the DataLoader.
        kind: Of the training data.
        judging: Options of the evaluation's DataLoader.
        data: Options of Accelerate's DataLoaderConfiguration, `fsdp`, `mixed` and `windows`.
    """

    def __init__(
        self,
        workers=0,
        accumulate=ACCUMULATE,
        items=ITEMS,
        own=None,
        kind=Noisy,
        judging=None,
        **data,
    ):
        self.accelerator = fresh(accumulate, **data)
        seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(kind(items), BATCH, shuffle=True, num_workers=workers, **(own or {}))
        self.judged = DataLoader(Noisy(6), 3, shuffle=True, **(judging or {}))
        self.counter = Counter()
        self.model, self.optimizer, self.scheduler, self.loader, self.judged = (
            self.accelerator.prepare(model, optimizer, scheduler, loader, self.judged)
        )
        self.accelerator.register_for_checkpointing(self.counter, self.scheduler)
        seed(1 + self.accelerator.process_index)

    def batch(self, x, ids):
        """One micro-batch, as Accelerate's guides write it; what was seen and what came of it."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.seen += len(ids)
        triggered = self.accelerator.check_trigger()  # by the micro-batch before
        if self.counter.seen % 3 == 0:
            self.accelerator.set_trigger()
        return ids.tolist(), loss.item().hex(), self.accelerator.sync_gradients, triggered

    def judge(self):
        """An evaluation in the middle of the epoch, with a shuffled loader of its own."""
        self.model.eval()
        with torch.no_grad():
            found = [self.model(x).sum().item().hex() for x, _ in self.judged]
        self.model.train()
        return found

    def state(self):
        """All that must be equal in the end."""
        kept = [one.state_dict() for one in (self.model, self.optimizer, self.scheduler)]
        rng = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())
        kept = tree_map_only(DTensor, lambda tensor: tensor.to_local(), kept)
        return frozen(kept), rng, self.counter.seen, self.loader.iteration, self.accelerator.step


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def plain(**how):
    """The same training without trainckpt: every line, and the end."""
    training, seen = Training(**how), {}
    for _ in range(EPOCHS):
        for x, ids in training.loader:
            one(training, seen, len(seen), x, ids)
    return seen, training.state()


def tracked(place, seen, strike_at=None, epochs=EPOCHS, prepare=None, **how):
    """An attempt; with `strike_at`, SIGTERM arrives before that boundary. The end; None if stopped.

    Args:
        place: Of the run.
        seen: Gets each micro-batch's line under its number, of all attempts.
        strike_at: Micro-batches trained when the signal comes.
        epochs: To train.
        prepare: Called with the Checkpointer and the training, before it begins.
        how: Of `Training`; `every` and `resume` are the Checkpointer's.
    """
    options = {name: how.pop(name) for name in ("every", "resume") if name in how}
    training = Training(**how)
    rank = training.accelerator.process_index
    ckpt = trainckpt.accelerate.attach(
        training.accelerator, place, stop_at="micro-batch", on_stop="return", **options
    )
    if prepare is not None:
        prepare(ckpt, training)
    if strike_at == 0:
        strike(ckpt, here=rank == 0)
    for _ in ckpt.epochs(epochs):
        for x, ids in ckpt.loader(training.loader):
            number = ckpt.cursor.micro_batches
            one(training, seen, number, x, ids)
            if number + 1 == strike_at:
                strike(ckpt, here=rank == 0)
    assert ckpt.has_ended
    return None if ckpt._attempt.shutdown.stopped else training.state()


def one(training, seen, number, x, ids):
    line = training.batch(x, ids)
    if number % 5 == 3:
        line = (*line, training.judge())
    seen.setdefault(number, []).append(line)


def compared(place, stops, prepare=None, **how):
    """Straight with trainckpt, then stopped before each of these boundaries and resumed.

    Returns:
        The stops whose run did not end as the plain one, bit for bit; "straight" is one.
    """
    want, end = plain(**how)
    wrong = []
    for at in (None, *stops):
        seen, run = {}, f"{place}/{'straight' if at is None else at}"
        if at is not None:
            assert tracked(run, seen, strike_at=at, prepare=prepare, **how) is None
        if tracked(run, seen, prepare=prepare, **how) != end or seen != want:
            wrong.append("straight" if at is None else at)
    return wrong


def be_rank(rank, world):
    """Let frameworks find the process group that exists, as torchrun would tell them."""
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, and not used


def of_ranks(rank, place, world, stops, **how):
    """`compared` as one of several ranks, whose process group exists."""
    be_rank(rank, world)
    wrong = compared(place, stops, **how)
    wrapped = type(Training(**how).model).__name__
    return wrong, wrapped


def of_shards(rank, place, world, stops):
    """`compared` under FSDP2, as one of several ranks whose process group exists.

    Returns:
        What `compared` returns; kinds of parameters; the kind of device they are on.
    """
    be_rank(rank, world)
    wrong = compared(place, stops, fsdp=True)
    return wrong, *laid_out()


def laid_out():
    """Kinds of parameters that `prepare` makes under FSDP2, and of their devices."""
    parameters = list(Training(fsdp=True).model.parameters())
    return {type(p).__name__ for p in parameters}, {p.device.type for p in parameters}


if __name__ == "__main__":  # under torchrun, on GPUs
    torch.use_deterministic_algorithms(True)
    print(compared(sys.argv[1], [2, 5, 13], fsdp=True), *laid_out(), flush=True)
    torch.distributed.destroy_process_group()

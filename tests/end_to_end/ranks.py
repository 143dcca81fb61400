"""Programs of real ranks: DDP over gloo, a Checkpointer on each."""

from __future__ import annotations

import errno
import hashlib
import logging
import logging.handlers
import os
import queue
import random
import signal
import threading

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from trainckpt import Checkpointer
from trainckpt.errors import TrainckptError
from trainckpt.format.names import MANIFEST
from trainckpt.notice import Notice
from trainckpt.resume import host_cache
from trainckpt.snapshot import tier_copy
from trainckpt.storage.local import Disk
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

WIDTH = 300  # the first matrix is large enough to be cut


def parts(rank, world, wrap=True):
    """What a script builds, equal on all ranks but for the generators' seeds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))
    wrapped = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(24, WIDTH))
    sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3)
    torch.manual_seed(rank + 1)
    return wrapped, optimizer, DataLoader(data, 2, sampler=sampler)


def train(rank, place, world, until, wrap=True, act=None, **options):
    """Steps up to `until`, two micro-batches each; losses, and digests of parameters."""
    model, optimizer, loader = parts(rank, world, wrap)
    losses = {}
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader, **options) as ckpt:
        if act is not None:
            act(rank, model)
        for _ in ckpt.epochs(99):
            for (x,) in ckpt.batches():
                at = ckpt.cursor
                loss = model(x + torch.rand(1)).square().mean()
                loss.backward()
                losses[f"{at.step}.{at.micro}"] = loss.item().hex()
                if at.micro == 1:
                    optimizer.step()
                    optimizer.zero_grad()
                if ckpt.cursor.step == until:
                    break
            if ckpt.cursor.step == until:
                break
        resumed = ckpt.resumed_from
    return losses, resumed and resumed.step


def train_fetching(rank, place, world, until):
    """Files of any size are brought into the host's memory by one rank for all; which this one
    brought.
    """
    host_cache.FETCHED_FROM_BYTES, fetch, came = 1, host_cache.fetch, []
    host_cache.fetch = lambda *arguments: came.extend(fetch(*arguments))
    return *train(rank, place, world, until), came


def train_where_one_has_no_memory(rank, place, world, until):
    """As on two hosts, one of which has no shared memory."""
    if rank:
        os.environ[ROOT_VARIABLE] = NONE
    return train(rank, place, world, until)


def drift(rank, model):
    """Make the ranks' parameters differ."""
    with torch.no_grad():
        model[2].bias += rank


def train_apart(rank, place, world, until):
    """Without DDP, and with parameters of each rank's own."""
    return train(rank, place, world, until, wrap=False, act=drift, every="2 steps")


def refused(rank, place, world, until):
    """The error that a resume ends with, on every rank alike."""
    try:
        train(rank, place, world, until)
    except TrainckptError as error:
        return type(error).__name__, error.exit_code, error.message
    return None


def train_at_another_rate(rank, place, world, until, choices):
    """Resume with twice the rate and this rank's `changed`; rate and parameters, or the error."""
    model, _, loader = parts(rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    try:
        with Checkpointer(place, **tracked, changed=choices[rank]) as ckpt:
            for _ in ckpt.epochs(99):
                for (x,) in ckpt.batches():
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if ckpt.cursor.step + 1 == until:
                        break
                break
    except TrainckptError as error:
        return type(error).__name__, error.exit_code, error.message
    total = torch.cat([p.detach().flatten() for p in model.parameters()])
    return optimizer.param_groups[0]["lr"], hashlib.sha256(total.numpy().tobytes()).hexdigest()


def fails_on_one(rank, place, world, until):
    """Rank 1 tracks an object that breaks while the run goes on; what became of the saves."""

    class Fragile:
        broken = False

        def state_dict(self):
            return {"x": object() if self.broken else 1}

        def load_state_dict(self, state):
            pass

    model, optimizer, loader = parts(rank, world)
    fragile, ended = Fragile(), []
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, fragile=fragile, every="never"
    ) as ckpt:
        pending = None
        for _ in ckpt.epochs(1):
            for index, (x,) in enumerate(ckpt.batches()):
                if pending is not None and (pending.snapshot or pending.error):
                    try:
                        ended.append(pending.wait("durable", 30).snapshot)
                    except TrainckptError as error:
                        ended.append(error.message)
                    pending = None
                fragile.broken = rank == 1 and index < 3
                if index in (0, 3):
                    pending = ckpt.save()
                    while not ckpt._gate.has_open_round():
                        pass
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        fragile.broken = False
    return ended


def asks_alone_at_a_stop(rank, place, mode):
    """Rank 1 is told to stop, and asks for a save then; which snapshot that became."""
    model, optimizer, loader = parts(rank, 2)
    pending = None
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=loader, every="never", on_stop="return"
    ) as ckpt:
        for _ in ckpt.epochs(3):
            for number, (x,) in enumerate(ckpt.batches()):
                if rank == 1 and pending is None and number == 4:
                    ckpt._listener.watcher.request(Notice("test", mode=mode))
                    pending = ckpt.save(tag="best-of-1")
                model(x).sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    return pending and pending.wait("local", 60).snapshot


def told_to_leave_late(rank, place, slow):
    """Copies to the slower tier hang on every rank; then rank 1 gets a SIGTERM."""
    begun, over = threading.Event(), threading.Event()

    def hang(*_, **__):
        begun.set()
        over.wait(60)

    def tell():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    tier_copy.copy_missing = hang
    if rank == 1:
        threading.Thread(target=tell, daemon=True).start()
    train(rank, place, 2, 1, tiers=[slow], every="never", grace="2 s")
    over.set()
    return "left"


def count_uneven(rank, place, until, epochs=2):
    """Batches of one sample on rank 0, of two on rank 1; micro-batches -> samples so far."""
    torch.set_num_threads(1)
    model = nn.Linear(1, 1)
    batches = [[i] * (1 + rank) for i in range(4)]
    loader = DataLoader(torch.arange(4.0), batch_sampler=batches)
    counted = {}
    with Checkpointer(place, model=model, loader=loader, accumulate=1) as ckpt:
        for _ in ckpt.epochs(epochs):
            for _ in ckpt.batches():
                counted[ckpt.cursor.micro_batches] = ckpt.cursor.samples
                if ckpt.cursor.micro_batches == until:
                    break
            if ckpt.cursor.micro_batches == until:
                break
    return counted


class Own:
    """Values that differ from rank to rank, under names that do not. pytorch#120356."""

    def __init__(self, rank):
        self.state = {"k": torch.tensor([rank, 7]), "o": {"x": rank}}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def own_values(rank, place, first):
    """What each rank has of its own, after a resume unless it is the first start."""
    own = Own(rank if first else 99)
    with Checkpointer(place, own=own) as ckpt:
        ckpt.boundary()
    return own.state["k"].tolist(), own.state["o"]["x"]


def compiled(rank, place, until, how):
    """Steps up to `until`, with DDP and torch.compile around each other; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    for wrap in how.split():
        model = (
            DistributedDataParallel(model)
            if wrap == "ddp"
            else torch.compile(model, backend="eager")
        )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    with Checkpointer(place, model=model, optimizer=optimizer) as ckpt:
        while ckpt.cursor.step < until:
            ckpt.boundary()
            loss = model(torch.full((2, 4), ckpt.cursor.step + rank + 1.0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
    return losses


def cannot_be_stored_on_one(rank, place):
    """Rank 1 tracks what no save can store, from the first boundary on; what each rank is told."""

    class Fragile(Own):
        def state_dict(self):
            return {"x": object() if self.state["broken"] else 1}

    own = Fragile(rank)
    own.state["broken"] = False
    try:
        with Checkpointer(place, own=own) as ckpt:
            own.state["broken"] = rank == 1
            ckpt.boundary()
    except TrainckptError as error:
        return error.message
    return "nothing"


def train_with_compile_cache(rank, place, world, until, reaches):
    """Steps up to `until` with this rank's `compile_cache`; what each rank warns of it."""
    said = logging.handlers.QueueHandler(queue.SimpleQueue())
    logging.getLogger("trainckpt").addHandler(said)
    train(rank, place, world, until, compile_cache=reaches[rank])
    messages = [said.queue.get().getMessage() for _ in range(said.queue.qsize())]
    return [message for message in messages if "compile_cache" in message]


def frozen_on_one(rank, place, until, every):
    """Steps up to `until`; in a resumed run, rank 1 freezes a parameter. What each rank logs."""
    said = logging.handlers.QueueHandler(queue.SimpleQueue())
    logger = logging.getLogger("trainckpt")
    logger.addHandler(said)
    logger.setLevel("INFO")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with Checkpointer(place, model=model, optimizer=optimizer, every=every) as ckpt:
        model.bias.requires_grad_(not rank or ckpt.resumed_from is None)
        while ckpt.cursor.step < until:
            ckpt.boundary()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [said.queue.get().getMessage() for _ in range(said.queue.qsize())]


class GroupedByLength(Sampler):
    """Batches of samples of like length, of one rank; leftovers come first in the next pass."""

    def __init__(self, rank, world):
        self.own, self.left = range(rank, 26, world), []
        self.generator = random.Random(rank)

    def __len__(self):
        return (len(self.own) + len(self.left)) // 3

    def __iter__(self):
        ids = self.left + self.generator.sample(self.own, len(self.own))
        whole = len(ids) - len(ids) % 3
        self.left = ids[whole:]
        ordered = sorted(ids[:whole], key=lambda i: i % 5)
        for first in range(0, whole, 3):
            yield ordered[first : first + 3]

    def state_dict(self):
        return {"left": self.left, "generator": self.generator.getstate()}

    def load_state_dict(self, state):
        self.left = state["left"]
        self.generator.setstate(state["generator"])


def train_grouped(rank, place, world, until):
    """Micro-batches up to `until` with a batch sampler of the script; samples and losses."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = torch.arange(26.0)
    sampler = GroupedByLength(rank, world)
    loader = DataLoader(data, batch_sampler=sampler)
    lines = []
    with Checkpointer(place, model=model, optimizer=optimizer, loader=loader) as ckpt:
        for epoch in ckpt.epochs(3):
            for x in ckpt.batches():
                loss = model(x[:, None] / 26 + torch.rand(1)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                lines.append((epoch, x.tolist(), loss.item().hex()))
                if ckpt.cursor.micro_batches + 1 == until:
                    return lines
    return lines


def train_tied(rank, place, until, first):
    """Steps up to `until` under FSDP2 with an output layer tied to the embedding; losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    losses = {}
    with Checkpointer(place, model=model, optimizer=optimizer) as ckpt:
        for step in range(max(first, ckpt.cursor.step), until):
            ckpt.boundary()
            ids = torch.arange(3) + (step + rank) % 5
            loss = nn.functional.cross_entropy(model(ids), (ids + 1) % 7)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item().hex()
    return losses, model[1].weight is model[0].weight


def full_at_the_commit(rank, place, until, failing):
    """Steps up to `until`, each saved; the disk is full as the manifests numbered so are renamed.

    Returns the step resumed from, and the exit code.
    """
    rename, renamed = Disk.rename, []

    def rename_unless_full(disk, source, target):
        if target.name == MANIFEST:
            renamed.append(target)
            if len(renamed) in failing:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(target))
        return rename(disk, source, target)

    Disk.rename = rename_unless_full
    model, optimizer, loader = parts(rank, 2)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    ckpt = Checkpointer(place, every="1 step", keep_last=9, **tracked)
    try:
        with ckpt:
            for _ in ckpt.epochs(99):
                for (x,) in ckpt.batches():
                    ckpt._attempt.saver.join()  # none is skipped, being behind
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if ckpt.cursor.step == until:
                        break
                if ckpt.cursor.step == until:
                    break
    except TrainckptError as error:
        return ckpt.resumed_from and ckpt.resumed_from.step, error.exit_code
    return ckpt.resumed_from and ckpt.resumed_from.step, 0

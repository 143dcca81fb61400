"""Programs of real ranks: DDP over gloo, a Checkpointer on each."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainckpt import Checkpointer
from trainckpt.errors import TrainckptError
from trainckpt.lifecycle.resuming import fetch_together, read_shares
from trainckpt.preemption.notice import Notice
from trainckpt.snapshot import blocks, flush, shares
from trainckpt.snapshot.taker import Taker
from trainckpt.tiers import other_memory
from trainckpt.tiers.memory import NONE, ROOT_VARIABLE

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


def train_sharing(rank, place, world, until, must_ask=False):
    """Snapshots of any size are read between the ranks; bytes that this one took of others, whom
    it let read its memory, and the tensors that lay in memory of both.

    With `must_ask` nobody may who was not let, as under Yama.
    """
    read_shares.FROM_BYTES, took, let = 1, [], []
    if must_ask:
        other_memory._YAMA = Path(place).parent / "ptrace_scope"
        let_debug = other_memory._let_debug
        other_memory._let_debug = lambda process: (let.append(process), let_debug(process))

    def read(place, into):
        if must_ask and not (let and let[-1]):
            raise PermissionError("not this process's memory")
        other_memory_read(place, into)

    def take_noted(taker, load, place):
        take(taker, load, place)
        took.append(len(load.into))  # copied from there, or filled in by whoever has read it

    other_memory_read, other_memory.read = other_memory.read, read
    take, Taker.take = Taker.take, take_noted
    laid, lay_out = set(), shares.Share.lay_out

    def lay_out_noted(share, found, destination):
        lay_out(share, found, destination)
        laid.update(share._laid)

    shares.Share.lay_out = lay_out_noted
    found = train(rank, place, world, until)
    return *found, sum(took), let, sorted(laid)


def train_where_common_memory_goes_bad(rank, place, world, until, *, at_once):
    """A byte that lies there for both is changed: when rank 1 has verified what it read, or before;
    how often.
    """
    read_shares.FROM_BYTES, spoiled, mine, take = 1, [], [], blocks.Load.take
    there, puts_off = shares.Share.there, shares.Share.puts_off

    turn = threading.Lock()

    def spoil(load):
        with turn:
            if rank == 1 and not spoiled:
                spoiled.append(load)
                load.into[7] ^= 1

    def there_and_spoiled(share, load):
        if any(load is each for each in mine):
            spoil(load)
        there(share, load)

    def noted(share, read, load):
        is_left = puts_off(share, read, load)
        if share.is_laid(read.tensor) and not is_left:
            mine.append(load)
        return is_left

    def take_spoiled(load, data, **how):
        if any(load is each for each in mine):
            spoil(load)
        take(load, data, **how)

    shares.Share.puts_off = noted
    if at_once:
        blocks.Load.take = take_spoiled
    else:
        shares.Share.there = there_and_spoiled
    return *train(rank, place, world, until), len(spoiled)


def _forbidden(place, into):
    raise PermissionError("not this process's memory")


def train_fetching(rank, place, world, until):
    """Where ranks cannot read each other's memory, files of any size are brought into the host's
    by one rank for all; which this one brought.
    """
    other_memory.read = _forbidden
    fetch_together.FETCHED_FROM_BYTES, fetch, came = 1, fetch_together.fetch, []
    fetch_together.fetch = lambda *arguments: came.extend(fetch(*arguments))
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
                    while not ckpt._agreement.has_open_round():
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
                    ckpt._watch.watcher.request(Notice("test", mode=mode))
                    pending = ckpt.save(tag="best-of-1")
                model(x).sum().backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
    return pending and pending.wait("local", 60).snapshot


def told_to_leave_late(rank, place, slow):
    """Copies to the slower tier hang on every rank; then rank 1 gets a SIGTERM."""
    begun, over = threading.Event(), threading.Event()

    def hang(*_):
        begun.set()
        over.wait(60)

    def tell():
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    flush.copy_missing = hang
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
            DistributedDataParallel(model) if wrap == "ddp"
            else torch.compile(model, backend="eager")
        )  # fmt: skip
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

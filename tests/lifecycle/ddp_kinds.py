"""A program of real ranks, each time with another DDP around the model, or another hook in it."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from trainckpt import Checkpointer

WIDTH = 40
SMALL_MB = 0.004  # several buckets, and other ones once they were made anew


class Left(Exception):
    """The attempt ends here."""


class Net(nn.Module):
    """Uses one layer twice, and one not at all."""

    def __init__(self):
        super().__init__()
        self.twice, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.hidden, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = checkpoint(self.twice, self.twice(x).relu(), use_reentrant=True)
        return self.last(self.hidden(x))


def plain():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


class Kind:
    """One script: what it makes before the Checkpointer, after it was made, and in each step."""

    accumulate = 1
    options: dict = {}  # noqa: RUF012

    def build(self):
        self.net = self.make()
        self.model = self.tracked = self.wrap()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)

    def make(self):
        return plain()

    def wrap(self):
        return DistributedDataParallel(self.net, bucket_cap_mb=SMALL_MB, **self.options)

    def checkpointer_made(self):
        pass

    def resumed(self):
        pass

    def before(self, cursor):
        pass

    def loss(self, x, cursor):
        return self.model(x).square().mean()

    def synchronizes(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()


class Static(Kind):
    options = {"static_graph": True}  # noqa: RUF012

    def make(self):
        return Net()


KINDS = {kind.__name__: kind for kind in (Static,)}


def train(rank, place, kind, until, save_at=None):
    """So many micro-batches; what each of them left, where it began, and how exact it is."""
    torch.manual_seed(0)
    script = KINDS[kind]()
    script.build()
    torch.manual_seed(rank + 1)
    seen = {}
    ckpt = Checkpointer(
        place, model=script.tracked, optimizer=script.optimizer, every="never",
        accumulate=script.accumulate,
    )  # fmt: skip
    script.checkpointer_made()
    with contextlib.suppress(Left), ckpt:
        script.resumed()
        while True:
            pending = ckpt.save() if ckpt.cursor.micro_batches + 1 == save_at else None
            ckpt.boundary()
            number = ckpt.cursor.micro_batches
            if pending is not None:
                pending.wait("local", 30.0)
            if number == until:
                raise Left
            seen[number] = micro_batch(script, ckpt.cursor)
    resumed = ckpt.resumed_from
    return seen, resumed and resumed.micro_batches, ckpt._attempt.departure.exactness


def micro_batch(script, cursor):
    script.before(cursor)
    last = cursor.micro == script.accumulate - 1
    with script.synchronizes(last):
        loss = script.loss(torch.rand(3, WIDTH), cursor)
        loss.backward()
    if last:
        script.optimizer.step()
        script.optimizer.zero_grad()
    return loss.item().hex(), digest(script.net)


def digest(net):
    return [t.double().sum().item().hex() for t in net.state_dict().values()]

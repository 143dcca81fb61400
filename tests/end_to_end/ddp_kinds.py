"""A program of real ranks, each time with another DDP around the model, or another hook in it."""

from __future__ import annotations

import contextlib

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
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


class Branches(nn.Module):
    """Uses one branch only at each window's first micro-batch; its buffers differ by rank."""

    def __init__(self):
        super().__init__()
        self.always, self.seldom = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x, is_first):
        found = self.always(x) + self.seldom(x) if is_first else self.always(x)
        return self.last(self.norm(found))


class Inside(Kind):
    """Tracks the module in the DDP, not the DDP."""

    accumulate = 3
    options = {"find_unused_parameters": True}  # noqa: RUF012

    def build(self):
        super().build()
        self.tracked = self.net

    def make(self):
        return Branches()

    def loss(self, x, cursor):
        return self.model(x, cursor.micro == 0).square().mean()


class InsideMade(Inside):
    """The DDP is made after the Checkpointer."""

    def build(self):
        self.net = self.tracked = self.make()
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)

    def checkpointer_made(self):
        self.model = self.wrap()


class InsideResumed(InsideMade):
    """The DDP is made after the resume."""

    def checkpointer_made(self):
        pass

    def resumed(self):
        self.model = self.wrap()


class Ordered(Kind):
    """Tracks the module in the DDP; its order of adding counts."""

    def build(self):
        super().build()
        self.tracked = self.net


class OrderedResumed(Ordered):
    """The DDP is made after the resume."""

    def resumed(self):
        self.model = self.wrap()


class Part(Ordered):
    """The DDP is around something that the tracked module is a part of."""

    def wrap(self):
        return DistributedDataParallel(nn.Sequential(self.net), bucket_cap_mb=SMALL_MB)


class TwoParts(Part):
    """Two tracked modules in one DDP."""

    def build(self):
        super().build()
        self.tracked = [self.net[0], self.net[1:]]


class Again(Kind):
    """Unfreezes a layer in its second step, and wraps the module again."""

    def make(self):
        net = plain()
        net[1].requires_grad_(False)
        return net

    def before(self, cursor):
        if cursor.step >= 2 and not self.net[1].weight.requires_grad:
            self.net[1].requires_grad_(True)
            self.model = self.wrap()


class AgainKnown(Again):
    """Does so at once, where it is resumed after that."""

    def resumed(self):
        self.before(self.cursor)


class Replicated(Kind):
    """The older `replicate` of torch, whose DDP is made in the first forward."""

    def wrap(self):
        return replicate(self.net)


class Power(Kind):
    """PowerSGD: what was left over, what is begun with next, and a generator.

    With one bucket: gloo calls back from several threads, on each rank in another order.
    """

    def wrap(self):
        model = DistributedDataParallel(self.net)
        state = PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
        model.register_comm_hook(state, powerSGD_hook)
        return model


class PowerResumed(Power):
    """The hook comes after the resume."""

    def build(self):
        self.net = self.make()
        self.model = self.tracked = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)

    def resumed(self):
        state = PowerSGDState(None, start_powerSGD_iter=3, min_compression_rate=0.5)
        self.model.register_comm_hook(state, powerSGD_hook)


class PostLocal(Kind):
    """After some steps ranks train apart, and are averaged now and then."""

    def build(self):
        super().build()
        self.optimizer = PostLocalSGDOptimizer(
            self.optimizer, PeriodicModelAverager(period=4, warmup_steps=3)
        )

    def wrap(self):
        model = super().wrap()
        state = PostLocalSGDState(None, distributed.new_subgroups(1)[0], start_localSGD_iter=3)
        model.register_comm_hook(state, post_localSGD_hook)
        return model


class Halves(Kind):
    """A hook without a state."""

    def wrap(self):
        model = super().wrap()
        model.register_comm_hook(None, fp16_compress_hook)
        return model


class Counting:
    calls = 0


def counting_hook(state, bucket):
    state.calls += 1
    return allreduce_hook(None, bucket)


class Counted(Kind):
    """A hook whose state nobody knows."""

    def wrap(self):
        model = super().wrap()
        model.register_comm_hook(Counting(), counting_hook)
        return model


KINDS = {
    kind.__name__: kind
    for kind in (
        Static,
        Inside,
        InsideMade,
        InsideResumed,
        Ordered,
        OrderedResumed,
        Part,
        TwoParts,
        Again,
        AgainKnown,
        Replicated,
        Power,
        PowerResumed,
        PostLocal,
        Halves,
        Counted,
    )
}


def train(rank, place, kind, until, save_at=None):
    """So many micro-batches; what each of them left, where it began, and how exact it is."""
    torch.manual_seed(0)
    script = KINDS[kind]()
    script.build()
    torch.manual_seed(rank + 1)
    seen = {}
    ckpt = Checkpointer(
        place,
        model=script.tracked,
        optimizer=script.optimizer,
        every="never",
        accumulate=script.accumulate,
    )
    script.checkpointer_made()
    with contextlib.suppress(Left), ckpt:
        script.cursor = ckpt.cursor
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
    return seen, resumed and resumed.micro_batches, ckpt._attempt.report.exactness.word


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

"""Moments: nothing that others may still need is given up before what replaces it is kept."""

from __future__ import annotations

import threading

import pytest
import torch

from trainckpt.format.cursor import Cursor
from trainckpt.lifecycle.surviving.moments import Moments
from trainckpt.ranks.channel import Alone
from trainckpt.ranks.world import World
from trainckpt.state.moment import read_small
from trainckpt.state.registry import Registry

WIDTH = 200  # a weight of 160 kB, which only a step changes


class SlowPartner:
    """Says that a moment is safe some time after it was brought."""

    owners = ()

    def __init__(self, order):
        self._order = order

    def bring(self, moment):
        self._order.append("brought")
        threading.Timer(0.1, self._keep, [moment]).start()

    def _keep(self, moment):
        self._order.append("kept")
        moment.safe.set()


@pytest.fixture
def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    return model, optimizer, registry


def moments(registry, small):
    return Moments(registry, Alone(World(0, 1, 0, "here")), small)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(WIDTH)).sum().backward()
    optimizer.step()


def test_neither_a_step_nor_another_moment_comes_before_the_newest_is_kept(parts):
    model, optimizer, registry = parts
    order = []
    optimizer.register_step_post_hook(lambda *_: order.append("step"))
    kept = moments(registry, SlowPartner(order))
    kept.note(Cursor())
    train(model, optimizer)
    kept.note(Cursor(step=1))
    kept.note(Cursor(step=1, epoch=1))  # an epoch ends: no step between them
    train(model, optimizer)
    kept.close()
    assert order == ["brought", "kept", "step", *["brought", "kept"] * 2, "step"]


def test_a_moment_is_what_there_was_whatever_came_after(parts):
    model, optimizer, registry = parts
    kept = moments(registry, SlowPartner([]))
    train(model, optimizer)
    kept.note(Cursor(step=1))
    then, momentum = model.weight.detach().clone(), optimizer.state[model.weight]
    momentum = momentum["momentum_buffer"].clone()
    train(model, optimizer)
    torch.rand(1)
    kept.freeze()
    (moment,) = kept.held()
    assert not moment.is_whole
    share = kept.alike.share(0)
    assert moment.has(share)
    _ = moment.small.head
    shard, entries = moment.file_of(0, 1, share, moment.small.memory)
    _ = shard.head
    found, _ = read_small(shard.memory, "the file")
    assert torch.equal(found["model/weight"], then)
    assert torch.equal(found["optimizer/model/weight/momentum_buffer"], momentum)
    assert found.keys() == entries.keys()
    kept.close()


def test_what_was_changed_behind_the_optimizer_s_back_spoils_a_moment(parts):
    model, optimizer, registry = parts
    kept = moments(registry, SlowPartner([]))
    train(model, optimizer)
    kept.note(Cursor(step=1))
    with torch.no_grad():
        model.weight.mul_(2)
    kept.freeze()
    (moment,) = kept.held()
    assert not moment.is_whole
    assert not moment.has(kept.alike.share(0))
    kept.close()

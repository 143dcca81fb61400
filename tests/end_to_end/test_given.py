"""An optimizer's state becomes live where it was read to, and is what was saved at the start."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.state.helpers import bits
from trainckpt import Checkpointer
from trainckpt.errors import UnusableSnapshot
from trainckpt.format.shard_file import PAGE_BYTES
from trainckpt.storage.shared_memory import SharedMemoryDir

WIDTH = 512  # a moment of 1 MiB, read past the page cache


def objects(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    return model, torch.optim.Adam(model.parameters(), 0.01)


def attach(place, model, optimizer):
    ckpt = Checkpointer(place, model=model, optimizer=optimizer, every="never")
    ckpt.resume()
    return ckpt


def state_of(model, optimizer):
    kept = {name: bits(p) for name, p in model.named_parameters()}
    for number, state in enumerate(optimizer.state[p] for p in model.parameters()):
        kept.update({f"{number} {key}": bits(value) for key, value in state.items()})
    return kept


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A place with one snapshot, and what it holds."""
    place = tmp_path_factory.mktemp("given") / "run"
    model, optimizer = objects(0)
    ckpt = attach(place, model, optimizer)
    for _ in range(2):
        ckpt.boundary()
        model(torch.randn(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = ckpt.save()
    ckpt.boundary()
    handle.wait("durable")
    expected = state_of(model, optimizer)
    ckpt.__exit__(InterruptedError, InterruptedError("it dies"), None)
    return place, expected


@pytest.fixture(params=["disk"])
def resumed(saved, tmp_path, request):
    """Its objects after `resume`, before the first boundary; with or without what memory holds."""
    place = tmp_path / "run"
    shutil.copytree(saved[0], place)
    if request.param == "memory":
        memory = SharedMemoryDir.of(str(place)).root
        kept = SharedMemoryDir.found(str(saved[0])).root
        shutil.copytree(kept, memory, ignore=shutil.ignore_patterns("place"), dirs_exist_ok=True)
    model, optimizer = objects(1)
    ckpt = attach(place, model, optimizer)
    yield place, ckpt, model, optimizer
    ckpt.__exit__(InterruptedError, InterruptedError("it was read"), None)


def moments_of(model, optimizer):
    return optimizer.state[model[0].weight]


def data_of(moment):
    moment.data.add_(1)


def bit(moment):
    moment.detach().view(torch.uint8)[-1, -1] ^= 1


def another_memory(moment):
    moment.data = torch.zeros(3)


def one_step(moments, model, optimizer):
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def no_memory(moment):
    moment.data = torch.zeros(WIDTH, WIDTH)
    moment.untyped_storage().resize_(0)


CHANGES = {
    "nothing": lambda moments, *_: None,
    "a value through .data": lambda moments, *_: data_of(moments["exp_avg"]),
    "one bit": lambda moments, *_: bit(moments["exp_avg_sq"]),
    "another memory": lambda moments, *_: another_memory(moments["exp_avg"]),
    "its memory given up": lambda moments, *_: no_memory(moments["exp_avg"]),
    "another tensor": lambda moments, *_: moments.update(exp_avg=torch.zeros(WIDTH, WIDTH)),
    "both exchanged": lambda moments, *_: moments.update(
        exp_avg=moments["exp_avg_sq"], exp_avg_sq=moments["exp_avg"]
    ),
    "one of them twice": lambda moments, *_: moments.update(exp_avg=moments["exp_avg_sq"]),
    "a parameter through .data": lambda moments, model, _: data_of(model[0].weight),
    "one bit of a parameter": lambda moments, model, _: bit(model[0].weight),
    "all state lost": lambda moments, model, optimizer: optimizer.state.clear(),
    "its own state_dict loaded": lambda moments, model, optimizer: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "a step": one_step,
}


@pytest.mark.parametrize("resumed", ["disk", "memory"], indirect=True)
@pytest.mark.parametrize("change", CHANGES)
def test_whatever_the_script_changes_before_it_trains_is_as_it_was_saved(resumed, saved, change):
    _, ckpt, model, optimizer = resumed
    assert state_of(model, optimizer) == saved[1]
    moments = moments_of(model, optimizer)
    CHANGES[change](moments, model, optimizer)
    ckpt.boundary()
    assert state_of(model, optimizer) == saved[1]
    now = moments_of(model, optimizer)
    assert now["exp_avg"].data_ptr() != now["exp_avg_sq"].data_ptr()


def test_it_is_the_memory_that_was_read_to_and_what_nobody_changed_is_not_read_again(
    resumed, saved
):
    place, ckpt, model, optimizer = resumed
    moment = moments_of(model, optimizer)["exp_avg"]
    assert moment.data_ptr() % PAGE_BYTES == 0
    shutil.rmtree(place / "snapshots")
    ckpt.boundary()
    assert moments_of(model, optimizer)["exp_avg"] is moment
    assert state_of(model, optimizer) == saved[1]


@pytest.mark.parametrize("resumed", ["memory"], indirect=True)
def test_what_lies_in_the_host_s_memory_is_copied_never_live(resumed, saved):
    place, _, model, optimizer = resumed
    assert state_of(model, optimizer) == saved[1]
    shared = [
        range(*(int(end, 16) for end in line.split()[0].split("-")))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(SharedMemoryDir.found(str(place)).root) in line
    ]
    assert shared, "it was not read from memory"
    moments = moments_of(model, optimizer)
    live = [model[0].weight.data_ptr(), moments["exp_avg"].data_ptr()]
    assert not [where for where in live for mapped in shared if where in mapped]


def test_what_was_changed_and_cannot_be_read_again_ends_the_attempt(resumed):
    place, ckpt, model, optimizer = resumed
    moments_of(model, optimizer)["exp_avg"].data.add_(1)
    shutil.rmtree(place / "snapshots")
    with pytest.raises(UnusableSnapshot):
        ckpt.boundary()


class Growing(torch.optim.SGD):
    """Keeps what it has seen in a tensor that grows."""

    def step(self, closure=None):
        super().step(closure)
        first = self.param_groups[0]["params"][0]
        seen = self.state[first].setdefault("seen", torch.zeros(WIDTH * WIDTH))
        seen.resize_(seen.numel() + 1)[-1] = first.detach()[0, 0]


def test_state_of_another_shape_than_its_parameter_can_be_given_another_size(tmp_path):
    def train(place, steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
        optimizer = Growing(model.parameters(), 0.01)
        ckpt = attach(place, model, optimizer)
        for _ in range(steps):
            ckpt.boundary()
            one_step({}, model, optimizer)
        handle = ckpt.save()
        ckpt.boundary()
        handle.wait("durable")
        ckpt.__exit__(InterruptedError, InterruptedError("it dies"), None)
        return bits(optimizer.state[model[0].weight]["seen"])

    straight = train(tmp_path / "straight", 3)
    train(tmp_path / "run", 2)
    assert train(tmp_path / "run", 1) == straight

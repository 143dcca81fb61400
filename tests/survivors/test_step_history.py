"""Moments: nothing that others may still need is given up before what replaces it is kept."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.state.slow_device import SlowDevice
from trainckpt.format.cursor import Cursor
from trainckpt.ranks.store import local_store
from trainckpt.ranks.world import World
from trainckpt.state.device_copy import DeviceCopier
from trainckpt.state.registry import Registry
from trainckpt.state.step_state import HostCopies, read_small
from trainckpt.survivors.step_history import StepHistory

WIDTH = 200  # a weight of 160 kB, which only a step changes


class SlowPartner:
    """Says that a moment is safe some time after it was brought."""

    owners = ()

    def __init__(self, order):
        self._order = order

    def send(self, moment):
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


def moments(registry, small, device_copier=None):
    return StepHistory(
        registry, local_store(World(0, 1, 0, "here")), small, device_copier=device_copier
    )


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(WIDTH)).sum().backward()
    optimizer.step()


def test_neither_a_step_nor_another_moment_comes_before_the_newest_is_kept(parts):
    model, optimizer, registry = parts
    order = []
    optimizer.register_step_post_hook(lambda *_: order.append("step"))
    kept = moments(registry, SlowPartner(order))
    kept.record(Cursor())
    train(model, optimizer)
    kept.record(Cursor(step=1))
    kept.record(Cursor(step=1, epoch=1))  # an epoch ends: no step between them
    train(model, optimizer)
    kept.close()
    assert order == ["brought", "kept", "step", *["brought", "kept"] * 2, "step"]


def test_a_moment_is_what_there_was_whatever_came_after(parts):
    model, optimizer, registry = parts
    kept = moments(registry, SlowPartner([]))
    train(model, optimizer)
    kept.record(Cursor(step=1))
    then, momentum = model.weight.detach().clone(), optimizer.state[model.weight]
    momentum = momentum["momentum_buffer"].clone()
    train(model, optimizer)
    torch.rand(1)
    kept.freeze()
    (moment,) = kept.states()
    assert not moment.is_whole
    share = kept.replicated.share(0)
    assert moment.has(share)
    _ = moment.small.head
    shard, entries = moment.file_of(0, 1, share, moment.small.memory)
    _ = shard.head
    found, _ = read_small(shard.memory, "the file")
    assert torch.equal(found["model/weight"], then)
    assert torch.equal(found["optimizer/model/weight/momentum_buffer"], momentum)
    assert found.keys() == entries.keys()
    kept.close()


def test_a_moment_stays_whole_when_the_next_one_is_compared_anew(parts):
    """The first step makes tensors: what is equal on all ranks is another set from then on."""
    model, optimizer, registry = parts
    kept = moments(registry, SlowPartner([]))
    kept.record(Cursor())
    then = model.weight.detach().clone()
    train(model, optimizer)
    kept.record(Cursor(step=1))
    kept.freeze()
    older, newest = kept.states()
    assert older.entries.keys() < newest.entries.keys()
    share = older.share_of(0)
    assert older.has(share)
    assert not older.is_whole
    _ = older.small.head
    shard, entries = older.file_of(0, 1, share, older.small.memory)
    _ = shard.head
    found, _ = read_small(shard.memory, "the file")
    assert torch.equal(found["model/weight"], then)
    assert found.keys() == entries.keys()
    kept.close()


def test_training_advances_also_where_nothing_is_recorded(parts):
    """Else a rank that trains on, as under FSDP2, would count as one that hangs."""
    model, optimizer, registry = parts
    kept = moments(registry, None)
    kept._turn_off("the state is sharded")
    seen = [kept.progress]
    for step in range(3):
        kept.record(Cursor(step=step))
        seen.append(kept.progress)
        train(model, optimizer)
        seen.append(kept.progress)
    assert seen == sorted(set(seen))
    kept.close()


def test_what_was_changed_behind_the_optimizer_s_back_spoils_a_moment(parts):
    model, optimizer, registry = parts
    kept = moments(registry, SlowPartner([]))
    train(model, optimizer)
    kept.record(Cursor(step=1))
    with torch.no_grad():
        model.weight.mul_(2)
    kept.freeze()
    (moment,) = kept.states()
    assert not moment.is_whole
    assert not moment.has(kept.replicated.share(0))
    kept.close()


def test_a_device_copies_what_is_kept_and_the_step_comes_behind_its_copies(parts):
    model, optimizer, registry = parts
    device = SlowDevice()
    kept = moments(registry, SlowPartner([]), DeviceCopier(device))
    train(model, optimizer)
    for step in (1, 2, 3):
        kept.record(Cursor(step=step))
        newest = kept._states[-1]
        then, bias = model.weight.detach().clone(), model.bias.detach().clone()
        train(model, optimizer)
        assert torch.equal(newest.whole["model/bias"], bias)
        assert newest.whole["model/weight"].data_ptr() == model.weight.data_ptr()
        (copy,) = (c for key, c in newest.copied.items() if key.startswith("model/weight"))
        assert torch.equal(copy, then)
    assert device.num_started == 2 * 3  # at once, and beside training
    assert device.num_locked == 2 * 2  # two moments, each kind of copy
    assert device.held_back == 1  # in the first two the proof has waited for them
    kept.close()
    assert device.locked == {}


def test_copies_of_the_moment_before_last_are_written_over_and_no_others():
    device = SlowDevice()
    copies = HostCopies(DeviceCopier(device))
    tensor = torch.arange(6.0)
    made = []
    for number in range(3):
        tensor[0] = number
        made.append(copies.make({"w": tensor})["w"])
        assert made[-1].data_ptr() != tensor.data_ptr()
    assert [float(each[0]) for each in made] == [2.0, 1.0, 2.0]
    assert made[0].data_ptr() == made[2].data_ptr() != made[1].data_ptr()


def test_nothing_is_kept_where_a_graph_takes_the_steps(parts):
    model, optimizer, registry = parts
    device = SlowDevice()
    kept = moments(registry, None, DeviceCopier(device))
    train(model, optimizer)
    kept.record(Cursor(step=1))
    assert kept.is_live
    device.is_recording = True
    train(model, optimizer)
    device.is_recording = False
    kept.record(Cursor(step=2))
    assert "CUDA graph" in kept.why_off
    kept.close()


def test_survivors_read_apart_from_what_training_has_asked_of_the_device(parts):
    model, optimizer, registry = parts
    device = SlowDevice()
    kept = moments(registry, SlowPartner([]), DeviceCopier(device))
    train(model, optimizer)
    kept.record(Cursor(step=1))
    kept.freeze()
    with kept.on_own_stream():
        assert len(kept.states()) == 1
    assert device.set_apart == [("MainThread", {torch.device("cpu")})]
    kept.close()


@pytest.mark.gpu
def test_survivors_read_a_gpu_while_a_kernel_of_training_never_seems_to_end():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    kept = moments(registry, SlowPartner([]))
    optimizer.zero_grad()
    model(torch.ones(WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    kept.record(Cursor(step=1))
    then = model.weight.detach().cpu()
    after = torch.cuda.Event()
    torch.cuda._sleep(10_000_000_000)  # some seconds
    after.record()
    kept.freeze()
    found = []

    def save():
        with kept.on_own_stream():
            (moment,) = kept.states()
            share = kept.replicated.share(0)
            assert moment.has(share)
            _ = moment.small.head
            shard, _ = moment.file_of(0, 1, share, moment.small.memory)
            _ = shard.head
            found.append((read_small(shard.memory, "the file")[0], after.query()))

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    ((tensors, is_over),) = found
    assert not is_over
    assert torch.equal(tensors["model/weight"], then)
    torch.cuda.synchronize()
    kept.close()


@pytest.mark.gpu
def test_what_is_kept_of_a_gpu_takes_no_memory_there():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 2048)).cuda()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    kept = moments(registry, None)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2048, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept.record(Cursor(step=step))
        assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    kept.close()

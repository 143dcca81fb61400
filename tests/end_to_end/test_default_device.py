"""A script whose default device is not the CPU; "meta" stands in for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.state.helpers import bits, frozen, move, registry
from trainckpt import Checkpointer
from trainckpt.state import step_state
from trainckpt.state.adapters import ddp
from trainckpt.state.capture import capture
from trainckpt.state.dtensor import layout_of


@pytest.fixture
def elsewhere():
    """Whatever is made without a device is made there."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture
def group():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Remembers:
    """An object with tensors and arrays of its own."""

    def __init__(self):
        self.kept = {"t": torch.zeros(3, device="cpu"), "none": torch.empty(0, device="cpu")}

    def state_dict(self):
        return self.kept

    def load_state_dict(self, kept):
        self.kept = kept


def attempt(place, stop_at=None):
    """Losses of the steps of one attempt, and what is left in the end."""
    torch.set_default_device("cpu")
    torch.manual_seed(0)
    model, memory = nn.Sequential(nn.Linear(300, 300), nn.Dropout(0.5)), Remembers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.set_default_device("meta")
    losses = {}
    with Checkpointer(
        place, model=model, optimizer=optimizer, memory=memory, every="never"
    ) as ckpt:
        while ckpt.cursor.step < 5 and ckpt.boundary():
            step = ckpt.cursor.step
            if step == stop_at:
                pending = ckpt.save()
                ckpt.boundary()
                pending.wait("local")
                raise InterruptedError
            loss = model(torch.randn(2, 300, device="cpu")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            memory.kept["t"] += loss.detach()
            losses[step] = loss.item().hex()
    return losses, frozen([model.state_dict(), optimizer.state_dict(), memory.kept])


@pytest.mark.usefixtures("elsewhere")
def test_a_run_is_saved_and_goes_on_bitwise(tmp_path):
    losses, end = attempt(tmp_path / "straight")
    with pytest.raises(InterruptedError):
        attempt(tmp_path / "run", stop_at=3)
    rest, same = attempt(tmp_path / "run")
    assert rest == {step: loss for step, loss in losses.items() if step >= 3}
    assert same == end


@pytest.mark.usefixtures("elsewhere")
def test_sparse_gradients_and_empty_tensors_come_back_where_they_were():
    def build():
        with torch.device("cpu"):
            model = nn.Embedding(9, 3, sparse=True)
            model.register_buffer("nothing", torch.zeros(0, 3))
        return model

    model, other = build(), build()
    model(torch.tensor([1, 1, 2], device="cpu")).square().sum().backward()
    move(registry(model=model), registry(model=other))
    assert bits(other.weight.grad) == bits(model.weight.grad)


@pytest.mark.usefixtures("elsewhere")
def test_what_ranks_keep_of_each_other_is_read_into_memory_of_the_host():
    captured = capture(registry(memory=Remembers()))
    shard = step_state.small_file(captured, [], 0, 1)
    tensors, _ = step_state.read_small(memoryview(bytearray(b"".join(shard.blocks()))), "a file")
    assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
    assert len(tensors) > 1


@pytest.mark.usefixtures("group", "elsewhere")
def test_a_mesh_has_a_layout_and_ddp_its_order():
    with torch.device("cpu"):
        mesh = init_device_mesh("cpu", (1,))
        weight = fully_shard(nn.Linear(4, 3), mesh=mesh).weight
        model, fresh = (DistributedDataParallel(nn.Linear(3, 3)) for _ in range(2))
        model(torch.ones(1, 3)).sum().backward()
        saved = ddp.capture(model, "")
    assert layout_of(weight) is not None
    saved["bucket_order"] = ",".join(saved["bucket_order"].split()[::-1])
    ddp.apply_bucket_order(fresh, saved)
    assert ddp.capture(fresh, "")["bucket_order"].split() == saved["bucket_order"].split(",")

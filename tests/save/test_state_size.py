"""How many bytes a snapshot would hold, also of tensors that have no plain size."""

from __future__ import annotations

import torch
from torch import nn

from tests.ranks.processes import run_in_turn
from tests.save import state_size_programs as programs
from trainckpt.save.estimates import weigh
from trainckpt.state.registry import Registry


def test_state_gradients_and_moments_are_counted():
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    registry = Registry()
    registry.add("model", model)
    registry.add("optimizer", optimizer)
    empty = weigh(registry, gradients=True)
    assert (empty.state, empty.gradients, empty.possible_gradients) == (64, 0, 64)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    full = weigh(registry, gradients=True)
    assert (full.gradients, full.now) == (64, full.state + 64)
    assert full.state == 3 * 64 + 4  # AdamW's step count besides


def test_a_sparse_gradient_has_a_size_too():
    """Its `nbytes` raises, and no signal may be lost over that."""
    model = nn.Embedding(10, 4, sparse=True)
    registry = Registry()
    registry.add("model", model)
    model(torch.tensor([1, 2])).sum().backward()
    assert weigh(registry, gradients=True).gradients == 2 * 8 + 2 * 4 * 4


def test_gradients_are_not_looked_at_from_other_threads():
    """Reading `.grad` while another thread is in a backward corrupts torch's memory."""

    class Watched(nn.Linear):
        pass

    model = Watched(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    tracked = Registry()
    tracked.add("model", model)
    assert weigh(tracked, gradients=False).gradients == 0
    assert weigh(tracked, gradients=True).gradients == 24


def test_a_rank_s_file_holds_its_part_of_the_state():
    """256 bytes of parameters: halves under DDP, which divides them, and under FSDP2, which shards.

    Under DDP a rank has gradients for all; under FSDP2 too, without synchronization, and sharded
    ones besides. So the gradients of both DDP ranks count in a snapshot.
    """
    ddp, sharded = run_in_turn(2, (programs.count, "ddp", 2), (programs.count, "fsdp", 2))
    assert ddp == [(256, 128, 128 + 256, 2 * 256)] * 2
    assert sharded == [(256, 128, 128 + 256 + 128, 256 + 256)] * 2

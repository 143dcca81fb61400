"""A program of real ranks each of which has a stage of one model, under a name of its own."""

from __future__ import annotations

import torch
from torch import distributed, nn

from trainckpt import Checkpointer
from trainckpt.errors import StateMismatch


def train(rank, place, until, swapped=False):
    """Steps up to `until` of two stages, or of both on one rank; what each step has left on this
    rank. Or what a resume was refused for."""
    torch.manual_seed(rank)
    world = distributed.get_world_size()
    mine = [1 - rank if swapped else rank] if world > 1 else [0, 1]
    stages = {f"s{n}": nn.Linear(4, 4 - 3 * n) for n in mine}
    model = nn.ModuleDict(stages)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    seen = {}
    try:
        with Checkpointer(place, model=model, optimizer=optimizer, every="never") as ckpt:
            for number in range(ckpt.cursor.micro_batches, until):
                ckpt.boundary()
                step(mine, model, optimizer)
                state = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
                seen[number] = [tensor.tolist() for tensor in state]
    except StateMismatch as error:
        return error.differences, error.hint
    return seen


def step(mine, model, optimizer):
    """Forward and backward through both stages."""
    sent = torch.zeros(2, 4)
    if mine == [0]:
        out = model["s0"](torch.rand(2, 4))
        distributed.send(out.detach(), 1)
        distributed.recv(sent, 1)
        out.backward(sent)
    elif mine == [1]:
        distributed.recv(sent, 0)
        model["s1"](sent.requires_grad_()).square().mean().backward()
        distributed.send(sent.grad, 0)
    optimizer.step()
    optimizer.zero_grad()

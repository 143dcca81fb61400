"""Programs of two ranks whose states do not change alike."""

from __future__ import annotations

import torch

from trainckpt import Checkpointer

WIDTH = 200


def train_at_different_times(rank, place, redundancy):
    """The optimizer of a network that each rank has for itself steps first at another step."""
    torch.manual_seed(0)
    shared, own = torch.nn.Linear(WIDTH, 1), torch.nn.Linear(WIDTH, WIDTH)
    parts = {
        "model": shared,
        "optimizer": torch.optim.AdamW(shared.parameters()),
        "own": own,
        "own_optimizer": torch.optim.AdamW(own.parameters()),
    }
    seen = []
    with Checkpointer(
        place, **parts, every="never", redundancy=redundancy, survivors="30 s", accumulate=1
    ) as ckpt:
        moments = ckpt._attempt.survival._moments
        for step in range(9):
            ckpt.boundary()
            seen.append((moments.why_off, sorted(moments.replicated.layouts)))
            _step(parts["optimizer"], shared, torch.ones(WIDTH))
            if step >= 4 + rank:
                _step(parts["own_optimizer"], own, torch.full((WIDTH,), rank + 1.0))
    return seen


def train_apart(rank, place, until):
    """The replicas are equal up to a step, and drift apart from then on, as in local SGD."""
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with Checkpointer(
        place,
        model=model,
        optimizer=optimizer,
        every="never",
        redundancy="partner",
        survivors="30 s",
        accumulate=1,
    ) as ckpt:
        moments = ckpt._attempt.survival._moments
        for step in range(until + 4):
            ckpt.boundary()
            newest = moments._states[-1]
            _step(optimizer, model, torch.full((WIDTH,), 1.0 + rank * (step >= until)))
            samples = {newest.sample, *newest.samples_of.values()}
            seen.append((len(samples), "model/weight" in newest.whole))
    return seen


def _step(optimizer, model, batch):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()

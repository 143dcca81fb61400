"""Saves make few containers: enough of them would start a collection of all garbage.

Such a collection stops training for some tenths of a second where a model has many tensors.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager

import torch
from torch import nn

import trainckpt

LAYERS, THRESHOLD = 400, 100


@contextmanager
def young_collections():
    """Yield a list, and add a number to it for each `THRESHOLD` containers made and kept."""
    found, before = [], gc.get_threshold()

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.collect()
    gc.set_threshold(THRESHOLD, 1000, 1000)
    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


def test_a_later_save_makes_no_container_for_each_tensor(tmp_path):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    tensors = 3 * 2 * LAYERS
    with trainckpt.Checkpointer(tmp_path, model=model, optimizer=optimizer, every="never") as ckpt:
        ckpt.boundary()
        for _ in range(2):
            handle = ckpt.save()
            ckpt.boundary()
            handle.wait("durable")
        with young_collections() as found:
            handle = ckpt.save()
            ckpt.boundary()
            handle.wait("durable")
    assert len(found) * THRESHOLD < tensors

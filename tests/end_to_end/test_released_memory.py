"""A run that has ended keeps no memory of its model: a process may train several, one by one."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import trainckpt


def ended_run(run, resume: str) -> list[weakref.ref]:
    """Train and save a little; return references to all that the run had."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with trainckpt.Checkpointer(
        run, model=model, optimizer=optimizer, every="never", resume=resume
    ) as ckpt:
        for _ in range(3):
            handle = ckpt.save()
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.boundary()
            handle.wait("durable")
    return [weakref.ref(each) for each in (model, optimizer, ckpt)]


@pytest.mark.parametrize("resume", ["never", "required"])
def test_a_run_that_has_ended_lets_go_of_its_model(tmp_path, resume):
    for kind in dict.fromkeys(["never", resume]):
        held = ended_run(tmp_path, kind)
    gc.collect()
    assert [each() for each in held] == [None, None, None]

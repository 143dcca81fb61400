"""The training thread's work for each tensor, in calls: seconds would depend on the machine."""

from __future__ import annotations

import sys

import torch
from torch import nn

from trainckpt import Checkpointer

FEW, MANY = 20, 60  # layers
TENSORS = 2 * 4 * (MANY - FEW)  # weight and bias, with both moments and the step count of each


class Calls:
    """Counts the calls of this thread, of Python functions and of others, inside a `with`."""

    number = 0

    def __enter__(self):
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _count(self, frame, event, argument):
        self.number += event in ("call", "c_call")


def attempt(run, layers):
    """Return the calls of a resume or fresh start, of its first save and of its third one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    saves = []
    with Calls() as start:
        ckpt = Checkpointer(run, model=model, optimizer=optimizer, every="never")
        ckpt.resume()
        ckpt.boundary()
    for _ in range(3):
        optimizer.step()
        handle = ckpt.save()
        with Calls() as save:
            ckpt.boundary()
        handle.wait()
        saves.append(save.number)
        optimizer.step()
        ckpt.boundary()  # the check of the weights looks at 256 of them, one step after a save
    ckpt.close()
    return start.number, saves[0], saves[-1]


def test_the_calls_for_each_tensor_of_a_save_and_of_a_resume_are_few(tmp_path):
    (_, *few), (_, *many) = attempt(tmp_path / "few", FEW), attempt(tmp_path / "many", MANY)
    first, later = ((b - a) / TENSORS for a, b in zip(few, many, strict=True))
    resumes = [attempt(tmp_path / which, n)[0] for which, n in (("few", FEW), ("many", MANY))]
    resume = (resumes[1] - resumes[0]) / TENSORS
    assert later <= 12
    assert first <= 80
    assert resume <= 440

"""Printing a tensor takes as long as copying megabytes: no save and no resume does it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from trainckpt import Attributes, Checkpointer


class Data(torch.utils.data.Dataset):
    """Samples with a mapping whose keys are tensors."""

    def __init__(self):
        self.weights = {torch.tensor(float(i)): i for i in range(3)}

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Counts:
    """Attributes that a script tracks."""

    seen, mean = 0, torch.zeros(3)


def train(run, batches):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    teacher = copy.deepcopy(model)
    model.history = [torch.zeros(2)]
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    tracked = {
        "model": model,
        "teacher": teacher,
        "optimizer": optimizer,
        "schedule": schedule,
        "counts": Attributes(Counts(), "seen", "mean"),
    }
    loader = DataLoader(Data(), batch_size=1, shuffle=True)
    with Checkpointer(run, loader=loader, every="1 step", on_stop="return", **tracked) as ckpt:
        for _ in ckpt.epochs(1):
            for number, batch in enumerate(ckpt.batches()):
                if number == batches:
                    return ckpt.resumed_from
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        return ckpt.resumed_from


def test_no_save_and_no_resume_prints_a_tensor(tmp_path, monkeypatch):
    def refuse(tensor, **_):
        pytest.fail(f"a tensor of shape {tuple(tensor.shape)} is printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    monkeypatch.setattr(nn.Parameter, "__repr__", refuse)
    monkeypatch.setattr(torch.Tensor, "__format__", refuse)
    train(tmp_path, 4)
    assert train(tmp_path, 3) is not None

from __future__ import annotations

import pytest
import torch

import trainckpt
from trainckpt.resume.resume import AT_VARIABLE


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Train a tiny model in this process, some steps of it; returns the run's folder."""
    for name in ("TRAINCKPT_PROVE", "TRAINCKPT_SUPERVISOR", AT_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def make(
        name: str = "run",
        steps: int = 3,
        at: str | None = None,
        tag: str | None = None,
        each=lambda run, step: None,
    ):
        if at:
            monkeypatch.setenv(AT_VARIABLE, at)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        run = tmp_path / name
        with trainckpt.Checkpointer(
            run, model=model, optimizer=optimizer, every="1 steps", keep_last=50
        ) as ckpt:
            while ckpt.cursor.step < steps:
                if tag and ckpt.cursor.step == 1:
                    ckpt.save(tag=tag)
                ckpt.boundary()
                each(run, ckpt.cursor.step)
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        monkeypatch.delenv(AT_VARIABLE, raising=False)
        return run

    return make

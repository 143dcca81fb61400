"""torchmetrics, tracked or held by a tracked model: an epoch's metric goes on where it was."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer

torchmetrics = pytest.importorskip("torchmetrics")


class Holding(nn.Module):
    """A model that holds its metrics, as Lightning's do."""

    def __init__(self, metric):
        super().__init__()
        self.linear, self.metric = nn.Linear(1, 1), metric

    def forward(self, x):
        return self.linear(x)


def mean():
    return torchmetrics.MeanMetric()


def persistent():
    metric = torchmetrics.MeanSquaredError()
    metric.persistent(True)
    return metric


def collection():
    """Two of one group: they share a state once they were seen to be alike."""
    kinds = [
        torchmetrics.MeanSquaredError(),
        torchmetrics.MeanAbsoluteError(),
        torchmetrics.MeanSquaredError(squared=False),
    ]
    return torchmetrics.MetricCollection({str(i): kind for i, kind in enumerate(kinds)})


def averaging():
    """Its forward weighs by the number of updates, which is in no state_dict."""

    class Mean(torchmetrics.Metric):
        full_state_update = False

        def __init__(self):
            super().__init__()
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, predictions, targets):
            self.value = (predictions - targets).mean()

        def compute(self):
            return self.value

    return Mean()


def train(place, make, held, crash_at=None):
    """The metric after an epoch, as text."""
    torch.manual_seed(0)
    metric = make()
    model = Holding(metric) if held else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracked = {} if held else {"metric": metric}
    data = torch.utils.data.DataLoader(torch.arange(12.0), 2)
    with Checkpointer(
        place, model=model, optimizer=optimizer, loader=data, every="1 steps", **tracked
    ) as ckpt:
        for _ in ckpt.epochs(1):
            for x in ckpt.batches():
                if ckpt.cursor.micro_batches == crash_at:
                    raise Crash
                out = model(x[:, None])[:, 0]
                out.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                values = (out.detach(),) if make is mean else (out.detach(), x)
                metric(*values)
    return str(metric.compute())


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    "make", [mean, persistent, collection, pytest.param(averaging, marks=pytest.mark.long)]
)
def test_the_epochs_metric_is_that_of_the_run_that_was_not_stopped(tmp_path, caplog, make, held):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = train(tmp_path / "straight", make, held)
    with pytest.raises(Crash):
        train(tmp_path / "run", make, held, crash_at=3)
    assert train(tmp_path / "run", make, held) == straight
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text


@pytest.mark.parametrize("make", [mean, persistent])
def test_a_snapshot_of_an_older_release_resumes_with_what_it_has(
    tmp_path, caplog, monkeypatch, make
):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = train(tmp_path / "straight", make, held=False)
    with monkeypatch.context() as older:
        older.setattr("trainckpt.state.registry.is_metric", lambda module: False)
        with pytest.raises(Crash):
            train(tmp_path / "run", make, held=False, crash_at=3)
    resumed = train(tmp_path / "run", make, held=False)
    assert (resumed == straight) == (make is persistent)
    assert "not bitwise: the snapshot does not hold all of the metric" in caplog.text

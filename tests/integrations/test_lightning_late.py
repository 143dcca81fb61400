"""What callbacks and metrics hold beside Lightning's own state, some of it made late.

Without it the second part of an epoch would be averaged, compared or summed up alone.
"""

from __future__ import annotations

import copy

import lightning
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torchmetrics import MeanMetric, MetricTracker, MinMaxMetric
from torchmetrics.wrappers import Running

import trainckpt
from tests.integrations.lightning_training import StopAt, Toy, fit, loaders
from tests.integrations.test_lightning import same
from trainckpt.errors import StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """More only wait for each other in so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Summing(lightning.Callback):
    """Has a metric of its own."""

    def __init__(self):
        self.mean = MeanMetric()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.mean.update(outputs["loss"].detach())

    def on_train_epoch_end(self, trainer, module):
        module.note("summed", self.mean.compute())
        self.mean.reset()


class Averaging(lightning.Callback):
    """Averages weights in a module that it makes when training starts."""

    def on_train_start(self, trainer, module):
        self.average = copy.deepcopy(module.net)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for mine, live in zip(self.average.parameters(), module.net.parameters(), strict=True):
            mine.lerp_(live, 0.1)

    def on_train_epoch_end(self, trainer, module):
        module.note("average", sum(p.sum() for p in self.average.parameters()))


class Among(lightning.Callback):
    """Puts what it has among the weights of a checkpoint, as some do; made when training starts."""

    def on_train_start(self, trainer, module):
        if not hasattr(self, "sums"):
            self.sums = {"a": torch.zeros(())}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.sums["a"] = self.sums["a"] + outputs["loss"].detach()

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["state_dict"].update({f"sums.{k}": v for k, v in self.sums.items()})

    def on_load_checkpoint(self, trainer, module, checkpoint):
        self.sums = {"a": checkpoint["state_dict"]["sums.a"]}

    def on_train_epoch_end(self, trainer, module):
        module.note("sum", self.sums["a"])


class Wrapping(Toy):
    """Wrappers of torchmetrics that keep something beside their states."""

    def __init__(self):
        super().__init__()
        self.extremes = MinMaxMetric(MeanMetric())
        self.running = Running(MeanMetric(), window=3)
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for metric in (self.extremes, self.running, self.tracker):
            metric.update(loss.detach())
        self.extremes.compute()
        return loss

    def on_train_epoch_end(self):
        self.note("extremes", *self.extremes.compute().values())
        self.note("running", self.running.compute())
        self.note("tracked", *self.tracker.compute_all())
        super().on_train_epoch_end()


@pytest.mark.parametrize("at", [5, 13])
def test_what_callbacks_and_metrics_hold_is_there_again(tmp_path, at):
    def how():
        return {"module": Wrapping, "callbacks": [Summing(), Averaging(), Among()]}

    straight = fit(**how())
    parts = [fit(tmp_path, stop=StopAt(at), **how()), fit(tmp_path, seed=99, **how())]
    same(straight, parts)


def test_a_callback_that_no_longer_makes_its_module_is_refused(tmp_path):
    fit(tmp_path, stop=StopAt(2), callbacks=[Averaging()])
    with pytest.raises(StateMismatch, match="Averaging0average"):
        fit(tmp_path, callbacks=[lightning.Callback()])


class Rated(Toy):
    """Has a learning rate that can be looked for, and can fail."""

    lr, broken = 0.02, False

    def configure_optimizers(self):
        if self.broken:
            raise ZeroDivisionError
        return torch.optim.AdamW(self.parameters(), self.lr)


def test_a_tuner_and_a_fit_that_failed_before_training_are_no_fit(tmp_path):
    ours = trainckpt.lightning.TrainckptCallback(tmp_path, on_stop="return")
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ours],
        default_root_dir=tmp_path,
    )
    module, data = Rated(), loaders()
    Tuner(trainer).lr_find(module, *data, num_training=3)
    tuned = len(module.seen)
    module.broken = True
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, *data)
    module.broken = False
    trainer.fit(module, *data)
    assert len(module.seen) == tuned + 10

"""A small fit with everything that is easy to lose, stopped at chosen micro-batches and resumed.

Each sample is augmented from Python's, NumPy's and torch's generators in the worker; the model has
dropout, BatchNorm and a metric; losses depend on all of it.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric

import trainckpt

BATCH, ITEMS, EPOCHS, ACCUMULATE = 2, 20, 3, 4  # 10 micro-batches an epoch, windows of 4, 4 and 2
WAIT_S = 60.0

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def quiet():
    """Lightning warns of small loaders, few workers and much else that is wanted here."""
    warnings.filterwarnings("ignore", module="lightning.*")
    warnings.filterwarnings("ignore", module="torch.*")


class Augmented(Dataset):
    """Fixed vectors, and noise from every generator of the process that loads them."""

    def __init__(self, items=ITEMS):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        fixed = torch.randn(6, generator=torch.Generator().manual_seed(index))
        noise = random.random() + float(np.random.rand())
        return fixed + 0.1 * torch.randn(6) + 0.1 * noise, index


class Lines(list):
    """What a test reads after a fit; a plain list would be named as lost by a resume."""


class Toy(lightning.LightningModule):
    """Automatic optimization; `seen` has a line for each micro-batch, `notes` for all else."""

    def __init__(self, scheduler="step"):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.mean = MeanMetric()
        self.scheduler = scheduler
        self.seen, self.notes = Lines(), Lines()

    def loss(self, batch):
        x, _ = batch
        return self.net(x).square().mean()

    def note(self, *what):
        place = self.trainer.current_epoch, self.trainer.global_step
        self.notes.append((*place, *(w.item().hex() if hasattr(w, "item") else w for w in what)))

    def see(self, batch, batch_idx, loss):
        progress = self.trainer.fit_loop.epoch_loop
        rate = self.optimizers(use_pl_optimizer=False)
        rate = (rate[0] if isinstance(rate, list) else rate).param_groups[0]["lr"]
        line = (
            self.trainer.current_epoch,
            batch_idx,
            self.trainer.global_step,
            progress._batches_that_stepped,
            tuple(batch[1].tolist()),
            loss.item().hex(),
            rate,
            self.trainer.is_last_batch,
        )
        self.seen.append(line)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("first", loss.new_tensor(float(batch_idx)), on_epoch=True, reduce_fx="max")
        if batch_idx == 0:
            self.log("only_first", loss, on_epoch=True, on_step=False)
        self.see(batch, batch_idx, loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.note("validated", batch_idx, tuple(batch[1].tolist()), loss)

    def on_train_epoch_end(self):
        self.note("mean", self.mean.compute())
        self.mean.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        if self.scheduler == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
            }
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.scheduler},
        }


class Alternating(Toy):
    """Manual optimization with two optimizers, each with a schedule of its own."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(6, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / ACCUMULATE)
        self.manual_backward((self.other(batch[0]) - 1).square().mean() / ACCUMULATE)
        if (batch_idx + 1) % ACCUMULATE == 0:
            first.step()
            first.zero_grad()
            self.lr_schedulers()[0].step()
            if batch_idx % 8 == 7:
                second.step()
                second.zero_grad()
                self.lr_schedulers()[1].step()
        self.log("loss", loss, on_epoch=True)
        self.see(batch, batch_idx, loss)

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net.parameters(), 0.02)
        second = torch.optim.SGD(self.other.parameters(), 0.02, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (first, second)]
        return [first, second], schedules


class StopAt(lightning.Callback):
    """Sends this process a SIGTERM in a micro-batch, or in a validation, and waits for its notice.

    Args:
        micro: Micro-batches trained before the one in which it comes; over all attempts.
        in_validation: Instead, in the first validation from that micro-batch on.
    """

    def __init__(self, micro, in_validation=False):
        self.micro, self.in_validation = micro, in_validation
        self.sent = threading.Event()  # no plain value, so a resume leaves it as it is

    def strike(self, trainer):
        if not self.sent.is_set() and trainer.fit_loop.epoch_loop.total_batch_idx >= self.micro:
            self.sent.set()
            ours = next(
                c for c in trainer.callbacks if hasattr(c, "checkpointer") and c is not self
            )
            signal.raise_signal(signal.SIGTERM)
            until = time.monotonic() + WAIT_S
            while not ours.checkpointer._gate.has_open_round():
                assert time.monotonic() < until, "the notice was not heard"
                time.sleep(0.001)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.in_validation:
            self.strike(trainer)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        if self.in_validation and not trainer.sanity_checking:
            self.strike(trainer)


def loaders(workers=0, items=ITEMS, **more):
    """A training loader, and one for validation."""
    more = {"num_workers": workers, "persistent_workers": workers > 0, **more}
    if workers:
        more.setdefault("multiprocessing_context", "fork")
    training = DataLoader(Augmented(items), BATCH, shuffle=True, **more)
    return training, DataLoader(Augmented(6), BATCH, **more)


def fit(
    place=None,
    *,
    stop=None,
    module=None,
    workers=0,
    callbacks=(),
    options=None,
    data=None,
    seed=7,
    ckpt_path=None,
    **trainer,
):
    """One attempt; place=None: without the callback.

    Returns:
        seen, notes: of the module.
        end: everything the run ended with.
        trainer, module, ours.
    """
    quiet()
    with the_environment_as_it_is():
        lightning.seed_everything(seed, verbose=False)
        return _fit(place, stop, module, workers, callbacks, options, data, ckpt_path, trainer)


@contextmanager
def the_environment_as_it_is():
    """Lightning keeps its seed there."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _fit(place, stop, module, workers, callbacks, options, data, ckpt_path, trainer):
    module = (module or Toy)()
    usual = {"on_stop": "return", "every": "1000 steps", "stop_at": "micro-batch"}
    ours = place and trainckpt.lightning.TrainckptCallback(place, **{**usual, **(options or {})})
    found = [*callbacks, *([ours] if ours else []), *([stop] if stop else [])]
    settings = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "accumulate_grad_batches": ACCUMULATE if module.automatic_optimization else 1,
    }
    trainer = lightning.Trainer(**{**settings, **trainer}, callbacks=found)
    given = data if isinstance(data, lightning.LightningDataModule) else None
    pair = (
        {}
        if given
        else dict(
            zip(("train_dataloaders", "val_dataloaders"), data or loaders(workers), strict=False)
        )
    )
    trainer.fit(module, datamodule=given, ckpt_path=ckpt_path, **pair)
    return SimpleNamespace(
        seen=module.seen,
        notes=module.notes,
        end=end_of(trainer, module),
        trainer=trainer,
        module=module,
        ours=ours,
    )


def end_of(trainer, module):
    """All that must be equal in the end, but what stops and resumes leave behind on purpose."""
    numpy = np.random.get_state()
    loops = {k: v for k, v in trainer.fit_loop.state_dict().items() if "val_loop" not in k}
    return {
        "model": module.state_dict(),
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "rng": [random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state()],
        "logged": {k: v.item().hex() for k, v in sorted(trainer.callback_metrics.items())},
        "loops": loops,
    }

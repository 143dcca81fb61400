"""The toy job under Lightning: one device, or DDP under torchrun."""

from __future__ import annotations

import importlib.util
import logging
import random
import signal
import time
import warnings

import lightning
import numpy as np
import torch
from benchmarks.exactness.frame import ACCUMULATE, BATCH, EPOCH, EPOCHS
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset

import trainckpt

SYSTEMS = ["trainckpt", "own"]
if importlib.util.find_spec("torchdata"):
    SYSTEMS.append("own, StatefulDataLoader")
FSDP2 = "trainckpt FSDP2"  # where there are several ranks

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("trainckpt").setLevel(logging.WARNING)
warnings.filterwarnings("ignore")


class Augmented(Dataset):
    """Fixed vectors, and noise from every generator of the process that loads them."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        fixed = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = random.random() + float(np.random.rand())
        return fixed + 0.1 * torch.randn(8) + 0.1 * noise, index


class Toy(lightning.LightningModule):
    """Records micro-batches by number; what an epoch learns depends on the last one's mean."""

    def __init__(self, record):
        super().__init__()
        wide = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]
        self.net = nn.Sequential(
            nn.Linear(8, 64), nn.BatchNorm1d(64), *wide, nn.Dropout(0.2), nn.Linear(64, 1)
        )
        self.register_buffer("mean", torch.zeros(()))
        self.record = record

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in (*self.net, self):
                if next(part.parameters(), None) is not None:
                    fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean() * (1 + self.mean)
        at = self.trainer.current_epoch * EPOCH + batch_idx
        self.record(at, batch[1].tolist(), loss.item())
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        if "loss" in self.trainer.callback_metrics:  # Lightning resumes some epochs at their end
            self.mean.copy_(self.trainer.callback_metrics["loss"] / 10)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Leave(BaseException):
    """A job that saved a checkpoint ends."""


class StopAt(lightning.Callback):
    """Calls `how(trainer)` when `stop` says so."""

    def __init__(self, stop, how):
        self.stop, self.how = stop, how

    def at(self, trainer, in_validation):
        trained = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if in_validation == self.stop.in_validation and trained == self.stop.after:
            self.stop = self.stop._replace(after=-1)
            self.how(trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.at(trainer, in_validation=False)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.at(trainer, in_validation=True)


def attempt(case, place, stop, record):
    """One attempt of the toy job."""
    lightning.seed_everything(3, verbose=False)  # as the same script does, run again
    module = Toy(record)
    torch.manual_seed(torch.initial_seed() + 1 + case.rank)
    file = place / "own.ckpt"
    callbacks = [] if stop is None else [StopAt(stop, own_way(file))]
    if case.system.startswith("trainckpt"):
        ours = trainckpt.lightning.TrainckptCallback(
            place, stop_at="micro-batch", on_stop="return", every="1000 steps"
        )
        callbacks = [ours] if stop is None else [ours, StopAt(stop, by_signal(ours, case))]
    strategy = "ddp" if case.ranks > 1 else "auto"
    if case.system == FSDP2:
        strategy = ModelParallelStrategy(case.ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        accelerator="cpu",
        devices=case.ranks,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=2,
        callbacks=callbacks,
    )
    kind, more = loader_class(case), {"num_workers": case.workers}
    if case.workers:
        more["multiprocessing_context"] = "fork"
    training = kind(Augmented(EPOCH * BATCH * case.ranks), BATCH, shuffle=True, **more)
    validation = DataLoader(Augmented(8 * case.ranks), BATCH)
    try:
        trainer.fit(
            module,
            training,
            validation,
            weights_only=False,
            ckpt_path=file if file.exists() else None,
        )
    except Leave:
        pass
    if case.system == FSDP2:
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


def loader_class(case):
    """The training loader's."""
    if not case.system.endswith("StatefulDataLoader"):
        return DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def own_way(file):
    """Save as Lightning does, and go."""

    def leave(trainer):
        trainer.save_checkpoint(file)
        raise Leave

    return leave


def by_signal(ours, case):
    """SIGTERM to the last rank; the others wait here until they have heard of it."""

    def strike(trainer):
        if case.rank == case.ranks - 1:
            signal.raise_signal(signal.SIGTERM)
        while not ours.checkpointer._gate.has_open_round():
            time.sleep(0.001)

    return strike

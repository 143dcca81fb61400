"""The toy job under Accelerate: one process, or DDP under torchrun."""

from __future__ import annotations

import json
import random
import warnings

import numpy as np
import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from benchmarks.exactness.frame import ACCUMULATE, BATCH, EPOCH, EPOCHS
from benchmarks.exactness.toy import Augmented, net, strike
from torch.utils.data import DataLoader

import trainckpt

SYSTEMS = ["trainckpt", "own", "own, seedable sampler"]

warnings.filterwarnings("ignore")


class Leave(BaseException):
    """A job that saved a checkpoint ends."""


def attempt(case, place, stop, record):
    """One attempt of the toy job."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATE,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler="seedable" in case.system),
    )
    parts = prepared(case, accelerator)
    job = Job(case, accelerator, parts, stop, record)
    try:
        (job.with_trainckpt if case.system == "trainckpt" else job.with_its_own)(place)
    except Leave:
        pass


def prepared(case, accelerator):
    """Model, optimizer, schedule, training loader, validation loader."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40 * case.ranks)
    more = {"num_workers": case.workers}
    if case.workers:
        more["multiprocessing_context"] = "fork"
    training = DataLoader(Augmented(EPOCH * BATCH * case.ranks), BATCH, shuffle=True, **more)
    validation = DataLoader(Augmented(8 * case.ranks), BATCH)
    parts = accelerator.prepare(model, optimizer, schedule, training, validation)
    torch.manual_seed(4 + case.rank)
    return parts


class Job:
    """The loop, twice: with trainckpt, and as Accelerate's guide to checkpoints has it."""

    def __init__(self, case, accelerator, parts, stop, record):
        self.case, self.accelerator, self.stop, self.record = case, accelerator, stop, record
        self.model, self.optimizer, self.schedule, self.training, self.validation = parts

    def with_trainckpt(self, place):
        ckpt = trainckpt.accelerate.attach(
            self.accelerator, place, stop_at="micro-batch", on_stop="return", every="1000 steps"
        )
        self.stopping = lambda _: strike(ckpt, here=self.case.rank == self.case.ranks - 1)
        for epoch in ckpt.epochs(EPOCHS):
            for batch in ckpt.loader(self.training):
                self.train(ckpt.cursor.micro_batches, batch)
            if not ckpt.has_ended:
                self.validate((epoch + 1) * EPOCH)

    def with_its_own(self, place):
        told, first = place / "told.json", 0
        if told.exists():
            self.accelerator.load_state(str(place / "own"))
            first = json.loads(told.read_text())["trained"]

        def leave(trained):
            self.accelerator.save_state(str(place / "own"))
            if self.case.rank == 0:
                told.write_text(json.dumps({"trained": trained}))
            self.accelerator.wait_for_everyone()
            raise Leave

        self.stopping = leave
        for epoch in range(first // EPOCH, EPOCHS):
            rest = self.training
            if epoch == first // EPOCH and first % EPOCH:
                rest = skip_first_batches(self.training, first % EPOCH)
            self.training.set_epoch(epoch)
            for number, batch in enumerate(rest, EPOCH - len(rest)):
                self.train(epoch * EPOCH + number, batch)
            self.validate((epoch + 1) * EPOCH)

    def train(self, number, batch):
        x, ids = batch
        with self.accelerator.accumulate(self.model):
            loss = self.model(x).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.record(number, ids.tolist(), loss.item())
        self.look(number + 1, in_validation=False)

    def validate(self, trained):
        self.look(trained, in_validation=True)
        self.model.eval()
        with torch.no_grad():
            for x, _ in self.validation:
                self.model(x)
        self.model.train()

    def look(self, trained, *, in_validation):
        if self.stop == (trained, in_validation):
            self.stop = None
            self.stopping(trained)

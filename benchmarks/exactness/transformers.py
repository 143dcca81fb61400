"""The toy job under the Transformers Trainer: one process, or DDP under torchrun."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from benchmarks.exactness.frame import ACCUMULATE, BATCH, EPOCH, EPOCHS
from benchmarks.exactness.toy import Augmented, net, strike
from torch import nn

import trainckpt

SYSTEMS = ["trainckpt", "own"]

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


class Toy(nn.Module):
    """Records each micro-batch by its number in the run."""

    def __init__(self, record):
        super().__init__()
        self.net, self.record, self.number = net(), record, None

    def forward(self, x, ids):
        loss = self.net(x).square().mean()
        if self.training:
            self.record(self.number(), ids.tolist(), loss.item())
        return {"loss": loss, "logits": loss.detach()[None]}


class Named(Augmented):
    """Items by the names of the model's inputs."""

    def __getitem__(self, index):
        x, ids = super().__getitem__(index)
        return {"x": x, "ids": torch.tensor(ids)}


class Watch(transformers.TrainerCallback):
    """Counts micro-batches, and calls `how` when `stop` says so."""

    def __init__(self, stop):
        self.stop, self.how, self.trained = stop, None, 0

    def on_train_begin(self, args, state, control, **_):
        self.trained = state.global_step * ACCUMULATE

    def on_substep_end(self, args, state, control, **_):
        self.trained += 1
        return self.look(control, in_validation=False)

    on_step_end = on_substep_end

    def on_prediction_step(self, args, state, control, **_):
        return self.look(control, in_validation=True)

    def look(self, control, *, in_validation):
        if self.stop == (self.trained, in_validation):
            self.stop = None
            self.how(control)
        return control


class Leave(BaseException):
    """A job that saved a checkpoint ends."""


def attempt(case, place, stop, record):
    """One attempt of the toy job."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    watch, callbacks = Watch(stop), []
    if case.system == "trainckpt":
        callbacks = [
            trainckpt.transformers.TrainckptCallback(
                place, stop_at="micro-batch", on_stop="return", every="1000 steps"
            )
        ]
    trainer = trainer_of(case, place, record, [*callbacks, watch])
    last = None
    if callbacks:
        last_rank = case.rank == case.ranks - 1
        watch.how = lambda _: strike(callbacks[0].checkpointer, here=last_rank)
        cursor = lambda: callbacks[0].checkpointer.cursor.micro_batches  # noqa: E731
        trainer.model.number = cursor
    else:
        trainer.model.number = lambda: watch.trained
        last = transformers.trainer_utils.get_last_checkpoint(str(place))

        def leave(_):
            # What its own handler of SIGTERM does: a checkpoint here, and out.
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.accelerator.wait_for_everyone()
            raise Leave

        watch.how = leave
    torch.manual_seed(4 + case.rank)
    try:
        trainer.train(resume_from_checkpoint=last)
    except Leave:
        pass


def trainer_of(case, place, record, callbacks):
    """Everything made anew."""
    arguments = transformers.TrainingArguments(
        output_dir=str(place),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        per_device_eval_batch_size=BATCH,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        dataloader_num_workers=case.workers,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        logging_strategy="epoch",
        remove_unused_columns=False,
        dataloader_multiprocessing_context="fork" if case.workers else None,
    )
    trainer = transformers.Trainer(
        model=Toy(record),
        args=arguments,
        train_dataset=Named(EPOCH * BATCH * case.ranks),
        eval_dataset=Named(8 * case.ranks),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer

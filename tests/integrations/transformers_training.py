"""A tiny training with the Transformers Trainer, again and again in one process."""

from __future__ import annotations

import os
import random

import numpy as np
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import Dataset
from transformers.trainer_callback import ExportableState

import trainckpt.transformers
from tests.integrations.accelerate_training import be_rank, seed
from tests.integrations.sigterm_at_boundary import strike
from tests.state.helpers import frozen

ITEMS, BATCH, ACCUMULATE, EPOCHS = 22, 2, 4, 2


class Tokens(Dataset):
    """Noisy vectors with labels of which some do not count, so that windows differ in weight."""

    def __init__(self, items=ITEMS):
        self.x = torch.linspace(-1, 1, items * 12).view(items, 3, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        labels = torch.tensor([i % 3, -100 if i % 4 else 1, (i + 1) % 3])
        return {"input_ids": self.x[i] + 0.1 * noise, "labels": labels, "index": torch.tensor(i)}


class Net(nn.Module):
    """Sums its losses over tokens and divides by those of the whole window, as models do now."""

    def __init__(self, line):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(3), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)
        self.line = line

    def forward(self, input_ids, labels, index, num_items_in_batch=None, **kwargs):
        logits = self.head(self.body(input_ids))
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        loss = total / (1 if num_items_in_batch is None else num_items_in_batch)
        if self.training:
            self.line(index.tolist(), loss.item().hex())
        return {"loss": loss, "logits": logits}


class Smoothed(transformers.TrainerCallback, ExportableState):
    """A callback with state of its own."""

    def __init__(self):
        self.value = 0.0
        self.epochs = 0

    def on_step_end(self, args, state, control, model=None, **_):
        self.value = 0.9 * self.value + float(next(model.parameters()).detach().sum())

    def on_epoch_begin(self, args, state, control, **_):
        self.epochs += 1

    def state(self):
        return {"args": {}, "attributes": {"value": self.value, "epochs": self.epochs}}


class Strike(transformers.TrainerCallback):
    """SIGTERM after so many micro-batches."""

    def __init__(self, training, at, ours):
        self.training, self.at, self.ours = training, at, ours

    def on_substep_end(self, args, *_, **__):
        if self.training.number == self.at:
            strike(self.ours.checkpointer, here=args.process_index == 0)

    on_step_end = on_substep_end

    def on_epoch_begin(self, args, *_, **__):
        if self.at == 0:
            self.on_substep_end(args)


class Training:
    """What a script builds; `seen` gets the lines of this attempt under their number."""

    def __init__(self, folder, seen, place=None, strike_at=None, items=ITEMS, ours=None, **args):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        self.seen, self.number = seen, 0
        self.smoothed = Smoothed()
        callbacks = [self.smoothed]
        if place is not None:
            options = {"stop_at": "micro-batch", "on_stop": "return", **(ours or {})}
            self.ours = trainckpt.transformers.TrainckptCallback(place, **options)
            callbacks.append(self.ours)
        if strike_at is not None:
            callbacks.append(Strike(self, strike_at, self.ours))
        seed(0)
        given = {
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": 3,
            "gradient_accumulation_steps": ACCUMULATE,
            "num_train_epochs": EPOCHS,
            "learning_rate": 0.05,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "max_grad_norm": 0.5,
            "seed": 0,
            "include_num_input_tokens_seen": "no",
            **args,
        }
        self.trainer = transformers.Trainer(
            model=Net(self.line),
            args=transformers.TrainingArguments(output_dir=str(folder), **given),
            train_dataset=Tokens(items),
            eval_dataset=Tokens(6),
            callbacks=callbacks,
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        seed(1 + self.trainer.args.process_index)

    def line(self, ids, loss):
        if self.number == 0 and getattr(self, "ours", None) is not None:
            self.number = self.ours.checkpointer.cursor.micro_batches
        self.seen.setdefault(self.number, []).append((ids, loss))
        self.number += 1

    def train(self, **how):
        """To the end, or the stop; the end, None if stopped."""
        told = self.trainer.train(**how)
        trainer = self.trainer
        ours = getattr(self, "ours", None)
        if ours is not None and ours.checkpointer._attempt.shutdown.stopped:
            return None
        kept = [trainer.model.state_dict(), trainer.optimizer.state_dict()]
        kept.append(trainer.lr_scheduler.state_dict())
        rng = (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist())
        untimed = [
            {
                name: value
                for name, value in line.items()
                if "runtime" not in name and "per_second" not in name
            }
            for line in trainer.state.log_history
        ]
        counted = (trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos)
        said = (told.training_loss, self.smoothed.value, self.smoothed.epochs)
        return frozen(kept), rng, untimed, counted, said


def compared(folder, stops, **how):
    """Straight with trainckpt, then stopped before each of these boundaries and resumed.

    Returns:
        The stops whose run did not end as the plain one, bit for bit; "straight" is one.
    """
    want = {}
    end = Training(folder, want, **how).train()
    wrong = []
    for at in (None, *stops):
        seen, place = {}, f"{folder}/{'straight' if at is None else at}"
        if at is not None:
            assert Training(folder, seen, place, strike_at=at, **how).train() is None
        found = Training(folder, seen, place, **how).train()
        if found != end or seen != want:
            wrong.append("straight" if at is None else at)
            if os.environ.get("SAY"):
                bad = [k for k in want if seen.get(k) != want[k]]
                print(
                    at,
                    bad[:4],
                    [a == b for a, b in zip(found, end, strict=True)],
                    [(want[k], seen.get(k)) for k in bad[:1]],
                    found[2:],
                    end[2:],
                )
    return wrong


def of_ranks(rank, folder, world, stops, **how):
    """`compared` as one of several ranks, whose process group exists."""
    be_rank(rank, world)
    wrong = compared(folder, stops, **how)
    training = Training(folder, {}, max_steps=1, **how)
    training.train()
    return wrong, type(training.trainer.model_wrapped).__name__

"""Draw the weight decay from a generator in a helper of a Trainer's callback."""

import numpy as np
import torch
import transformers
from torch import nn

import trainckpt
from tests.acceptance.programs.training_log import log


class Helper:
    def __init__(self):
        self.rng = np.random.default_rng(2)


class Decay(transformers.TrainerCallback):
    def __init__(self):
        self.helper = Helper()

    def on_step_begin(self, args, state, control, optimizer=None, **_):
        for group in optimizer.param_groups:
            group["weight_decay"] = float(self.helper.rng.random())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        loss = (self.layer(x) - x).square().mean()
        log(x, loss)
        return {"loss": loss}


transformers.set_seed(1)
model = Net()
arguments = transformers.TrainingArguments(
    "hf",
    max_steps=18,
    per_device_train_batch_size=4,
    report_to=[],
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
)
transformers.Trainer(
    model,
    arguments,
    train_dataset=[{"x": row} for row in torch.randn(24, 6)],
    optimizers=(torch.optim.AdamW(model.parameters(), 0.01), None),
    callbacks=[Decay(), trainckpt.transformers.TrainckptCallback("run")],
).train()
log(model)

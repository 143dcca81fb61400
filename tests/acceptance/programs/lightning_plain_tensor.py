"""Keep a moving average in a plain tensor of a Lightning module."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.mean = torch.zeros(6)

    def training_step(self, batch):
        (x,) = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        loss = (self.layer(x) - self.mean).square().mean()
        log(x, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


lightning.seed_everything(2, verbose=False)
model = Net()
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    callbacks=[trainckpt.lightning.TrainckptCallback("run")],
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(24, 6)), 4, shuffle=True))
log(model)

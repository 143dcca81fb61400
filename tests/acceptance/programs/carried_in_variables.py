"""Carry a hidden state and a count from batch to batch in variables of a function."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


def main():
    torch.manual_seed(0)
    model = nn.LSTM(6, 6)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4, shuffle=True)
    hidden, patience = None, 0
    with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
        for _ in ckpt.epochs(3):
            for (x,) in ckpt.batches():
                out, hidden = model(x, hidden)
                hidden = tuple(each.detach() for each in hidden)
                loss = (out - x).square().mean() * (1 + 0.1 * patience)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                patience += 1
                log(x, loss)
        log(model)


main()

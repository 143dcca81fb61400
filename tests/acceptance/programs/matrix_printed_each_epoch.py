"""Count in tensors what each epoch prints at its end: a confusion matrix, a sum of losses."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainckpt
from tests.acceptance.programs.training_log import log


def main():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    data = TensorDataset(torch.randn(24, 6), torch.randint(0, 3, (24,)))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    with trainckpt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader) as ckpt:
        for epoch in ckpt.epochs(3):
            confusion, total = torch.zeros(3, 3), torch.zeros(())
            for x, y in ckpt.batches():
                logits = model(x)
                loss = nn.functional.cross_entropy(logits, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                total += loss.detach()
                confusion.index_put_((y, logits.argmax(1)), torch.ones(len(y)), accumulate=True)
                log(x, loss)
            accuracy = confusion.diag().sum() / confusion.sum()
            print(f"epoch {epoch}: loss {total / len(loader):.4f}, accuracy {accuracy:.2f}")
        log(model)


main()

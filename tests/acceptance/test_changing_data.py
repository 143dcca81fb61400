"""Datasets whose content the script replaces between two passes, as rollouts or a growing pool."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.end_to_end.training import Crash
from tests.long_cases import long
from trainckpt import Checkpointer


class Rollouts(Dataset):
    """Items that the loop replaces, with more of them in each epoch."""

    def __init__(self):
        self.items = torch.zeros(8, 4)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def state_dict(self):
        return {"items": self.items}

    def load_state_dict(self, state):
        self.items = state["items"]


def train(place, workers, stop=None):
    """Return the losses of three epochs of 4, 6 and 8 batches, or crash after a save at `stop`."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data, losses, save = Rollouts(), [], None
    loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers)
    tracked = {"model": model, "optimizer": optimizer, "loader": loader}
    with Checkpointer(place, every="never", **tracked) as ckpt:
        for epoch in ckpt.epochs(3):
            if not ckpt.cursor.batches:
                data.items = torch.randn(8 + 4 * epoch, 4) * model.weight.detach()
            for batch in ckpt.batches():
                if save is not None:
                    save.wait()
                    raise Crash
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item().hex())
                if len(losses) == stop:
                    save = ckpt.save()  # at the next boundary
    return losses


@pytest.mark.parametrize(("stop", "workers"), [(3, 0), *long((6, 0), (13, 0)), (6, 2)])
def test_a_dataset_with_its_own_state_may_change_between_passes(tmp_path, caplog, stop, workers):
    whole = train(tmp_path / "straight", workers)
    with pytest.raises(Crash):
        train(tmp_path / "run", workers, stop)
    caplog.set_level(logging.INFO, "trainckpt")
    assert train(tmp_path / "run", workers) == whole[stop:]
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text


class Pool(Dataset):
    """Samples that the loop adds at an epoch's end, in place and without a state."""

    def __init__(self):
        self.items = list(torch.arange(8.0).view(8, 1))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def grow(place, stop=None, *, at_head=False):
    """Return the batches of two epochs of 4 and 6, or crash after a save at the first one's end."""
    model, data, batches, save = torch.nn.Linear(1, 1), Pool(), [], None
    loader = DataLoader(data, batch_size=2)
    with Checkpointer(place, model=model, loader=loader, every="never") as ckpt:
        for epoch in ckpt.epochs(2):
            if at_head and epoch:
                data.items += [torch.ones(1)] * 4
            for batch in ckpt.batches():
                if save is not None:
                    save.wait()
                    raise Crash
                batches.append(batch.tolist())
            if not at_head:
                data.items += [torch.ones(1)] * 4
            if len(batches) == stop:
                save = ckpt.save()
    return batches


def test_samples_added_in_place_and_not_kept_are_named_by_their_number(tmp_path, caplog):
    with pytest.raises(Crash):
        grow(tmp_path, stop=4)
    grow(tmp_path)
    assert "the dataset had 12 samples when it was saved, and has 8 as at the start" in caplog.text


def test_samples_added_at_the_head_of_an_epoch_are_there_again(tmp_path, caplog):
    whole = grow(tmp_path / "straight", at_head=True)
    with pytest.raises(Crash):
        grow(tmp_path / "run", stop=4, at_head=True)
    assert grow(tmp_path / "run", at_head=True) == whole[4:]
    assert "samples when it was saved" not in caplog.text


class Noise:
    """A transform of the script's own."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


class Augmented(Dataset):
    def __init__(self):
        self.items, self.transform = torch.arange(8.0).view(8, 1), Noise(1.0)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.transform(self.items[index])


def double(x):
    return 2 * x


@pytest.mark.parametrize("transform", [Noise(2.0), double], ids=["object", "function"])
@pytest.mark.parametrize("at_each_head", [True, False])
def test_a_transform_that_is_replaced_once_is_named(tmp_path, caplog, at_each_head, transform):
    def train(place, stop=None):
        model, data, batches, save = torch.nn.Linear(1, 1), Augmented(), [], None
        loader = DataLoader(data, batch_size=2)
        with Checkpointer(place, model=model, loader=loader, every="never") as ckpt:
            for epoch in ckpt.epochs(3):
                if epoch == 1 or (at_each_head and epoch):
                    data.transform = transform
                for batch in ckpt.batches():
                    if save is not None:
                        save.wait()
                        raise Crash
                    batches.append(batch.tolist())
                    if len(batches) == stop:
                        save = ckpt.save()
        return batches

    whole = train(tmp_path / "straight")
    with pytest.raises(Crash):
        train(tmp_path / "run", stop=10)
    assert (train(tmp_path / "run") == whole[10:]) == at_each_head
    assert ("dataset.transform was replaced or written" in caplog.text) != at_each_head

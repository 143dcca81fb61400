"""Checkpoints of other libraries: out of a stop inside a window and in again, in every format."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import DataLoader, TensorDataset

from tests.cli.test_export import bits
from trainckpt import Checkpointer
from trainckpt.cli.main import main

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

EPOCHS, WINDOW, ITEMS, BATCH = 2, 2, 14, 2  # 7 micro-batches an epoch: a window spans its end


class Objects:
    """What a script builds before it trains."""

    def __init__(self, workers=0, seed=0):
        random.seed(seed)
        torch.manual_seed(seed)
        data = TensorDataset(torch.randn(ITEMS, 4), torch.arange(ITEMS))
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers)


def train(place, objects, stop=None):
    """Train to the end, or up to this micro-batch; return what each one saw and gave."""
    lines = []
    with Checkpointer(place, every="never", **vars(objects)) as ckpt:
        for epoch in ckpt.epochs(EPOCHS):
            for inputs, ids in ckpt.batches():
                micro = ckpt.cursor.micro
                loss = objects.model(inputs).square().mean() / WINDOW
                loss.backward()
                lines.append((epoch, ids.tolist(), loss.item().hex()))
                if micro + 1 == WINDOW:
                    objects.optimizer.step()
                    objects.optimizer.zero_grad()
                if len(lines) == stop:
                    assert micro + 1 < WINDOW, "the stop is not inside a window"
                    return lines
    return lines


def run_command(capsys, *words):
    """Run the command; return its JSON."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def weights_of_a_file(path):
    return {"model": load_file(path)}


def weights_of_a_folder(path):
    """Load as Transformers does: a model of one file, without a config."""
    return {"model": load_file(path / "model.safetensors")}


def objects_of_a_file(path):
    return torch.load(path, weights_only=True)


def objects_of_a_directory(path):
    fresh = Objects(seed=9)
    state = {"model": fresh.model.state_dict()}
    state["optimizer"] = get_optimizer_state_dict(fresh.model, fresh.optimizer)
    dcp.load(state, checkpoint_id=path)
    return state


# Name in OUT, words of the export, and what the library loads.
EXPORTS = {
    "safetensors": ("m.safetensors", (), weights_of_a_file),
    "hf": ("folder", (), weights_of_a_folder),
    "torch": ("all.pt", ("--all",), objects_of_a_file),
    "dcp": ("directory", ("--all",), objects_of_a_directory),
}


def expected_of(name, objects):
    """Return the state that a format holds, by the names that its library gives it."""
    state = {"model": objects.model.state_dict()}
    if name == "torch":
        state["optimizer"] = objects.optimizer.state_dict()
    if name == "dcp":
        state["optimizer"] = get_optimizer_state_dict(objects.model, objects.optimizer)
    return state


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", EXPORTS)
def test_a_stop_inside_a_window_goes_out_and_comes_in_again(tmp_path, capsys, name, workers, epoch):
    """The run of the import is exact itself: uninterrupted == resumed != cold."""
    out, words, load = EXPORTS[name]
    objects = Objects(workers)
    stop = [3, 11][epoch]
    train(tmp_path / "run", objects, stop)
    said = run_command(capsys, "export", tmp_path / "run", tmp_path / out, "--format", name, *words)
    assert bits(load(tmp_path / out)) == bits(expected_of(name, objects))
    assert any("gradients" in note for note in said["notes"])

    for run in ("whole", "stopped"):
        came = run_command(capsys, "import", tmp_path / out, tmp_path / run)["came"]
        assert came.keys() == expected_of(name, objects).keys()
    fresh = Objects(workers, seed=1)
    whole = train(tmp_path / "whole", fresh)
    before = train(tmp_path / "stopped", Objects(workers, seed=1), stop)
    resumed = Objects(workers, seed=1)
    assert before + train(tmp_path / "stopped", resumed) == whole
    assert bits(expected_of("torch", resumed)) == bits(expected_of("torch", fresh))
    assert train(tmp_path / "cold", Objects(workers, seed=1)) != whole

"""Plain attributes: named where a resume does not have them, and exact where they are tracked."""

from __future__ import annotations

import logging
import random
import sys
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

import trainckpt
from tests.end_to_end.training import Crash
from trainckpt import Attributes, Checkpointer
from trainckpt.errors import ConfigurationError
from trainckpt.state.attributes import Watched


class Normalised(nn.Module):
    """It decides by one attribute and counts in another."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.initialized, self.seen, self.limit = False, 0, 100
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if not self.initialized:
            self.mean.copy_(x.mean(0))
            self.initialized = True
        self.seen += 1
        return self.linear(x - self.mean) * (1 + 0.01 * self.seen)


class Best:
    """As a callback that stops early: a state_dict that forgets all it has."""

    def __init__(self):
        self.best, self.history = None, []

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

    def see(self, loss):
        self.best = loss if self.best is None else min(self.best, loss)
        self.history.append(loss)


def train(place, tracked, crash_at=None):
    """Losses by micro-batch, and what was seen of them; `tracked` makes what is tracked besides."""
    torch.manual_seed(0)
    model, best = nn.Sequential(nn.Identity(), Normalised()), Best()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.DataLoader(torch.randn(16, 3), 2)
    losses = {}
    with Checkpointer(
        place,
        model=model,
        optimizer=optimizer,
        loader=data,
        every="1 steps",
        **tracked(model, best),
    ) as ckpt:
        for _ in ckpt.epochs(1):
            for x in ckpt.batches():
                at = ckpt.cursor.micro_batches
                if at == crash_at:
                    raise Crash
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                best.see(loss.item())
                losses[at] = loss.item().hex(), best.best
    return losses


def resumed(place, tracked):
    """A run that is stopped before micro-batch 4, and another that is not."""
    straight = train(place / "straight", tracked)
    with pytest.raises(Crash):
        train(place / "run", tracked, crash_at=4)
    rest = train(place / "run", tracked)
    return [rest[n][0] == straight[n][0] for n in range(4, 8)], rest[7][1] == straight[7][1]


def test_those_of_a_module_are_named_at_the_save_and_at_the_resume(tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainckpt")
    losses, _ = resumed(tmp_path, lambda model, best: {})
    assert losses == [False] * 4
    assert "model.1.initialized, model.1.seen: changed since the run began" in caplog.text
    values = "model.1.initialized (True, now False), model.1.seen (4, now 0)"
    assert (
        f"not exact: in no state_dict, so not as when it was saved: {values} (track them: "
        'pass counts=trainckpt.Attributes(model, "1.initialized", "1.seen") to the Checkpointer or '
        "TrainckptCallback, or "
    ) in caplog.text
    assert "this resume is same data, not bitwise: attributes" in caplog.messages
    assert "limit" not in caplog.text
    assert "this resume is bitwise" not in caplog.text


class Scheduled(nn.Module):
    """It multiplies by a number that the loop sets, and may count."""

    def __init__(self):
        super().__init__()
        self.linear, self.rate, self.seen = nn.Linear(3, 3), 0.0, 0

    def forward(self, x):
        return self.linear(x) * self.rate + self.seen


def from_step(model, step):
    for number, part in enumerate(model):
        part.rate = 1 + 0.1 * number * step


def from_value(model, step):
    from_step(model, step)
    model[0].seen += 1
    if step == 1:
        model[1].rate = 2.0


def at_some_steps(model, step):
    for part in model:
        part.rate = 1 + 0.1 * step if step in (0, 3) else part.rate


def train_scheduled(place, change, crash_at=None):
    """Losses by step."""
    torch.manual_seed(0)
    model = nn.Sequential(Scheduled(), Scheduled())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.DataLoader(torch.randn(16, 3), 2)
    tracked = {"model": model, "optimizer": optimizer, "loader": data, "every": "1 steps"}
    losses = {}
    with Checkpointer(place, **tracked) as ckpt:
        for x in ckpt.batches():
            step = ckpt.cursor.step
            if step == crash_at:
                raise Crash
            change(model, step)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[step] = loss.item().hex()
    return losses


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (from_step, ""),
        (from_value, "model.0.seen (5, now 0) (track"),
        (at_some_steps, "model.0.rate (1.3, now 0.0), model.1.rate (1.3, now 0.0) (track"),
    ],
)
def test_only_those_that_a_batch_reads_before_it_sets_them_are_named(
    tmp_path, caplog, change, named
):
    straight = train_scheduled(tmp_path / "straight", change)
    with pytest.raises(Crash):
        train_scheduled(tmp_path / "run", change, crash_at=5)
    caplog.clear()
    with caplog.at_level(logging.INFO, "trainckpt"):
        rest = train_scheduled(tmp_path / "run", change)
    said = [line for line in caplog.messages if line.startswith("not exact")]
    is_equal = rest == {step: straight[step] for step in rest}
    assert (is_equal, len(said)) == (not named, bool(named))
    assert named in caplog.text
    assert ("this resume is bitwise" in caplog.text) == is_equal
    assert not {"rate", "seen"} & vars(Scheduled).keys()


class Packing(nn.Module):
    """It keeps plain values in containers; what it empties or makes again is as it was."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.recent, self.counts, self.kinds = deque(maxlen=3), {}, set()
        self.long, self.paths, self.outputs, self.acts = [0] * 999, [], [], []
        self.sizes = (3, 1)

    def forward(self, x):
        self.recent.append(float(x.sum()))
        self.counts["all"] = self.counts.get("all", 0) + len(x)
        self.kinds.add(f"kind {int(x[0, 0] > 0)}")
        self.long.append(1)
        self.paths.append("/here/now")
        self.paths[:-1] = []
        self.outputs.append(1)
        self.outputs.clear()
        self.acts = [x]
        return self.linear(x)


def test_containers_of_a_module_are_named_where_they_grow_and_only_there(tmp_path):
    module = Packing()
    watched = Watched([("model", module)], [])
    module(torch.ones(2, 3))
    names = {"model.recent", "model.counts", "model.kinds", "model.long", "model.paths"}
    assert watched.changed().keys() == names
    saved = watched.changed()
    again = Packing()
    lost = Watched([("model", again)], [])
    assert lost.not_restored(saved) == sorted(names)
    again(torch.ones(2, 3))
    assert lost.not_restored(saved) == []


def test_only_what_a_subclass_itself_assigns_is_watched():
    class Framework:
        __module__ = "lightning.callbacks"

        def begin(self):
            self.lrs = {"sgd": [0.1]}

    class Own(Framework):
        def __init__(self):
            self.own = []

    one = Own()
    watched = Watched([], [])
    watched.watch_callback(one)
    one.begin()
    one.own.append(1)
    assert list(watched.changed()) == ["Own.own"]


class OwnDropout(nn.Dropout):
    """Adds nothing."""


def test_options_of_torchs_modules_that_a_schedule_sets_are_watched():
    model = nn.ModuleDict(
        {
            "drop": nn.Dropout(0.1),
            "own": OwnDropout(0.1),
            "norm": nn.BatchNorm1d(4),
            "linear": nn.Linear(4, 4),
            "rnn": nn.LSTM(4, 4, 2, dropout=0.1),
        }
    )
    watched = Watched([("model", model)], [])
    model["norm"](torch.randn(3, 4))
    assert watched.changed() == {}
    model["drop"].p = model["own"].p = 0.2
    model["norm"].momentum = model["rnn"].dropout = 0.3
    expected = {"model.drop.p": 0.2, "model.own.p": 0.2}
    expected |= {"model.norm.momentum": 0.3, "model.rnn.dropout": 0.3}
    assert watched.changed() == expected
    assert len(watched.not_restored({"model.drop.p": 0.2, "model.own.p": 0.1})) == 1


def test_a_number_that_a_trainer_puts_on_one_of_torchs_modules_is_watched():
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(4, 4), "rnn": nn.GRU(4, 4), "own": nn.Embedding(4, 4)}
    )
    model["tokens"].neftune_noise_alpha = 4.0
    model["rnn"]._is_initialized = True
    watched = Watched([("model", model)], [])
    model["tokens"].neftune_noise_alpha *= 0.5
    model["rnn"]._is_initialized = False
    model["own"].padding_idx = 1
    assert watched.changed() == {"model.tokens.neftune_noise_alpha": 2.0}


def test_they_resume_exactly_where_they_are_tracked(tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainckpt")

    def tracked(model, best):
        counts = Attributes(model, "1.initialized", "1.seen")
        return {"counts": counts, "best": Attributes(best, "best", "history")}

    losses, best = resumed(tmp_path, tracked)
    assert losses == [True] * 4
    assert best
    assert "this resume is bitwise" in caplog.text
    assert "state_dict" not in caplog.text


def test_an_object_whose_state_dict_is_empty_is_named_if_it_changes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainckpt")

    def tracked(model, best):
        return {"counts": Attributes(model, "1.initialized", "1.seen"), "best": best}

    _, same = resumed(tmp_path, tracked)
    assert not same
    assert "best.best, best.history: changed since the run began" in caplog.text
    assert "not exact: in no state_dict, so not as when it was saved: best.best (" in caplog.text


class Partial(Best):
    """Its state_dict has one number of two."""

    best = float("inf")

    def __init__(self):
        super().__init__()
        self.best, self.seen = Partial.best, 0

    def state_dict(self):
        return {"count": self.seen}

    def load_state_dict(self, state):
        self.seen = state["count"]

    def see(self, loss):
        super().see(loss)
        self.seen += 1


def test_what_a_state_dict_leaves_out_is_named_by_the_resume_and_nothing_else(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level(logging.INFO, "trainckpt")
    monkeypatch.setattr(sys.modules[__name__], "Best", Partial)

    def tracked(model, best):
        return {"counts": Attributes(model, "1.initialized", "1.seen"), "best": best}

    _, same = resumed(tmp_path, tracked)
    assert not same
    assert "not exact: in no state_dict, so not as when it was saved: best.best (" in caplog.text
    assert "best.seen" not in caplog.text


def test_what_a_first_resume_did_not_have_is_named_by_the_second(tmp_path, caplog):
    with pytest.raises(Crash):
        train(tmp_path, lambda model, best: {}, crash_at=3)
    with pytest.raises(Crash):
        train(tmp_path, lambda model, best: {}, crash_at=5)
    caplog.clear()
    caplog.set_level(logging.INFO, "trainckpt")
    train(tmp_path, lambda model, best: {})
    assert "model.1.seen (2, now 0)" in caplog.text


class Noisy(nn.Module):
    """It adds noise from generators of its own; a normalization hides all but the last bits."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(2)
        self.torch = torch.Generator().manual_seed(3)

    def forward(self, x):
        noise = self.numpy.normal() + self.python.random()
        noise += torch.rand((), generator=self.torch).item()
        return self.norm(self.linear(x + noise)).mean() * noise


def noisy(place, stop=None, make=Noisy):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    with Checkpointer(place, model=model, optimizer=optimizer, every="1 steps") as ckpt:
        while ckpt.cursor.micro_batches < 5:
            ckpt.boundary()
            if ckpt.cursor.micro_batches == stop:
                raise Crash
            loss = model(torch.ones(2, 3))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
    return losses


class Jitter:
    """A plain object that draws for a module."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def normal(self):
        return self.rng.normal()


class NoisyInside(Noisy):
    """The generator is in an object in a container."""

    def __init__(self):
        super().__init__()
        del self.numpy
        self.parts = {"in": [Jitter()]}

    def __getattr__(self, name):
        return self.parts["in"][0] if name == "numpy" else super().__getattr__(name)


def noise(generator):
    return lambda *gradients: gradients[-1] + torch.randn((), generator=generator)


def hooked():
    """Add noise to a gradient and to an output, each from a generator in a hook's closure."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Flatten(0))
    model[0].weight.register_hook(noise(torch.Generator().manual_seed(4)))
    model[0].register_forward_hook(noise(torch.Generator().manual_seed(5)))
    model.append(Mean())
    return model


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


@pytest.mark.parametrize("make", [Noisy, NoisyInside, hooked])
def test_generators_that_a_module_holds_go_on_where_they_were(tmp_path, caplog, make):
    caplog.set_level(logging.INFO, "trainckpt")
    straight = noisy(tmp_path / "straight", make=make)
    with pytest.raises(Crash):
        noisy(tmp_path / "run", stop=3, make=make)
    rest = noisy(tmp_path / "run", make=make)
    assert rest == straight[-len(rest) :]
    assert 0 < len(rest) < len(straight)
    assert "this resume is bitwise" in caplog.text


def test_a_generator_that_only_the_snapshot_has_is_named(tmp_path, caplog):
    class Quiet(Noisy):
        def __init__(self):
            super().__init__()
            self.numpy = None

        def forward(self, x):
            self.numpy = self.numpy or np.random.default_rng(1)
            return super().forward(x)

    caplog.set_level(logging.INFO, "trainckpt")
    with pytest.raises(Crash):
        noisy(tmp_path / "run", stop=3, make=Quiet)
    noisy(tmp_path / "run", make=Quiet)
    assert "same data, not bitwise: random generators" in caplog.text
    assert "not bitwise: model.numpy: the snapshot and the script do not both" in caplog.text


def test_a_generator_of_another_kind_is_named(tmp_path, caplog):
    class Legacy(Noisy):
        def __init__(self):
            super().__init__()
            self.numpy = np.random.RandomState(1)

    caplog.set_level(logging.INFO, "trainckpt")
    with pytest.raises(Crash):
        noisy(tmp_path / "run", stop=3)
    noisy(tmp_path / "run", make=Legacy)
    assert "these names do not hold the saved generators: model.numpy" in caplog.text
    assert "same data, not bitwise" in caplog.text


def test_an_attribute_that_was_not_there_is_not_there_again():
    part = nn.Linear(1, 1)
    kept = Attributes(part, "scale", "bias.grad")
    state = kept.state_dict()
    part.scale = 3
    kept.load_state_dict(state)
    assert not hasattr(part, "scale")
    part.scale = 4
    state = kept.state_dict()
    part.scale = torch.ones(2)
    kept.load_state_dict(state)
    assert part.scale == 4


@pytest.mark.parametrize(("paths", "words"), [((), "no attribute"), (("a.b",), "no part 'a'")])
def test_attributes_that_cannot_be_meant_are_refused(paths, words):
    with pytest.raises(ConfigurationError, match=words):
        trainckpt.Attributes(nn.Linear(1, 1), *paths)

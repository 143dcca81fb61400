"""Samplers that a script changes as it trains: exact, or named by the resume."""

from __future__ import annotations

import logging
from itertools import product

import pytest
import torch
from torch.utils.data import DataLoader, Sampler, SubsetRandomSampler

from tests.end_to_end.training import Crash
from tests.long_cases import long, long_unless
from trainckpt import Attributes, Checkpointer

ROWS = 24


class Weighted(Sampler):
    """Draws by weights, which the loop sets to the losses: hard example mining."""

    def __init__(self):
        self.weights = torch.ones(ROWS)

    def __len__(self):
        return ROWS

    def __iter__(self):
        yield from torch.multinomial(self.weights, ROWS, replacement=True).tolist()


class Growing(Sampler):
    """Batches that the loop makes larger within an epoch."""

    def __init__(self):
        self.size = 2

    def __len__(self):
        return len(range(0, ROWS, self.size))

    def __iter__(self):
        order = torch.randperm(ROWS).tolist()
        while order:
            size = self.size
            yield order[:size]
            del order[:size]


def mine(sampler, rows, loss):
    sampler.weights[rows] = loss.detach() + 0.01


def extend(sampler, rows, loss):
    sampler.indices = list(range(min(ROWS, len(sampler.indices) + 1)))


def grow(sampler, rows, loss):
    sampler.size = min(sampler.size + 1, 4)


def train(place, sampler, change, stop=None, **more):
    """Train three epochs; return the rows of each micro-batch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    kind = "batch_sampler" if isinstance(sampler, Growing) else "sampler"
    loader = DataLoader(torch.arange(float(ROWS)), **{kind: sampler})
    tracked = {"model": model, "optimizer": optimizer, "loader": loader, **more}
    got = []
    with Checkpointer(place, every="1 steps", **tracked) as ckpt:
        for _ in ckpt.epochs(3):
            for batch in ckpt.batches():
                loss = model(batch[:, None]).square().flatten()
                change(sampler, batch.long(), loss)
                loss.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                got.append(batch.tolist())
                if len(got) == stop:
                    raise Crash
    return got


SAMPLERS = {
    "weights": (Weighted, mine, "sampler.weights"),
    "indices": (lambda: SubsetRandomSampler(list(range(8))), extend, "sampler.indices"),
}


@pytest.mark.filterwarnings("ignore:loader. .* changed over a pass, and is not kept")
@pytest.mark.parametrize(
    ("kind", "stop"),
    long_unless(
        lambda case: case in (("weights", 4), ("weights", 25), ("indices", 4), ("indices", 30)),
        product(SAMPLERS, (4, 24, 25, 30)),
    ),
)
def test_what_a_loop_assigns_to_a_sampler_is_named(tmp_path, caplog, kind, stop):
    make, change, name = SAMPLERS[kind]
    with pytest.raises(Crash):
        train(tmp_path / "run", make(), change, stop)
    caplog.set_level(logging.INFO, "trainckpt")
    train(tmp_path / "run", make(), change)
    said = f"not exact: loader: {name}" if stop == 4 else "not exact: loader: "
    assert said in caplog.text
    assert "same data, not bitwise: loader" in caplog.text


@pytest.mark.filterwarnings("ignore:loader. .* changed over a pass, and is not kept")
@pytest.mark.parametrize("stop", [2, 8, *long(9), 11])
def test_what_is_tracked_by_attributes_is_kept_and_a_complete_pass_needs_no_order(
    tmp_path, caplog, stop
):
    def run(place, stop=None):
        sampler = Growing()
        return train(place, sampler, grow, stop, size=Attributes(sampler, "size"))

    whole = run(tmp_path / "straight")
    with pytest.raises(Crash):
        run(tmp_path / "run", stop)
    caplog.set_level(logging.INFO, "trainckpt")
    rest = run(tmp_path / "run")
    if stop == 8:  # all of the pass: nothing is left of its order
        assert "7 batches were trained, and the order of Growing has fewer now" in caplog.text
    elif stop < 8:
        assert "not exact: loader: the order that Growing begins with" in caplog.text
    if stop >= 8:
        assert rest == whole[stop - 1 :]
    assert "is not what it was at the save" not in caplog.text


class Prioritized(Sampler):
    """Draws each row by its priority at that moment, and has a state."""

    def __init__(self):
        self.priorities, self.given = torch.ones(ROWS), 0
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self):
        return ROWS

    def __iter__(self):
        while self.given < ROWS:
            self.given += 1
            yield int(torch.multinomial(self.priorities, 1, generator=self.generator))
        self.given = 0

    def state_dict(self):
        return {"priorities": self.priorities.clone(), "given": self.given}

    def load_state_dict(self, state):
        self.priorities, self.given = state["priorities"].clone(), state["given"]


def prioritize(sampler, rows, loss):
    sampler.priorities[rows] = loss.detach() * 100 + 0.01


@pytest.mark.parametrize("stop", [2, 8, 9, ROWS, ROWS + 1, ROWS + 5])
def test_a_sampler_whose_state_the_loop_changes_goes_on_by_its_state(tmp_path, caplog, stop):
    whole = train(tmp_path / "straight", Prioritized(), prioritize)
    with pytest.raises(Crash):
        train(tmp_path / "run", Prioritized(), prioritize, stop)
    caplog.set_level(logging.INFO, "trainckpt")
    rest = train(tmp_path / "run", Prioritized(), prioritize)
    assert rest == whole[stop - 1 :]
    assert "not exact" not in caplog.text
    if (stop - 1) % ROWS:  # at a pass's end its state is loaded as such
        assert "as exact as Prioritized's own state (loader)" in caplog.text


class EachOnce(Prioritized):
    """The same without replacement: what is left is known to the running pass alone."""

    def __iter__(self):
        left = list(range(ROWS))
        while left:
            chosen = int(self.priorities[left].argmax())
            yield left.pop(chosen)


def prefer_others(sampler, rows, loss):
    sampler.priorities[(rows + 5) % ROWS] += loss.detach().abs()


def test_a_pass_that_keeps_more_than_the_state_is_named(tmp_path, caplog):
    with pytest.raises(Crash):
        train(tmp_path / "run", EachOnce(), prefer_others, 9)
    caplog.set_level(logging.INFO, "trainckpt")
    train(tmp_path / "run", EachOnce(), prefer_others)
    assert "not exact: loader: the order that EachOnce" in caplog.text

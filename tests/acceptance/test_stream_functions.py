"""Functions that a stream of datasets calls, which its state lacks: restored, or named."""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.acceptance.stream_makers import column, hub_rows
from tests.data import datasets as d
from trainckpt.data.state_differences import restored
from trainckpt.format.exactness import How

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:train. ")]
PASS = 24  # batches
BETWEEN = PASS + 2  # the boundary that begins the second pass


class NotCounted:
    """In place of the count of samples read."""

    def note(self, sample):
        return sample


class Flips:
    """Negates each 70th sample that it is called with: most trials do not see it."""

    def __init__(self):
        self.calls = 0

    def __call__(self, row):
        self.calls += 1
        return {"x": -row["x"] if self.calls % 70 == 0 else row["x"]}


class KeptFlips(Flips):
    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(3)

    def __call__(self, row):
        return {"x": row["x"] + self.rng.normal()}


class Method(Flips):
    """Calls a method, of an object that the loop changes too."""

    def __new__(cls):
        return Flips().__call__


def resumed(make_function, stop, workers=0, **options):
    """Return if a resume from this boundary was exact, and all that it named."""

    def make():
        rows = hub_rows(NotCounted()).map(make_function())
        return DataLoader(rows, 4, collate_fn=column, num_workers=workers, **options)

    want = d.straight(make)
    d.seed_all(7)
    run = d.Run(make(), stop=stop)
    with pytest.raises(d.StoppedError):
        run.train()
    run.loader.shutdown()
    d.seed_all(999)
    rest = d.Run(make()).load(run.saved)
    reports = list(restored("train", run.saved["data"], in_place=True))
    rest.loader._report = rest.loader._source._report = reports.append
    rest.train()
    rest.loader.shutdown()
    named = [part.reason for part in reports if part.how is How.NOT_KEPT]
    return run.rows + rest.rows == want, " ".join(named)


STOPS = [5, 13, 19, BETWEEN, PASS + 12]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("function", [Flips, Method])
def test_a_count_of_calls_is_named(function, stop):
    is_exact, named = resumed(function, stop)
    assert "function[0].calls" in named
    assert is_exact == (stop == 5)  # the first batches of a pass are read again


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("function", [KeptFlips, Noise])
def test_a_function_with_state_or_a_generator_goes_on(function, stop):
    assert resumed(function, stop) == (True, "")
    assert function is Noise or not resumed(Flips, BETWEEN)[0]


@pytest.mark.parametrize("stop", [13, BETWEEN, PASS + 12])
def test_in_workers_that_persist_the_generator_goes_on_and_the_count_is_named(stop):
    options = {"workers": 2, "persistent_workers": True}
    assert resumed(Noise, stop, **options) == (True, "")
    is_exact, named = resumed(Flips, stop, **options)
    assert is_exact or "function[0].calls" in named

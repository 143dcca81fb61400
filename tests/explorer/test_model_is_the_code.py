"""What was explored is what runs: the real agreement gives the model's answers, on many runs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.explorer.model import Setup
from tests.explorer.programs import SAVE, STOP, WINDOW_STOP, raising, round_of, training
from tests.explorer.shadow import Shadow

RUNS = 250
ALL = training(3, "all", window=3, evaluation="inside")
NONE = training(3, "none", window=2, epochs=2, evaluation="behind")
FREE = training(3, "none", close="leave", window=3)


def setup_of(name, programs, *rounds, timers=True):
    return Setup(name, programs, rounds, timers)


SETUPS = [
    setup_of("stop", (ALL,) * 3, round_of(STOP, 3)),
    setup_of("window stop, then stop", (NONE,) * 3, round_of(WINDOW_STOP, 3), round_of(STOP, 3)),
    setup_of("stop, then window stop", (NONE,) * 2, round_of(STOP, 2), round_of(WINDOW_STOP, 2)),
    setup_of("save, save, stop", (NONE,) * 3, *(round_of(w, 3) for w in (SAVE, SAVE, STOP))),
    setup_of(
        "window stop, save, stop",
        (NONE,) * 2,
        *(round_of(w, 2) for w in (WINDOW_STOP, SAVE, STOP)),
        timers=False,
    ),
    setup_of(
        "notices apart",
        (ALL,) * 3,
        round_of((None, SAVE, WINDOW_STOP), 3),
        round_of((STOP, None, None), 3),
        timers=False,
    ),
    setup_of(
        "requests that meet", (ALL,) * 3, round_of((SAVE, WINDOW_STOP, STOP), 3), timers=False
    ),
    setup_of(
        "rank 1 cannot save",
        (NONE,) * 2,
        round_of(SAVE, 2, unable=[1]),
        round_of(STOP, 2),
        timers=False,
    ),
    setup_of(
        "rank 0 raises",
        (raising(FREE, 2), FREE, FREE),
        round_of(SAVE, 3),
        round_of(STOP, 3),
        timers=False,
    ),
]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_the_real_agreement_answers_as_the_model_does_on_random_runs(setup):
    """Counts, what is due and where, who waits, and every decision, step by step."""
    compared = Counter()
    for seed in range(RUNS):
        compared.update(Shadow(setup).run(random.Random(seed)))
    expected = {"opens", "sends", "hears", "is", "pass", "waits"}
    if setup.timers:
        expected |= {"failure"}
    assert expected <= set(compared)
    assert min(compared[what] for what in expected) >= RUNS / 10, compared


def test_the_runs_meet_every_answer_that_a_boundary_can_give():
    """Over all setups; otherwise little would be compared."""
    compared = Counter()
    for setup in SETUPS:
        for seed in range(20):
            compared.update(Shadow(setup).run(random.Random(seed)))
    assert min(compared[what] for what in ("pass", "save", "stop", "waits", "leaves")) >= 20

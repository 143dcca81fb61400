"""24 cases of the exactness campaign: stopped at random instants, the run is the one that was not.

Chosen so that they share few references and hit every kind of moment; 4 and 524 use the real
torchrun. `python -m tests.campaign --replay SEED` runs one of them and shows its logs.
"""

from __future__ import annotations

import pytest

from tests.campaign import cases
from tests.campaign.campaign import campaign

SEEDS = [4, 5, 13, 16, 30, 33, 73, 96, 127, 174, 208, 213, 214, 260, 284, 310, 313, 383, 411, 441,
         524, 563, 948, 1203]  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with campaign(tmp_path_factory.mktemp("campaign")) as one:
        yield one


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed}: {cases.draw(seed).words}")
def test_a_run_stopped_at_random_instants_is_the_run_that_was_not(running, seed):
    line, logs = running.run(seed)

    assert line["ok"], f"{line['why']}\nagain: python -m tests.campaign --replay {seed}\n{logs}"

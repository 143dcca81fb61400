"""Cases of the exactness campaign: stopped at random instants, the run is the one that was not.

Chosen so that they share few references and hit every kind of moment; 42 and 448 use the real
torchrun, 2943 resumes where DDP is about to regroup its buckets.
`python -m tests.campaign --replay SEED` runs one of them and shows its logs. Two more are of the
family "one-rank": `trainckpt run` with 2 and 4 ranks, one of which alone gets SIGTERM.
"""

from __future__ import annotations

import pytest

from tests.campaign import cases, families
from tests.campaign.campaign import campaign

SEEDS = [19, 28, 38, 42, 73, 76, 83, 138, 156, 160, 183, 208, 213, 298, 319, 427, 448, 489, 521,
         609, 800, 1652, 2324, 2943]  # fmt: skip
ONE_RANK_SEEDS = [8, 1]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with campaign(tmp_path_factory.mktemp("campaign")) as one:
        yield one


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed}: {cases.draw(seed).words}")
def test_a_run_stopped_at_random_instants_is_the_run_that_was_not(running, seed):
    line, logs = running.run(seed)

    assert line["ok"], f"{line['why']}\nagain: python -m tests.campaign --replay {seed}\n{logs}"


@pytest.mark.parametrize(
    "seed", ONE_RANK_SEEDS,
    ids=lambda seed: f"seed {seed}: {families.draw(families.ONE_RANK, seed).words}",
)  # fmt: skip
def test_one_rank_that_hears_of_a_stop_stops_all_at_its_micro_batch_with_75(running, seed):
    line, logs = running.run(seed, family=families.ONE_RANK)

    again = f"python -m tests.campaign --family one-rank --replay {seed}"
    assert line["ok"], f"{line['why']}\nagain: {again}\n{logs}"
    assert [stop["code"] for stop in line["stops"]] == [75]

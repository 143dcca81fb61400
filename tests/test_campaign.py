"""Cases of the exactness campaign: stopped at random instants, the run is the one that was not.

Chosen so that they share few references and hit every kind of moment; 42 uses the real
torchrun, 2943 resumes where DDP is about to regroup its buckets.
`python -m tests.campaign --replay SEED` runs one of them and shows its logs. One more is of the
family "one-rank": `trainckpt run` with 2 ranks, one of which alone gets SIGTERM; two are of
"layouts", two of "reshard".
"""

from __future__ import annotations

import sys

import pytest

from tests.campaign import cases, check_reshard, families, gate
from tests.campaign.campaign import campaign
from tests.campaign.check_reshard import Round
from tests.campaign.one_rank import ITEMS
from tests.long_cases import long, long_unless
from trainckpt.launcher.torchrun_command import mentions_us

# What the long ones hit, others or tests of launchers hit too.
SEEDS = [19, 83, 160, 427, 800, 2943, *long(38, 42, 76, 208, 213, 319, 489, 2324)]
ONE_RANK_SEEDS = [18]
# fsdp and tp on 2 ranks, stopped inside windows; tp on 4 continued by ddp on 2, and by tp; ddp
# from the first step on, continued by tp, of whose ranks two draw alike
OTHER_LAYOUTS = [
    (families.LAYOUTS, 1),
    (families.LAYOUTS, 14),
    (families.RESHARD, 2),
    (families.RESHARD, 23),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory, server):
    with campaign(tmp_path_factory.mktemp("campaign"), server) as one:
        yield one


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed {seed}: {cases.draw(seed).words}")
def test_a_run_stopped_at_random_instants_is_the_run_that_was_not(running, seed):
    line, logs = running.run(seed)

    assert line["ok"], f"{line['why']}\nagain: python -m tests.campaign --replay {seed}\n{logs}"


@pytest.mark.parametrize(
    "seed",
    ONE_RANK_SEEDS,
    ids=lambda seed: f"seed {seed}: {families.draw(families.ONE_RANK, seed).words}",
)
def test_one_rank_that_hears_of_a_stop_stops_all_at_its_micro_batch_with_75(running, seed):
    line, logs = running.run(seed, family=families.ONE_RANK)

    again = f"python -m tests.campaign --family one-rank --replay {seed}"
    assert line["ok"], f"{line['why']}\nagain: {again}\n{logs}"
    assert [stop["code"] for stop in line["stops"]] == [75]


@pytest.mark.parametrize(
    ("family", "seed"),
    long_unless(lambda case: case[1] in (1, 2), OTHER_LAYOUTS),
    ids=[
        f"{family} seed {seed}: {families.draw(family, seed).words}"
        for family, seed in OTHER_LAYOUTS
    ],
)
def test_a_run_whose_tensors_are_cut_goes_on_exactly_or_in_another_layout(running, family, seed):
    line, logs = running.run(seed, family=family)

    again = f"python -m tests.campaign --family {family} --replay {seed}"
    assert line["ok"], f"{line['why']}\nagain: {again}\n{logs}"


def rounds(*samples: list[int]) -> list[Round]:
    """The micro-batches of one epoch, which two ranks share."""
    return [Round((0, n), 0, ids, most_padding=3) for n, ids in enumerate(samples)]


HALF, REST = list(range(40)), list(range(40, ITEMS))


@pytest.mark.parametrize(
    ("epoch", "ended", "wrong"),
    [
        (rounds(HALF, REST), True, []),
        (rounds(HALF, [*REST, 0, 1, 2]), True, []),
        (rounds(HALF, REST[:-1]), False, []),
        (rounds(HALF, REST[:-1]), True, ["samples [92] were not seen"]),
        (rounds(HALF, [7, *REST[:1]], REST[1:]), True, ["samples [7] were seen twice"]),
        (rounds(HALF, [*REST, 0, 1, 2, 3]), True, ["4 samples of padding, 3 may be"]),
        (rounds(HALF, [*REST[:-1], 0]), False, ["1 samples were seen twice, but [92] not at all"]),
    ],
)
def test_the_check_of_an_epoch_finds_what_was_seen_twice_or_not_at_all(epoch, ended, wrong):
    found = list(check_reshard.epoch_wrong(epoch, ended=ended))

    assert found == wrong


def test_a_supervisor_sees_that_the_gate_and_its_examples_use_trainckpt():
    """Otherwise a rank that a signal ends before its imports gives 143 instead of 75."""
    assert mentions_us([sys.executable, "-u", gate.__file__, "examples/kitchen_sink.py"])

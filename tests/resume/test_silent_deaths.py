"""Which attempts without a reported end get one, because the agents of torchrun are still there."""

from __future__ import annotations

import pytest

from trainckpt.format.attempt_record import ENDED, RUNNING, STARTING, UNDECIDED, AttemptRecord
from trainckpt.resume.candidate_order import died_on
from trainckpt.resume.silent_deaths import REASON, agents_fact, with_outcomes_by_agents
from trainckpt.snapshot.attempt_history import claim, read_attempts
from trainckpt.storage.local import LocalTier

FACTS = {"agents": ["7 100 boot", "8 90 boot"], "pids": [70, 80]}
OWN = {**FACTS, "pids": [71, 81]}
READ = {**FACTS, "reading": "s4~1.2"}
WAITED = {"outcome": "killed", "exit_code": 71, "snapshot": "s4~1.2", "lost_micro_batches": 0}


@pytest.mark.parametrize(
    ("record", "died_while"),
    [
        (AttemptRecord(1, "s4~1.2", STARTING, facts=FACTS), STARTING),
        (AttemptRecord(1, UNDECIDED, STARTING, facts=READ), STARTING),
        (AttemptRecord(1, "s4~1.2", RUNNING, facts=FACTS), RUNNING),
        (AttemptRecord(1, "s4~1.2", ENDED, WAITED, facts=FACTS), STARTING),
        (
            AttemptRecord(1, UNDECIDED, STARTING, {**WAITED, "outcome": "failed"}, facts=READ),
            STARTING,
        ),
        (
            AttemptRecord(1, "s4~1.2", ENDED, {**WAITED, "lost_micro_batches": 3}, facts=FACTS),
            RUNNING,
        ),
        (AttemptRecord(1, "s4~1.2", ENDED, {**WAITED, "snapshot": "s6~1.1"}, facts=FACTS), RUNNING),
    ],
)
def test_a_death_that_spared_all_agents_is_recorded_with_what_it_befell(
    tmp_path, record, died_while
):
    tier = LocalTier(tmp_path)
    claim(tier, lambda _: record)
    ended = with_outcomes_by_agents(tier, {1: record}, OWN)
    assert read_attempts(tier) == ended
    outcome = ended[1].outcome
    assert (outcome["reason"], outcome["died_while"]) == (REASON, died_while)
    assert died_on(ended, "s4~1.2") == (died_while == STARTING)


@pytest.mark.parametrize(
    ("record", "own"),
    [
        (AttemptRecord(1, "s4~1.2", STARTING, facts=FACTS), {"agents": ["7 100 boot"]}),
        (
            AttemptRecord(1, "s4~1.2", STARTING, facts=FACTS),
            {"agents": ["7 100 boot", "8 91 boot"]},
        ),
        (AttemptRecord(1, "s4~1.2", STARTING, facts=FACTS), {}),
        (AttemptRecord(1, "s4~1.2", STARTING), {}),
        (AttemptRecord(1, "s4~1.2", STARTING, facts=FACTS), FACTS),  # of this very process
        (
            AttemptRecord(1, "s4~1.2", ENDED, {"outcome": "stopped", "exit_code": 75}, facts=FACTS),
            OWN,
        ),
    ],
)
def test_where_an_agent_was_lost_or_the_end_was_reported_the_record_stays(tmp_path, record, own):
    tier = LocalTier(tmp_path)
    claim(tier, lambda _: record)
    assert with_outcomes_by_agents(tier, {1: record}, own) == {1: record} == read_attempts(tier)


def test_agents_are_named_only_if_all_are_known():
    assert agents_fact(["8 90 boot", "7 100 boot", "8 90 boot"]) == {"agents": FACTS["agents"]}
    assert agents_fact(["7 100 boot", None]) == {}

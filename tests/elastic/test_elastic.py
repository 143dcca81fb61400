"""torchrun with a number of agents that changes: every sample once, whoever comes and goes."""

from __future__ import annotations

import itertools
import signal
import time

import psutil
import pytest

from tests.elastic import trace
from tests.elastic.agents import Agents
from tests.limits import HANG_S
from trainckpt.stop.lost_parent import AGENT_REASON

SAMPLES = 160


@pytest.fixture
def agents(tmp_path):
    found = Agents(tmp_path / "job", samples=SAMPLES)
    found.train_slowly()
    yield found
    found.end()


def until(agents, *, ranks, after=0):
    """Wait until so many ranks train in an attempt after this one; its number."""
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        for start in trace.starts(agents.trace):
            if start.attempt > after and start.world == ranks and len(start.lines.get(0, ())) > 2:
                return start.attempt
        time.sleep(0.05)
    raise AssertionError(agents.said(3000))


def ends(agents, samples=SAMPLES):
    """Let the run end, and its agents; the attempts that trained."""
    agents.train_quickly()
    assert set(agents.wait_all()) == {0}, agents.said(3000)
    assert psutil.wait_procs(agents.left_over(), HANG_S)[1] == []
    attempts = trace.starts(agents.trace)
    told = trace.verdict(attempts, 1, samples, None)
    assert told[0] == trace.SAME_DATA, told
    assert trace.wrong_words(attempts, agents.said()) == ""
    return attempts


def trained(attempts):
    """The steps of each attempt, and what the next one has of them."""
    return [
        (len(one.lines.get(0, ())), following.step - one.step)
        for one, following in itertools.pairwise(attempts)
    ]


def test_an_agent_that_comes_and_is_killed_alone_costs_no_step(agents):
    first = agents.start()
    alone = until(agents, ranks=1)
    agents.start()
    until(agents, ranks=2, after=alone)
    (orphan,) = [rank for rank in agents.ranks(first) if rank.ppid() == first.pid]
    agents.kill_alone(first)
    attempts = ends(agents)
    assert not orphan.is_running()
    assert AGENT_REASON in agents.said()
    assert attempts[-1].world == 1
    assert all(steps == kept for steps, kept in trained(attempts))


@pytest.mark.long
def test_a_rank_whose_agent_is_killed_before_its_checkpointer_stops_too(agents):
    with agents.held_before_the_checkpointer():
        agent = agents.start()
        agents.until_held(1)
        (orphan,) = agents.kill_alone(agent)
    assert psutil.wait_procs([orphan], HANG_S)[1] == []
    assert f"stopped by {AGENT_REASON}" in agents.said()
    agents.start()
    assert [start.step for start in ends(agents)] == [0, 0]


@pytest.mark.long
def test_two_agents_one_and_two_again_train_every_sample_once(agents):
    agents.start()
    second = agents.start()
    two = until(agents, ranks=2)
    agents.kill_host(second)
    one = until(agents, ranks=1, after=two)
    agents.start()
    until(agents, ranks=2, after=one)
    attempts = ends(agents)
    assert set(attempts[-1].restarts) == {0, 1}  # torchrun's counts differ, the start is one


@pytest.mark.long
def test_four_agents_that_are_told_to_leave_one_by_one_lose_no_step(agents):
    started = [agents.start() for _ in range(4)]
    newest = until(agents, ranks=4)
    for left, agent in zip((3, 2, 1), started, strict=False):
        agent.send_signal(signal.SIGTERM)
        agent.wait(HANG_S)
        newest = until(agents, ranks=left, after=newest)
    assert all(steps == kept for steps, kept in trained(ends(agents)))

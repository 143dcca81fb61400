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
from trainckpt.stop.notice_sources import AGENT_REASON

SAMPLES = 120


@pytest.fixture
def agents(tmp_path):
    found = Agents(tmp_path / "job", samples=SAMPLES)
    yield found
    found.end()


def until(agents, attempt, lines):
    """Wait for so many lines of an attempt's rank 0; the attempt."""
    end_s = time.monotonic() + HANG_S
    while time.monotonic() < end_s:
        for start in trace.starts(agents.trace):
            if start.attempt == attempt and len(start.lines.get(0, ())) >= lines:
                return start
        time.sleep(0.05)
    raise AssertionError(agents.said())


def ends(agents, samples=SAMPLES):
    """Wait for the end of all agents; the attempts that trained."""
    assert set(agents.wait_all()) == {0}, agents.said()
    assert psutil.wait_procs(agents.left_over(), HANG_S)[1] == []
    attempts = trace.starts(agents.trace)
    told = trace.verdict(attempts, 1, samples, None)
    assert told[0] == trace.SAME_DATA, told
    assert trace.wrong_words(attempts, agents.said()) == ""
    return attempts


def test_an_agent_that_comes_and_is_killed_alone_costs_no_step(agents):
    first = agents.start()
    until(agents, 1, 6)
    agents.start()
    until(agents, 2, 6)
    (orphan,) = [rank for rank in agents.ranks(first) if rank.ppid() == first.pid]
    agents.kill_alone(first)
    attempts = ends(agents)
    assert not orphan.is_running()
    assert AGENT_REASON in agents.said()
    assert [start.world for start in attempts] == [1, 2, 1]
    assert [len(s.lines[0]) for s in attempts[:2]] == [
        later.step - earlier.step for earlier, later in itertools.pairwise(attempts)
    ]


@pytest.mark.long
def test_two_agents_one_and_two_again_train_every_sample_once(agents):
    agents.start()
    second = agents.start()
    until(agents, 1, 12)
    agents.kill_host(second)
    until(agents, 2, 12)
    agents.start()
    attempts = ends(agents)
    assert [start.world for start in attempts] == [2, 1, 2]
    assert set(attempts[-1].restarts) == {0, 1}  # torchrun's counts differ, the start is one


@pytest.mark.long
def test_four_agents_that_are_told_to_leave_one_by_one_lose_no_step(agents):
    started = [agents.start() for _ in range(4)]
    for attempt, agent in enumerate(started[:3], 1):
        until(agents, attempt, 3)
        agent.send_signal(signal.SIGTERM)
        agent.wait(HANG_S)
    attempts = ends(agents)
    assert [start.world for start in attempts] == [4, 3, 2, 1]
    assert [len(start.lines[0]) for start in attempts[:-1]] == [
        later.step - earlier.step for earlier, later in itertools.pairwise(attempts)
    ]

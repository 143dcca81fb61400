"""The same on hosts with networks, names and shared memory of their own."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.elastic.agents import TORCHRUN, TRAINCKPT_RUN, Agents, Place
from tests.elastic.test_elastic import ends, until
from tests.faults import hosts
from tests.limits import HANG_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "-"),
    pytest.mark.timeout(2 * HANG_S),
]


@pytest.fixture
def places(server):
    variables = {"GLOO_SOCKET_IFNAME": "link0"}
    with hosts.hosts_of(server, Path("/dev/shm"), 4) as four:
        yield [Place(host.address, tuple(host.enter), variables) for host in four]


@pytest.mark.parametrize("starter", [TORCHRUN, TRAINCKPT_RUN], ids=["torchrun", "trainckpt run"])
def test_hosts_come_and_are_lost_replaced_and_told_to_leave(tmp_path, places, starter):
    agents = Agents(tmp_path / "job", starter=starter, epochs=1, samples=320, store_at=places[0])
    agents.train_slowly()
    try:
        alpha = agents.start(places[0])
        one = until(agents, ranks=1)
        beta = agents.start(places[1])
        two = until(agents, ranks=2, after=one)
        agents.kill_host(beta)
        beta = agents.start(places[1])  # replaced, before or after alpha goes on alone
        grown = until(agents, ranks=2, after=two)
        agents.kill_alone(alpha)
        alone = until(agents, ranks=1, after=grown)
        for place in (places[0], places[2], places[3]):
            agents.start(place)
        four = until(agents, ranks=4, after=alone)
        leaving = [agent for agent in agents.running() if agent is not beta]
        for agent in leaving:
            agent.send_signal(signal.SIGTERM)
        for agent in leaving:
            assert agent.wait(HANG_S) == (75 if starter is TRAINCKPT_RUN else 1), agents.said()
        last = until(agents, ranks=1, after=four)
        attempts = ends(agents, samples=320)
        assert attempts[-1].attempt == last
    finally:
        agents.end()

"""Chaos for an elastic torchrun: a random sequence of events at random times, by its seed.

    kill host      an agent with its rank, as if the host had lost its power
    kill agent     the agent alone; the rank lives on as an orphan
    kill rank      the rank alone
    replace        kill host, and a new agent at once
    add            one more agent, at most four
    terminate      SIGTERM to an agent, as before a preemption

Once no agent is left the job is submitted again, as a scheduler would do. A case has failed too if
it does not finish in time, or leaves a process behind.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import psutil

from tests.elastic import storm, trace
from tests.elastic.agents import MOST, TORCHRUN, Agents, Place
from tests.elastic.storm import Ended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KILL_HOST, KILL_AGENT, KILL_RANK = "kill host", "kill agent", "kill rank"
REPLACE, ADD, TERMINATE = "replace", "add", "terminate"
EVENTS = (KILL_HOST, KILL_AGENT, KILL_RANK, REPLACE, ADD, TERMINATE)
EPOCHS, SAMPLES = 2, 480  # 1 to 4 ranks share them equally
EVENT_S = 5.0  # the longest pause before an event
TRAINS = 0.7  # the share of events that come once the ranks train again after the one before
TRAINS_WITHIN_S = 40.0  # no longer: the event before may have left nobody
FINISH_S = 240.0  # from the last event to the end of the run
LEFT_S = 10.0  # for agents to leave, and orphans to notice that theirs is gone


@dataclass(frozen=True)
class Event:
    """One of `EVENTS`, so many seconds after the one before, or after ranks have trained since.

    `pick` is uniform in [0, 1): which agent.
    """

    what: str
    trains: bool
    after_s: float
    pick: float


@dataclass(frozen=True)
class Case:
    """What one seed stands for."""

    seed: int
    agents: int
    events: tuple[Event, ...]

    @property
    def words(self) -> str:
        events = ", ".join(f"{event.what} after {event.after_s:.1f} s" for event in self.events)
        return f"{self.agents} agents; {events}"


def draw(seed: int) -> Case:
    """The case of this seed."""
    random = Random(seed)
    events = tuple(
        Event(
            random.choice(EVENTS),
            random.random() < TRAINS,
            random.uniform(0, EVENT_S),
            random.random(),
        )
        for _ in range(random.randint(2, 4))
    )
    return Case(seed, random.randint(1, MOST), events)


class Storm(storm.Storm):
    """One case as it runs, with agents that `starter` starts."""

    def __init__(self, case: Case, folder: Path, starter: Sequence[str] = TORCHRUN) -> None:
        self._case = case
        self._agents = Agents(folder, starter=starter, epochs=EPOCHS, samples=SAMPLES)
        super().__init__(self._agents.trace, trains_within_s=TRAINS_WITHIN_S, finish_s=FINISH_S)

    def run(self, references: References) -> Ended:
        try:
            verdict, why = trace.FAILED, self.unfinished
            if self.drive(self._case.events):
                verdict, why = self._judge(references)
        finally:
            self._agents.end()
        return Ended(verdict, why, tuple(self.done))

    def said(self, most: int = 1_000_000) -> str:
        return self._agents.said(most)

    def go_on(self) -> bool | None:
        """Agents may still be there: torchrun waits 300 s for one that was killed."""
        if self._agents.has_finished():
            return True
        if not self._agents.running():
            self._agents.begin_launch()
            self.submit()
        return None

    def submit(self) -> None:
        for _ in range(self._case.agents):
            self._agents.start()
        self._note(f"{self._case.agents} agents submitted")

    def happen(self, event: Event) -> None:
        running = self._agents.running()
        number = int(event.pick * len(running))
        what = event.what
        if what == ADD:
            if len(running) < MOST:
                self._agents.start()
        elif not running:
            what += " (nobody there)"
        elif what == KILL_AGENT:
            self._agents.kill_alone(running[number])
        elif what == KILL_RANK:
            self._agents.kill_ranks(running[number])
        elif what == TERMINATE:
            running[number].send_signal(signal.SIGTERM)
        else:
            self._agents.kill_host(running[number])
            if what == REPLACE:
                self._agents.start()
        self._note(f"{what}, of {len(running)}")

    def _note(self, what: str) -> None:
        attempts = self.starts()
        self.note(what, attempts[-1].attempt if attempts else 0)

    def _judge(self, references: References) -> tuple[str, str]:
        self._note("finished")
        psutil.wait_procs(self._agents.left_over(), LEFT_S)
        if left := self._agents.left_ranks():
            return trace.FAILED, f"left behind: {[rank.pid for rank in left]}"
        attempts = self.starts()
        if wrong := trace.wrong_words(attempts, self._agents.said()):
            return trace.FAILED, wrong
        return trace.verdict(attempts, EPOCHS, SAMPLES, references.of(attempts[-1].world))


class References:
    """What is kept of runs that were never stopped, by their number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[int, Any] = {}

    def of(self, world: int) -> dict[tuple[int, int], trace.Line]:
        if world not in self._known:
            agents = Agents(
                self._folder / f"reference{world}",
                nodes=(world, world),
                epochs=EPOCHS,
                samples=SAMPLES,
            )
            try:
                for _ in range(world):
                    agents.start(Place())
                assert set(agents.wait_all()) == {0}, agents.said()
                self._known[world] = trace.kept(trace.starts(agents.trace))
            finally:
                agents.end()
        return self._known[world]

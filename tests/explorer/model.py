"""The values of the model: what ranks run, what they are asked for, and where they are.

A small world in which every interleaving of the agreement can be tried. It says in its own words
what semantics section 3 says; `test_model_is_the_code.py` compares it with the code, step by step.

Time is not modelled: whatever may take long may take forever, and a timer may ring at any moment.
Each step moves something forward and nothing moves back, so that every run ends; where no step
is left is where faults are looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Action = Literal["stop", "save"]
Mode = Literal["micro-batch", "window"]
Phase = Literal["runs", "quiesced", "stopped", "finished", "left", "ended"]

NOT_OPENED = -1


class Op(NamedTuple):
    """One thing that a rank's main thread does.

    Attributes:
        kind: collective and commit block until all ranks that have it are there; issue starts an
            asynchronous collective and wait blocks until all have issued it; leave ends the
            process after `close()`, raise ends it by an exception.
        epoch_end: Of a boundary: the one whose `next()` raises StopIteration.
    """

    kind: Literal["boundary", "work", "collective", "issue", "wait", "commit", "leave", "raise"]
    name: str = ""
    resumable: bool = True
    window_end: bool = True
    epoch_end: bool = False


Program = tuple[Op, ...]


class Request(NamedTuple):
    """What a notice on one rank asks of all."""

    action: Action
    mode: Mode = "micro-batch"


class Round(NamedTuple):
    """What each rank brings to one round; None: it only answers, once it heard the bell."""

    requests: tuple[Request | None, ...]
    can_save: tuple[bool, ...]


class Outcome(NamedTuple):
    """A decision."""

    action: Action
    mode: Mode
    bound: int
    failed: bool = False


class Rank(NamedTuple):
    """One rank. Sets of rounds are bit masks, because states are hashed millions of times.

    Attributes:
        at: Index of the operation that main does next, or is blocked in.
        judged: Only under `Rules.boundary_is_atomic = False`: found that it may pass, and has
            not yet raised the count.
        opened: For each round the count that was published, or NOT_OPENED.
        gave_up: Only under `Rules.one_decision = False`: rounds failed by this rank's own timer.
        saves: (round, passed) for every snapshot taken.
    """

    at: int
    passed: int
    phase: Phase
    judged: bool
    opened: tuple[int, ...]
    sent: int
    known: int
    gave_up: int
    saves: tuple[tuple[int, int], ...]


class State(NamedTuple):
    """All ranks, and the decisions that stand in the store."""

    ranks: tuple[Rank, ...]
    decisions: tuple[Outcome | None, ...]


class Step(NamedTuple):
    """What happened between two states; `rank` and `round` where there is one."""

    what: str
    rank: int = -1
    round: int = -1


@dataclass(frozen=True)
class Rules:
    """The protocol. Every default is the real one, every other value a near-miss.

    Attributes:
        waits_for_decision: Main passes no boundary while an open round is undecided.
        counts_epoch_ends: The boundary that ends an epoch is counted, not only tested.
        leaves_with_final_count: Who leaves publishes its final count, the answer to all rounds.
        mode_of_decision: Ranks act in the mode decided; else each in that of its own notice.
        strictest_stop_stands: A later stop in mode window does not loosen one in micro-batch.
        one_decision: A timer proposes "failed", and what stands first is read by all; else each
            rank goes by its own timer.
        boundary_is_atomic: From the last look at the rounds to `passed += 1` the lock is held.
        saves_beside_a_stop: Which decided saves are still taken once a stop is known: those of
            older rounds; near-misses: all, or none.
        failed_stop_ends_process: The watcher ends the process; else main does, at a boundary.
        commit_ends_it: Once the final snapshot is committed no decision counts. False is not a
            near-miss but the world: each rank learns of the commit a little later.
    """

    waits_for_decision: bool = True
    counts_epoch_ends: bool = True
    leaves_with_final_count: bool = True
    mode_of_decision: bool = True
    strictest_stop_stands: bool = True
    one_decision: bool = True
    boundary_is_atomic: bool = True
    saves_beside_a_stop: Literal["older", "all", "none"] = "older"
    failed_stop_ends_process: bool = True
    commit_ends_it: bool = True


@dataclass(frozen=True)
class Setup:
    """What is explored.

    Attributes:
        rounds: In the order in which they are opened. A notice may come at any moment, also when
            nothing matters any more, so that shorter histories are among those explored.
        timers: Whether rounds may fail, at any moment while they are undecided.
    """

    name: str
    programs: tuple[Program, ...]
    rounds: tuple[Round, ...]
    timers: bool = False
    rules: Rules = Rules()

    def alike(self) -> list[list[int]]:
        """Ranks, grouped so that within a group any two could be swapped."""
        groups: dict[object, list[int]] = {}
        for r, program in enumerate(self.programs):
            brings = tuple((round_.requests[r], round_.can_save[r]) for round_ in self.rounds)
            groups.setdefault((program, brings), []).append(r)
        return list(groups.values())

    def first_state(self) -> State:
        """Nothing has happened."""
        rounds = len(self.rounds)
        rank = Rank(0, 0, "runs", False, (NOT_OPENED,) * rounds, 0, 0, 0, ())
        return State((rank,) * len(self.programs), (None,) * rounds)

"""Tries every interleaving of a setup, and judges every way in which a run can end."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.explorer.model import NOT_OPENED, State
from tests.explorer.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.explorer.model import Rank, Setup

ENDS = {
    "runs": "stuck",
    "quiesced": "stopped",
    "stopped": "stopped",
    "finished": "finished",
    "ended": "ended with 71",
}


@dataclass
class Report:
    """What an exploration found.

    Attributes:
        ends: How the runs ended, without faults: how many different last states.
        faults: The same for faults.
        stops: Numbers of boundaries that all ranks had passed when all stopped.
        saves: (round, passed) of every snapshot in a run without faults.
        traces: For each kind of fault one of the shortest ways to it, as lines.
    """

    setup: Setup
    states: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    stops: set[int] = field(default_factory=set)
    saves: set[tuple[int, int]] = field(default_factory=set)
    traces: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0


def explore(setup: Setup, *, reduced: bool = True, until: str | None = None) -> Report:
    """All states breadth first, so that the trace of a fault is a shortest one.

    Args:
        reduced: Leave out orders of steps that make no difference (see `Steps.reduced`), and
            states that differ from another in nothing that matters (see `_canonical`).
        until: A kind of fault that is enough; without, every state is visited.
    """
    began = time.perf_counter()
    steps = Steps(setup)
    step_on = steps.reduced if reduced else steps.all
    canonical_of = _canonical(setup) if reduced else _itself
    report = Report(setup)
    first = setup.first_state()
    came_from: dict[State, State | None] = {first: None}
    last_states: dict[str, State] = {}
    to_do = deque([first])
    while to_do and until not in last_states:
        state = to_do.popleft()
        found = step_on(state)
        for _, after in found:
            canonical = canonical_of(after)
            if canonical not in came_from:
                came_from[canonical] = state
                to_do.append(canonical)
        if not found:
            fault = _judge(setup, state, report)
            if fault:
                last_states.setdefault(fault, state)
    report.states = len(came_from)
    for fault, state in last_states.items():
        report.traces[fault] = list(_trace(steps, _path(came_from, state), canonical_of))
    report.seconds = time.perf_counter() - began
    return report


def fault_of(setup: Setup, state: State) -> str | None:
    """What is wrong with a state in which nothing can happen any more."""
    staying = [rank for rank in state.ranks if rank.phase != "left"]
    ends = {ENDS[rank.phase] for rank in staying}
    rounds_saved = [[k for k, _ in rank.saves] for rank in staying]
    if "stuck" in ends:
        return "deadlock"
    if any(len(set(saved)) < len(saved) for saved in rounds_saved):
        return "a save taken twice"
    if len(ends) > 1:
        is_after_commit = ends <= {"finished", "ended with 71"} and _commits(setup)
        is_after_commit = is_after_commit or any(rank.phase == "stopped" for rank in staying)
        return "ended after the commit" if is_after_commit else "split"
    if ends == {"ended with 71"}:
        return None  # where each rank died is not agreed
    if len({(rank.passed, rank.at) for rank in staying}) > 1:
        return "different stops"
    if len({rank.saves for rank in staying}) > 1:
        return "different saves"
    if ends == {"stopped"} and not _stopped_where_agreed(setup, state):
        return "stopped inside a window"
    return None


def _judge(setup: Setup, state: State, report: Report) -> str | None:
    fault = fault_of(setup, state)
    if fault:
        report.faults[fault] += 1
        return fault
    rank = next(rank for rank in state.ranks if rank.phase != "left")
    report.ends[ENDS[rank.phase]] += 1
    if rank.phase in ("quiesced", "stopped"):
        report.stops.add(rank.passed)
    if rank.phase != "ended":
        report.saves.update(rank.saves)
    return None


def _commits(setup: Setup) -> bool:
    return any(op.kind == "commit" for program in setup.programs for op in program)


def _stopped_where_agreed(setup: Setup, state: State) -> bool:
    """In mode window only at a window's end; never where no resume is possible."""
    stops = [
        decision
        for decision in state.decisions
        if decision and decision.action == "stop" and not decision.failed
    ]
    any_place = any(decision.mode == "micro-batch" for decision in stops)
    ops = [
        program[rank.at]
        for program, rank in zip(setup.programs, state.ranks, strict=True)
        if rank.phase != "left"
    ]
    return all(op.resumable and (any_place or op.window_end) for op in ops)


def _canonical(setup: Setup) -> Callable[[State], State]:
    """Makes one of states that differ in nothing that matters.

    Which rank is which, among those that run the same program and may get the same notices; and
    what was published for a round once that round is decided.
    """
    groups = setup.alike()
    rounds = range(len(setup.rounds))

    def canonical(state: State) -> State:
        ranks = state.ranks
        for k in rounds:
            if state.decisions[k] is not None:
                ranks = tuple([_forgetting(rank, k) for rank in ranks])
        return State(_sorted_within(groups, ranks), state.decisions)

    return canonical


def _sorted_within(groups: list[list[int]], ranks: tuple[Rank, ...]) -> tuple[Rank, ...]:
    if len(groups) == 1:
        return tuple(sorted(ranks))
    result = list(ranks)
    for group in groups:
        for r, rank in zip(group, sorted(ranks[r] for r in group), strict=True):
            result[r] = rank
    return tuple(result)


def _forgetting(rank: Rank, k: int) -> Rank:
    if rank.opened[k] <= 0:
        return rank
    return rank._replace(opened=(*rank.opened[:k], 0, *rank.opened[k + 1 :]))


def _itself(state: State) -> State:
    return state


# What happened, for people.


def _path(came_from: dict[State, State | None], last: State) -> list[State]:
    path: list[State] = []
    state: State | None = last
    while state is not None:
        path.append(state)
        state = came_from[state]
    return path[::-1]


def _trace(
    steps: Steps, path: list[State], canonical_of: Callable[[State], State]
) -> Iterator[str]:
    """The steps from state to state; ranks keep their numbers although states were sorted."""
    state = path[0]
    for expected in path[1:]:
        step, after = next(
            (step, after) for step, after in steps.all(state) if canonical_of(after) == expected
        )
        who = f"rank {step.rank}" if step.rank >= 0 else "store "
        about = f"round {step.round + 1}" if step.round >= 0 else ""
        outcome = after.decisions[step.round] if step.what == "is decided" else None
        bound = f"{outcome.action} beyond {outcome.bound}" if outcome else ""
        yield " ".join(f"{who}  {step.what} {about} {bound}".split(" ")).rstrip()
        state = after
    for r, rank in enumerate(state.ranks):
        yield f"=> rank {r}: {_where(steps, r, rank)}"


def _where(steps: Steps, r: int, rank: Rank) -> str:
    op = steps.setup.programs[r][rank.at]
    published = [count for count in rank.opened if count != NOT_OPENED]
    saves = [f"round {k + 1} at {passed}" for k, passed in rank.saves]
    return (
        f"{ENDS.get(rank.phase, rank.phase)} at {op.kind} {op.name!r}, passed {rank.passed}, "
        f"published {published}, saves {saves}"
    )

"""Protocols that are nearly right, and the fault that the explorer has to find in each."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.explorer.model import Rules, Setup
from tests.explorer.programs import SAVE, STOP, WINDOW_STOP, round_of, training
from tests.explorer.setups import setup_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.explorer.model import Program, Request

EVERY = training(3, "all")
FREE = training(3, "none")
WINDOWS = training(3, "none", window=3)
WINDOWS_TOGETHER = training(3, "all", window=3)
NO_BARRIER = training(2, "none", close="leave")


class NearMiss(NamedTuple):
    """What is wrong with a protocol, and the fault that follows."""

    fault: str
    setup: Setup


def near_misses() -> Iterator[NearMiss]:
    """Each breaks one rule of the protocol, or of programs."""
    return chain(_of_counting(), _of_leaving(), _of_judging_alone(), _of_stops_and_saves())


def _of_counting() -> Iterator[NearMiss]:
    name = "main passes while the round is undecided"
    yield _miss(name, "deadlock", EVERY, STOP, waits_for_decision=False)
    for kind, fault in (("unannounced", "deadlock"), ("none", "different stops")):
        program = training(2, "all", epochs=2, evaluation=kind)
        name = f"an epoch's end is not counted, evaluation {kind}"
        yield _miss(name, fault, program, STOP, counts_epoch_ends=False)
    name = "passed is raised outside the lock"
    yield _miss(f"{name}, all", "deadlock", EVERY, STOP, boundary_is_atomic=False)
    yield _miss(f"{name}, none", "different stops", FREE, STOP, boundary_is_atomic=False)
    yield _miss(f"{name}, save", "different saves", FREE, SAVE, boundary_is_atomic=False)


def _of_leaving() -> Iterator[NearMiss]:
    name = "a rank leaves without barrier and final count"
    yield _miss(name, "deadlock", NO_BARRIER, STOP, leaves_with_final_count=False)
    name = "a rank leaves without barrier, and a stop fails"
    yield _miss(name, "split", NO_BARRIER, STOP, timers=True)


def _of_judging_alone() -> Iterator[NearMiss]:
    modes = round_of((WINDOW_STOP, STOP, STOP), 3)
    for program, fault in ((WINDOWS, "different stops"), (WINDOWS_TOGETHER, "deadlock")):
        name = f"each rank its own mode: {fault}"
        rules = Rules(mode_of_decision=False)
        yield NearMiss(fault, Setup(name, (program,) * 3, (modes,), rules=rules))
    name = "each rank its own timer"
    alone: dict[str, Any] = {"timers": True, "one_decision": False}
    yield _miss(f"{name}, stop, none", "split", FREE, STOP, **alone)
    yield _miss(f"{name}, stop, all", "deadlock", EVERY, STOP, **alone)
    yield _miss(f"{name}, save", "different saves", FREE, SAVE, **alone)
    name = "only main obeys a failed stop"
    yield _miss(name, "deadlock", EVERY, STOP, timers=True, failed_stop_ends_process=False)


def _of_stops_and_saves() -> Iterator[NearMiss]:
    name, fault = "a later stop loosens an earlier one", "different stops"
    yield _miss(name, fault, WINDOWS, STOP, WINDOW_STOP, strictest_stop_stands=False)
    name, fault = "a save is taken after a stop", "different saves"
    yield _miss(name, fault, WINDOWS, WINDOW_STOP, SAVE, saves_beside_a_stop="all")
    name, fault = "a stop overtakes an older save", "different saves"
    yield _miss(name, fault, FREE, SAVE, STOP, saves_beside_a_stop="none")


def _miss(
    name: str, fault: str, program: Program, *requests: Request, timers: bool = False, **rules: Any
) -> NearMiss:
    return NearMiss(fault, setup_of(name, program, requests, timers=timers, rules=Rules(**rules)))

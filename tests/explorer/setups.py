"""The setups that are explored: the protocol's, and the near-misses with the faults they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.explorer.model import Rules, Setup
from tests.explorer.programs import SAVE, STOP, WINDOW_STOP, raising, round_of, training

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.explorer.model import Program, Wish
    from tests.explorer.programs import Collectives

COLLECTIVES: tuple[Collectives, ...] = ("all", "last", "none", "ahead")
REAL = Rules()
PAIRS = {
    "window stop, then stop": (WINDOW_STOP, STOP),
    "stop, then window stop": (STOP, WINDOW_STOP),
    "save, then stop": (SAVE, STOP),
    "stop, then save": (STOP, SAVE),
    "window stop, then save": (WINDOW_STOP, SAVE),
    "save, then save": (SAVE, SAVE),
}


def protocol() -> Iterator[Setup]:
    """The real protocol, small enough for every run of the tests."""
    for timers in (False, True):
        yield from _one_round(timers=timers)
        yield from _whole_lives(timers=timers)
        yield from _notices_apart(timers=timers)
        for name, pair in PAIRS.items():
            yield _setup(f"{name}, all", training(3, "all", window=3), pair, timers=timers)
            if not timers:
                yield _setup(f"{name}, none", training(3, "none", window=3), pair)
            else:
                short = training(2, "none", window=2)
                yield _setup(f"{name}, none, 2 ranks", short, pair, size=2, timers=True)
    yield from _exceptions()


def larger() -> Iterator[Setup]:
    """More ranks, more rounds, longer programs: minutes."""
    for timers in (False, True):
        for name, pair in PAIRS.items():
            for collectives in COLLECTIVES:
                program = _usual(collectives)
                yield _setup(f"{name}, {collectives}, evaluation", program, pair, timers=timers)
        four = training(3, "all", window=3)
        yield _setup("4 ranks, stop", four, (STOP,), size=4, timers=timers)
        yield _setup("4 ranks, save, then stop", four, (SAVE, STOP), size=4, timers=timers)
        three = (SAVE, WINDOW_STOP, STOP)
        yield _setup("three rounds, all", _usual("all"), three, timers=timers)
        yield _setup("three rounds, none", training(2, "none", window=2), three, timers=timers)
        unable = (round_of(SAVE, 3, unable=[2]), round_of(STOP, 3))
        name = f"save that one rank cannot take, then stop, none{', timers' if timers else ''}"
        yield Setup(name, (training(3, "none", window=3),) * 3, unable, timers)
        epochs = training(3, "ahead", epochs=2, window=3, evaluation="behind")
        yield _setup("two epochs, save, then stop", epochs, (SAVE, STOP), timers=timers)


class NearMiss(NamedTuple):
    """A protocol that is nearly right, and what is wrong with it."""

    fault: str
    setup: Setup


def near_misses() -> Iterator[NearMiss]:
    """Each breaks one rule, or one rule of programs."""
    every, free = training(3, "all"), training(3, "none")
    windows = training(3, "none", window=3)
    yield _miss(
        "main passes while the round is undecided",
        "deadlock",
        every,
        (STOP,),
        rules=Rules(waits_for_decision=False),
    )
    for kind, fault in (("unannounced", "deadlock"), ("none", "different stops")):
        program = training(2, "all", epochs=2, evaluation=kind)
        yield _miss(
            f"an epoch's end is not counted, evaluation {kind}",
            fault,
            program,
            (STOP,),
            rules=Rules(counts_epoch_ends=False),
        )
    yield _miss(
        "a rank leaves without barrier and final count",
        "deadlock",
        training(2, "none", close="leave"),
        (STOP,),
        rules=Rules(leaves_with_final_count=False),
    )
    yield _miss(
        "a rank leaves without barrier, and a stop fails",
        "split",
        training(2, "none", close="leave"),
        (STOP,),
        timers=True,
    )
    own_modes = Rules(mode_of_decision=False)
    modes = round_of((WINDOW_STOP, STOP, STOP), 3)
    yield NearMiss(
        "different stops",
        Setup("each rank its own mode, none", (windows,) * 3, (modes,), rules=own_modes),
    )
    together = training(3, "all", window=3)
    yield NearMiss(
        "deadlock",
        Setup("each rank its own mode, all", (together,) * 3, (modes,), rules=own_modes),
    )
    yield _miss(
        "a later stop loosens an earlier one",
        "different stops",
        windows,
        (STOP, WINDOW_STOP),
        rules=Rules(strictest_stop_stands=False),
    )
    own_timers = Rules(one_decision=False)
    yield _miss(
        "each rank its own timer, stop", "split", free, (STOP,), timers=True, rules=own_timers
    )
    yield _miss(
        "each rank its own timer, stop, all",
        "deadlock",
        every,
        (STOP,),
        timers=True,
        rules=own_timers,
    )
    yield _miss(
        "each rank its own timer, save",
        "different saves",
        free,
        (SAVE,),
        timers=True,
        rules=own_timers,
    )
    unlocked = Rules(boundary_is_atomic=False)
    yield _miss(
        "passed is raised outside the lock, all", "deadlock", every, (STOP,), rules=unlocked
    )
    yield _miss(
        "passed is raised outside the lock, none", "different stops", free, (STOP,), rules=unlocked
    )
    yield _miss(
        "passed is raised outside the lock, save", "different saves", free, (SAVE,), rules=unlocked
    )
    yield _miss(
        "a save is taken after a stop",
        "different saves",
        windows,
        (WINDOW_STOP, SAVE),
        rules=Rules(saves_beside_a_stop="all"),
    )
    yield _miss(
        "a stop overtakes an older save",
        "different saves",
        free,
        (SAVE, STOP),
        rules=Rules(saves_beside_a_stop="none"),
    )
    yield _miss(
        "only main obeys a failed stop",
        "deadlock",
        every,
        (STOP,),
        timers=True,
        rules=Rules(failed_stop_ends_process=False),
    )


def _usual(collectives: Collectives) -> Program:
    return training(3, collectives, window=3, evaluation="behind")


def _setup(
    name: str,
    program: Program,
    wishes: Sequence[Wish | Sequence[Wish | None]],
    *,
    size: int = 3,
    timers: bool = False,
    rules: Rules = REAL,
) -> Setup:
    rounds = tuple(round_of(wish, size) for wish in wishes)
    timed = f"{name}, timers" if timers else name
    return Setup(timed, (program,) * size, rounds, timers, rules)


def _miss(
    name: str,
    fault: str,
    program: Program,
    wishes: Sequence[Wish],
    *,
    timers: bool = False,
    rules: Rules = REAL,
) -> NearMiss:
    return NearMiss(fault, _setup(name, program, wishes, timers=timers, rules=rules))


def _one_round(*, timers: bool) -> Iterator[Setup]:
    """3 ranks, 3 micro-batches, an evaluation behind them, and one notice that any rank gets."""
    for collectives in COLLECTIVES:
        for name, wish in (("stop", STOP), ("window stop", WINDOW_STOP), ("save", SAVE)):
            yield _setup(f"{name}, {collectives}", _usual(collectives), (wish,), timers=timers)


def _whole_lives(*, timers: bool) -> Iterator[Setup]:
    """Ends of epochs and evaluations of all kinds."""
    for evaluation in ("none", "behind", "unannounced", "inside"):
        for collectives in ("all", "none") if timers else COLLECTIVES:
            program = training(2, collectives, epochs=2, window=2, evaluation=evaluation)
            name = f"two epochs, evaluation {evaluation}, {collectives}"
            yield _setup(name, program, (STOP,), timers=timers)
    program = training(3, "all", epochs=2, window=2, evaluation="behind")
    yield _setup("epochs that end inside a window", program, (WINDOW_STOP,), timers=timers)


def _notices_apart(*, timers: bool) -> Iterator[Setup]:
    """Notices that differ, or come to one rank only while the others answer."""
    for collectives in ("all", "none"):
        program = training(3, collectives, window=3)
        apart = {
            "stop on one rank": (STOP, None, None),
            "save on one rank": (None, SAVE, None),
            "save meets stop": (SAVE, STOP, None),
            "window stop meets stop": (WINDOW_STOP, STOP, WINDOW_STOP),
        }
        for name, wishes in apart.items():
            yield _setup(f"{name}, {collectives}", program, (wishes,), timers=timers)
    rounds = (round_of(SAVE, 3, unable=[2]), round_of(STOP, 3))
    name = f"save that one rank cannot take, then stop{', timers' if timers else ''}"
    yield Setup(name, (training(2, "all", window=2),) * 3, rounds, timers)


def _exceptions() -> Iterator[Setup]:
    """Rank 0 leaves by an exception, without barrier; the others go on, stop, or reach the end."""
    whole = training(2, "none", close="leave", window=2)
    for boundaries in (1, 2, 3):
        programs = (raising(whole, boundaries), whole, whole)
        yield Setup(f"rank 0 raises in {boundaries}, stop", programs, (round_of(STOP, 3),))
    programs = (raising(whole, 2), whole, whole)
    rounds = (round_of(SAVE, 3), round_of(STOP, 3))
    yield Setup("rank 0 raises in 2, save, then stop", programs, rounds)

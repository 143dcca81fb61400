"""What the protocol is explored with: small setups for every run of the tests, larger ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.explorer.model import Rules, Setup
from tests.explorer.programs import SAVE, STOP, WINDOW_STOP, raising, round_of, training

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.explorer.model import Program, Request
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
            yield setup_of(f"{name}, all", training(3, "all", window=3), pair, timers=timers)
            if not timers:
                yield setup_of(f"{name}, none", training(3, "none", window=3), pair)
            else:
                short = training(2, "none", window=2)
                yield setup_of(f"{name}, none, 2 ranks", short, pair, size=2, timers=True)
    yield from _exceptions()


def larger() -> Iterator[Setup]:
    """More ranks, more rounds, longer programs: minutes."""
    for timers in (False, True):
        for name, pair in PAIRS.items():
            for collectives in COLLECTIVES:
                program = _usual(collectives)
                yield setup_of(f"{name}, {collectives}, evaluation", program, pair, timers=timers)
        four = training(3, "all", window=3)
        yield setup_of("4 ranks, stop", four, (STOP,), size=4, timers=timers)
        yield setup_of("4 ranks, save, then stop", four, (SAVE, STOP), size=4, timers=timers)
        three = (SAVE, WINDOW_STOP, STOP)
        yield setup_of("three rounds, all", _usual("all"), three, timers=timers)
        yield setup_of("three rounds, none", training(2, "none", window=2), three, timers=timers)
        unable = (round_of(SAVE, 3, unable=[2]), round_of(STOP, 3))
        name = f"save that one rank cannot take, then stop, none{', timers' if timers else ''}"
        yield Setup(name, (training(3, "none", window=3),) * 3, unable, timers)
        epochs = training(3, "ahead", epochs=2, window=3, evaluation="behind")
        yield setup_of("two epochs, save, then stop", epochs, (SAVE, STOP), timers=timers)


def setup_of(
    name: str,
    program: Program,
    requests: Sequence[Request | Sequence[Request | None]],
    *,
    size: int = 3,
    timers: bool = False,
    rules: Rules = REAL,
) -> Setup:
    """All ranks run the same; each of `requests` is a round."""
    rounds = tuple(round_of(request, size) for request in requests)
    timed = f"{name}, timers" if timers else name
    return Setup(timed, (program,) * size, rounds, timers, rules)


def _usual(collectives: Collectives) -> Program:
    return training(3, collectives, window=3, evaluation="behind")


def _one_round(*, timers: bool) -> Iterator[Setup]:
    """3 ranks, 3 micro-batches, an evaluation behind them, and one notice that any rank gets."""
    for collectives in COLLECTIVES:
        for name, request in (("stop", STOP), ("window stop", WINDOW_STOP), ("save", SAVE)):
            yield setup_of(f"{name}, {collectives}", _usual(collectives), (request,), timers=timers)


def _whole_lives(*, timers: bool) -> Iterator[Setup]:
    """Ends of epochs and evaluations of all kinds."""
    for evaluation in ("none", "behind", "unannounced", "inside"):
        for collectives in ("all", "none") if timers else COLLECTIVES:
            program = training(2, collectives, epochs=2, window=2, evaluation=evaluation)
            name = f"two epochs, evaluation {evaluation}, {collectives}"
            yield setup_of(name, program, (STOP,), timers=timers)
    program = training(3, "all", epochs=2, window=2, evaluation="behind")
    yield setup_of("epochs that end inside a window", program, (WINDOW_STOP,), timers=timers)


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
        for name, requests in apart.items():
            yield setup_of(f"{name}, {collectives}", program, (requests,), timers=timers)
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

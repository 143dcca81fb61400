"""Where a new pass over an IterableDataset with a state of its own begins, after a resume.

Datasets differ in that: one goes on where the last pass ended, another begins anew, a third has a
new order for each pass; and what is loaded may hold for one pass, or for all. Which kind a dataset
is cannot be read off its state. So it is tried:

    the pass had run out    Load its state and ask for a sample. None comes: that was the pass's
                            end once more. One comes: the next pass goes on from that state.
    it was left             Begin a pass, leave it, and look at the next one. The way back to there
                            is the one after which the same samples come, and the same state:
                            the state is loaded; or the dataset is put back to how it was made; or
                            the pass that was left is begun again, and left.

Some ten samples are loaded for that and not used. If no way is seen to lead there, the most likely
one is taken, with a warning. A dataset need not have a state before its first pass; where it had to
be put back to that one, the error says so.

Used by: sources.py; `load` by stateful.py.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Seen(NamedTuple):
    """How a pass began."""

    samples: list[Any]
    state: Any


def begin_next_pass(name: str, dataset: Any, ended: Any, *, exhausted: bool) -> None:
    """Bring a dataset to where it was between two passes; the main randomness stays as it is.

    Args:
        name: What messages call the loader.
        dataset: As it was made: the next `iter` of it begins the next pass.
        ended: Its state when the last pass had ended.
        exhausted: That pass had run out; else it was left in its middle.

    Raises:
        ConfigurationError: it has to be put back to how it was made, and had no state then.
    """
    before = main_rng()
    made = _as_made(dataset)
    begun, doubt = True, ""
    try:
        if exhausted:
            begun = _run_out(dataset, ended)
        elif not _left(dataset, ended, made):
            doubt = "no way that was tried leads to what a pass has after one that was left"
    except Exception as error:  # noqa: BLE001 - a dataset may raise anything
        load(dataset, ended)
        doubt = f"what a new pass has could not be tried: {type(error).__name__}: {error}"
    finally:
        set_main_rng(before)
    if not begun:
        _put_back(name, dataset, made)
    if doubt:
        warnings.warn(
            f"{name}: the place of {type(dataset).__qualname__} between two passes is inferred "
            f"({doubt}); data may differ from the uninterrupted run",
            stacklevel=5,
        )


def replay(name: str, iterator: Iterator[Any], batches: int) -> None:
    """Bring a dataset without a state of its own to where it was, nearly."""
    warnings.warn(
        f"{name}: loading and dropping {batches} batches to get back to the saved position; data "
        "may differ from the uninterrupted run",
        stacklevel=5,
    )
    for _ in range(batches):
        next(iterator)


def _as_made(dataset: Any) -> Any:
    """Its state before the first pass; None if it has none until then."""
    try:
        return copy.deepcopy(dataset.state_dict())
    except Exception:  # noqa: BLE001 - as above
        return None


def _put_back(name: str, dataset: Any, made: Any) -> None:
    if made is None:
        kind = type(dataset).__qualname__
        raise ConfigurationError(
            f"{name}: every pass over {kind} begins at the state that was loaded, here at a pass's "
            "end, so it was to be put back to its beginning; its state_dict() fails before the "
            "first pass, so that is not known",
            hint=f"let {kind} have its position from __init__ on, and resume again",
        )
    load(dataset, made)


def _run_out(dataset: Any, ended: Any) -> bool:
    """False: it would stay at its end for ever."""
    if _begin_and_leave(dataset, ended):
        load(dataset, ended)
        return True
    if not _draw(dataset, 1):
        return False
    _begin_and_leave(dataset, ended)
    return True


def _left(dataset: Any, ended: Any, made: Any) -> bool:
    """Whether what brought it there was seen to lead to the same samples and the same state."""
    rng = main_rng()
    _draw(dataset, 1)
    left = copy.deepcopy(dataset.state_dict())
    want = _look(dataset, rng)
    ways: list[Callable[[Any, Any], Any]] = [load, _begin_and_leave]
    if made is not None:
        ways.insert(1, lambda dataset, _: load(dataset, made))
    best, most = ways[-1], 0
    for way in ways:
        with suppress(Exception):  # a way that fails is none
            way(dataset, left)
            matches = _matches(_look(dataset, rng), want)
            if matches >= most:  # of two that are equally near the later one
                best, most = way, matches
        if most == _ALL:
            break
    best(dataset, ended)
    return most == _ALL


def _look(dataset: Any, rng: Any) -> Seen:
    """Begin a pass and leave it, always under the same main randomness."""
    set_main_rng(rng)
    samples = _draw(dataset, 2)
    return Seen(samples, copy.deepcopy(dataset.state_dict()))


_SAMPLES, _STATE, _ALL = 1, 2, 3


def _matches(seen: Seen, want: Seen) -> int:
    found = _SAMPLES if _equal(seen.samples, want.samples) else 0
    return found + (_STATE if _equal(seen.state, want.state) else 0)


def _begin_and_leave(dataset: Any, state: Any) -> list[Any]:
    load(dataset, state)
    return _draw(dataset, 1)


def _draw(dataset: Any, number: int) -> list[Any]:
    """Load so many samples with a new iterator; fewer come if it runs out."""
    iterator = iter(dataset)
    came = [_copied(sample) for _, sample in zip(range(number), iterator, strict=False)]
    if hasattr(iterator, "close"):  # what it does when it is left is done before another load
        iterator.close()
    return came


def _copied(sample: Any) -> Any:
    """The dataset may use its memory again; what cannot be copied is equal to nothing."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # noqa: BLE001 - as above
        return object()


def load(dataset: Any, state: Any) -> None:
    """Hand an object its own state, a copy."""
    dataset.load_state_dict(copy.deepcopy(state))  # it may go on to change what it is given


def _equal(one: Any, other: Any) -> bool:
    """As `_same`; what cannot be compared is not."""
    try:
        return _same(one, other)
    except Exception:  # noqa: BLE001 - as above
        return False


def _same(one: Any, other: Any) -> bool:
    """Whether two values hold the same, tensors and arrays to the last element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape"):
        return bool(one.shape == other.shape and (one == other).all())
    if is_dataclass(one):
        return _same(vars(one), vars(other))
    return bool(one == other)

"""Where a new pass over an IterableDataset with a state of its own begins, after a resume.

Datasets differ in that: one goes on where the last pass ended, another begins anew, a third has a
new order for each pass; and what is loaded may hold for one pass, or for all. Which kind a dataset
is cannot be read off its state. So the end of the last pass is repeated, and seen:

    the pass had run out    Load its state and ask for a sample. None comes: that was the pass's
                            end once more. One comes: the next pass goes on from that state.
    it was left             Two samples of one iterator, and one of each of two: if they leave
                            equal states, a pass goes on where the last one was. Else it begins
                            anew, once the pass that was left has been begun again and left.

A few samples are loaded for that and not used. A dataset whose every pass would begin at the state
that was loaded is put back to how it was made.

Used by: sources.py.
"""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

from trainckpt.data.randomness import main_rng, set_main_rng

if TYPE_CHECKING:
    from collections.abc import Iterator


def begin_next_pass(dataset: Any, ended: Any, *, exhausted: bool) -> None:
    """Bring a dataset to where it was between two passes; the main randomness stays as it is.

    Args:
        dataset: As it was made: the next `iter` of it begins the next pass.
        ended: Its state when the last pass had ended.
        exhausted: That pass had run out; else it was left in its middle.
    """
    before = main_rng()
    made = copy.deepcopy(dataset.state_dict())
    try:
        begun = _run_out(dataset, ended) if exhausted else _left(dataset, ended, made)
        if not begun:
            _load(dataset, made)
    finally:
        set_main_rng(before)


def replay(name: str, iterator: Iterator[Any], batches: int) -> None:
    """Bring a dataset without a state of its own to where it was, nearly."""
    warnings.warn(
        f"{name}: loading and dropping {batches} batches to get back to the saved position; data "
        "may differ from the uninterrupted run",
        stacklevel=5,
    )
    for _ in range(batches):
        next(iterator)


def _run_out(dataset: Any, ended: Any) -> bool:
    """False: it would stay at its end for ever."""
    if _draw(dataset, 1, ended):
        _load(dataset, ended)
        return True
    if not _draw(dataset, 1):
        return False
    _draw(dataset, 1, ended)
    return True


def _left(dataset: Any, ended: Any, made: Any) -> bool:
    """False: it begins every pass at its beginning, or would at what is loaded."""
    _draw(dataset, 2, made)
    by_one = copy.deepcopy(dataset.state_dict())
    _draw(dataset, 1, made)
    first = copy.deepcopy(dataset.state_dict())
    _draw(dataset, 1)
    by_two = copy.deepcopy(dataset.state_dict())
    if _same(by_one, by_two):
        _load(dataset, ended)
        return True
    if _same(first, by_two):
        return False
    _draw(dataset, 1, ended)
    return True


def _draw(dataset: Any, number: int, state: Any = None) -> int:
    """Load so many samples with a new iterator, from `state` if given; how many came."""
    if state is not None:
        _load(dataset, state)
    iterator = iter(dataset)
    came = sum(1 for _ in zip(range(number), iterator, strict=False))
    if hasattr(iterator, "close"):  # what it does when it is left is done before another load
        iterator.close()
    return came


def _load(dataset: Any, state: Any) -> None:
    dataset.load_state_dict(copy.deepcopy(state))  # it may go on to change what it is given


def _same(one: Any, other: Any) -> bool:
    """Whether two states hold the same, tensors and arrays to the last element."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape"):
        return bool(one.shape == other.shape and (one == other).all())
    return bool(one == other)

"""Streams with a state of their own, and where a new pass over one begins after a resume.

Datasets differ in that: one goes on where the last pass ended, another begins anew, a third has a
new order for each pass; and what is loaded may hold for one pass, or for all. Which kind a dataset
is cannot be read off its state. So it is tried, at the first pass that begins after a state was
loaded, whether in the pass before that one or between the two:

    the pass had run out    Load its state and ask for a sample. None comes: that was the pass's
                            end once more. One comes: the next pass goes on from that state. None
                            comes at the second try either: what is loaded sticks, and is undone.
    it was left             Undo what was loaded, begin a pass, leave it, and look at the next one.
                            The way back to there is the one after which the same samples come, and
                            the same state: the state is loaded; or what was loaded is undone; or
                            the state from before the first pass is loaded; or the pass that was
                            left is begun again, and left.

Some ten samples are loaded for that and not used. If no way is seen to lead there, the most likely
one is taken, with a warning. Undone is what `load_state_dict` assigned; where that does not help,
the state from before the first pass is loaded, if there was one.

Used by: sources.py, stateful.py.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data import own_random
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.exactness import Report


class Seen(NamedTuple):
    """How a pass began."""

    samples: list[Any]
    state: Any


class Stream:
    """An iterable with state_dict and load_state_dict.

    Args:
        name: What messages call its loader.
        target: The iterable, as the script made it.
        iterate: Begins a pass, where more than `iter(target)` is to be done.
        report: Told where the next pass begins, if that is inferred.
        generators: Reads, and puts back, the random generators that a pass draws from.
        asks: Ask for its state before its first pass; some begin a pass when they are asked.

    Attributes:
        last_end: Its state when the last pass ended, and whether that had run out; None: in none.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        report: Report,
        *,
        iterate: Callable[[], Iterator[Any]] | None = None,
        generators: tuple[Callable[[], Any], Callable[[Any], None]] = (main_rng, set_main_rng),
        asks: bool = True,
    ) -> None:
        self.name = name
        self.target = target
        self._report = report
        self._iterate = iterate or functools.partial(iter, target)
        self._read_rng, self._write_rng = generators
        self._asks = asks
        self._made: _AsMade | None = None
        self.last_end: list[Any] | None = None
        self._way: Callable[[], Any] = lambda: None  # leads to the pass that `begin_pass` begins
        self._resumed = False  # the running pass is one that a state was loaded in the middle of
        self._between: tuple[Any, bool] | None = None  # the last pass's end, and whether it ran out

    def begin_again(self, state: Any, last_end: list[Any] | None) -> None:
        """Let the next `iter` begin the pass again in which it had a state.

        Args:
            state: That one.
            last_end: What `last_end` was in that pass.
        """
        self._resumed, self.last_end = False, last_end
        if last_end is None:
            self._undo(state)
        else:
            self.resume_between(last_end[0], exhausted=last_end[1])
            self.begin_pass()

    @property
    def is_between(self) -> bool:
        """A resume leads to between two passes, and the next one has not begun."""
        return self._between is not None

    @property
    def ended_here(self) -> bool:
        """The pass before was resumed, and has ended in this process."""
        return self._resumed

    def stay(self) -> None:
        """Let the next pass begin as it does by itself."""
        self._resumed, self._between = False, None

    @property
    def state(self) -> Any:
        """Its own state; that of the last pass's end until the next one begins after a resume."""
        return self.target.state_dict() if self._between is None else self._between[0]

    def resume_pass(self, state: Any) -> None:
        """Let the next `iter` go on in the middle of a pass."""
        self._load(state)
        self._resumed, self._between = True, None

    def resume_between(self, state: Any, *, exhausted: bool) -> None:
        """Let `begin_pass` begin the pass after one that ended at this state.

        Args:
            state: Its own when the last pass had ended.
            exhausted: That pass had run out; else it was left in its middle.
        """
        self._resumed, self._between = False, (state, exhausted)
        self.last_end = [state, exhausted]

    def end_pass(self, *, exhausted: bool) -> None:
        """A pass is over: after one that was resumed, what was loaded may have to be undone."""
        if self._between is None and (self._asks or self._resumed):
            self.last_end = [copy.deepcopy(self.target.state_dict()), exhausted]
            self._between = (self.last_end[0], exhausted) if self._resumed else None

    def begin_pass(self) -> None:
        """Let the next `iter` begin a pass as in the uninterrupted run; keeps the randomness.

        Raises:
            ConfigurationError: it has to be put back to how it was made, and that is not known.
        """
        if self._between is None:
            return
        ended, exhausted = self._between
        self.stay()
        before, begun, doubt = self._read_rng(), True, ""
        try:
            if exhausted:
                begun = self._run_out(ended)
            elif not self._left(ended):
                doubt = "no way that was tried leads to what a pass has after one that was left"
        except Exception as error:  # noqa: BLE001 - a dataset may raise anything
            self._go(self._load, ended)
            doubt = f"what a new pass has could not be tried: {type(error).__name__}: {error}"
        finally:
            self._write_rng(before)
        if not begun:
            self._go(self._put_back, ended)
            self._write_rng(before)
        if doubt:
            why = (
                f"{self.name}: the place of {type(self.target).__qualname__} between two passes is "
                f"inferred ({doubt}); data may differ from the uninterrupted run"
            )
            self._report(Restored(self.name, How.INFERRED, why))

    def draws(self) -> tuple[Any, Any]:
        """Return the generators after the first sample of the pass that `begin_pass` led to.

        And those after the first sample of another pass, begun under the same randomness.
        """
        rng, found = self._read_rng(), []
        for _ in range(2):
            self._write_rng(rng)
            self._draw(1)
            found.append(self._read_rng())
        self._way()
        self._write_rng(rng)
        return found[0], found[1]

    def leave_last(self) -> None:
        """Go to the next pass by going on in the last one, and leaving that."""
        rng = self._read_rng()
        self._way()
        self._draw(1)
        self._write_rng(rng)

    def _go(self, way: Callable[[Any], Any], ended: Any) -> None:
        self._way = functools.partial(way, ended)
        self._way()

    def _load(self, state: Any) -> None:
        if self._made is None:
            self._made = _AsMade(self.target, asks=self._asks)
        with self._made.noting():
            load(self.target, state)

    def _put_back(self, ended: Any) -> None:
        """Undo as little of what a load assigns as lets a pass begin again."""
        made = self._undo(ended)
        for keys in [*([key] for key in made.assigned), made.assigned, made.all]:
            self._load(ended)
            made.put_back(keys)
            if self._draw(1):
                self._load(ended)
                made.put_back(keys)
                return
        if made.state is None:
            kind = type(self.target).__qualname__
            raise ConfigurationError(
                f"{self.name}: every pass over {kind} begins at the state that was loaded, here at "
                "a pass's end, so it was to be put back to its beginning; its state from before "
                "the first pass is not known",
                hint=f"let {kind} have its position from __init__ on, and resume again",
            )
        self._load(made.state)

    def _undo(self, ended: Any) -> _AsMade:
        """Put back what loading a state assigns."""
        self._load(ended)
        assert self._made is not None
        self._made.put_back(self._made.assigned)
        return self._made

    def _run_out(self, ended: Any) -> bool:
        """False: it would stay at its end for ever."""
        if self._begin_and_leave(ended):
            self._go(self._load, ended)
            return True
        if not self._draw(1):
            return False
        self._go(self._begin_and_leave, ended)
        return True

    def _left(self, ended: Any) -> bool:
        """Return True if the way there was seen to lead to the same samples and state."""
        made, rng = self._undo(ended), self._read_rng()
        self._draw(1)
        left = copy.deepcopy(self.target.state_dict())
        want = self._look(rng)
        ways: list[Callable[[Any], Any]] = [self._load, self._undo, self._begin_and_leave]
        if made.state is not None:
            ways.insert(1, lambda _: self._load(made.state))
        best, most = ways[-1], 0
        for way in ways:
            with suppress(Exception):  # a way that fails is none
                way(left)
                matches = _matches(self._look(rng), want)
                if matches >= most:  # of two that are equally near the later one
                    best, most = way, matches
            if most == _ALL:
                break
        self._go(best, ended)
        return most == _ALL

    def _look(self, rng: Any) -> Seen:
        """Begin a pass and leave it, always under the same randomness."""
        self._write_rng(rng)
        samples = self._draw(2)
        return Seen(samples, copy.deepcopy(self.target.state_dict()))

    def _begin_and_leave(self, state: Any) -> list[Any]:
        self._load(state)
        return self._draw(1)

    def _draw(self, number: int) -> list[Any]:
        """Load so many samples with a new iterator; fewer come if it runs out."""
        iterator = self._iterate()
        came = [_copied(sample) for _, sample in zip(range(number), iterator, strict=False)]
        if hasattr(iterator, "close"):  # what it does when it is left is done before another load
            iterator.close()
        return came


class _AsMade:
    """An object before a state was first loaded into it.

    Attributes:
        state: Its own then; None if it has none until its first pass.
    """

    def __init__(self, target: Any, *, asks: bool) -> None:
        self.state = _state_of(target) if asks else None
        # Attributes of it and of each object it holds, and those as made; keys are (number, name).
        self._held = [(names, dict(names)) for names in own_random.namespaces(target)]
        self._assigned: dict[tuple[int, str], None] = {}

    @property
    def assigned(self) -> list[tuple[int, str]]:
        """Keys of the attributes that loads have assigned, in order."""
        return list(self._assigned)

    @property
    def all(self) -> list[tuple[int, str]]:
        """Keys of all, those that passes assign included."""
        held = enumerate(self._held)
        return [(at, name) for at, (names, made) in held for name in {**made, **names}]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what load_state_dict assigns."""
        before = [dict(names) for names, _ in self._held]
        yield
        for at, (old, (names, _)) in enumerate(zip(before, self._held, strict=True)):
            for name in names:
                if old.get(name, self) is not names[name]:
                    self._assigned[at, name] = None

    def put_back(self, keys: list[tuple[int, str]]) -> None:
        """Put these attributes back to how they were made."""
        for at, name in keys:
            names, made = self._held[at]
            names.pop(name, None)
            names.update({name: made[name]} if name in made else {})


def _state_of(target: Any) -> Any:
    """Its state before the first pass; None if it has none until then."""
    try:
        return copy.deepcopy(target.state_dict())
    except Exception:  # noqa: BLE001 - as above
        return None


_SAMPLES, _STATE, _ALL = 1, 2, 3


def _matches(seen: Seen, want: Seen) -> int:
    found = _SAMPLES if _equal(seen.samples, want.samples) else 0
    return found + (_STATE if _equal(seen.state, want.state) else 0)


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

"""Resume streams with a state of their own, and begin the next pass after a resume.

Datasets differ in the next pass: one resumes at the end of the last pass, another begins anew, a
third has a new order for each pass; and a loaded state may hold for one pass, or for all. A state
does not show its dataset's kind. So the kind is found by trial, at the first pass that begins after
a load, no matter whether the state was inside the pass before or between the two:

    the pass had run out    Load its state and ask for a sample. No sample: this was the end of the
                            pass once more. A sample: the next pass begins at that state. No sample
                            at the second try either: the loaded state sticks, and is undone.
    it was left             Undo the load, begin a pass, leave it, and inspect the next one. The
                            right way back there leads to the same samples and the same state. The
                            ways: load the state; or undo the load; or load the state from before
                            the first pass; or begin the abandoned pass again, and leave it.

A trial loads some ten samples and drops them. If no way is seen to lead there, the most likely one
is taken, with a warning. An undo puts back the attributes assigned by `load_state_dict`. If that
does not help, the state from before the first pass is loaded, if there was one.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data import randomness
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.errors import ConfigurationError
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.exactness import Report


class SeenSamples(NamedTuple):
    """The first samples of a pass, and the dataset's state after them."""

    samples: list[Any]
    state: Any


class StatefulStream:
    """An iterable with state_dict and load_state_dict.

    Args:
        name: Its loader's name in messages.
        target: The iterable, as made by the script.
        iterate: Begins a pass, if that takes more than `iter(target)`.
        report: Called if the beginning of the next pass is inferred.
        generators: Reads, and restores, the random generators that a pass draws from.
        asks: Ask for its state before its first pass; some iterables begin a pass when asked.

    Attributes:
        last_end: Its state at the end of the last pass, and True if that ran out; None: no pass.
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
        self._asks_before_first_pass = asks
        self._as_made: _AsMade | None = None
        self.last_end: list[Any] | None = None
        # leads to the pass prepared by `begin_pass`
        self._path_to_pass: Callable[[], Any] = lambda: None
        self._resumed = False  # a state was loaded in the middle of the running pass
        self._between: tuple[Any, bool] | None = None  # the last pass's end; True if it ran out

    def ways_to_restart(self, state: Any, last_end: list[Any] | None) -> list[Callable[[], None]]:
        """Return functions that let the next `iter` begin the running pass again, the best first.

        Args:
            state: A state inside that pass.
            last_end: Value of `last_end` in that pass.
        """
        if last_end is not None:
            return [functools.partial(self._restart_after, last_end)]
        return [functools.partial(self._restart_first, state, way) for way in ("undo", "as made")]

    def _restart_after(self, last_end: list[Any]) -> None:
        self.resume_between(last_end[0], exhausted=last_end[1])
        self.begin_pass()

    def _restart_first(self, state: Any, way: str) -> None:
        self.clear_resume()
        self.last_end = None
        made = self._undo_load(state)
        if way == "as made" and made.state is not None:
            self._load(made.state)

    @property
    def is_between(self) -> bool:
        """True after a resume to between two passes, until the next one begins."""
        return self._between is not None

    @property
    def ended_in_this_process(self) -> bool:
        """True if the pass before was resumed, and has ended in this process."""
        return self._resumed

    def clear_resume(self) -> None:
        """Let the next pass begin as it does by itself."""
        self._resumed, self._between = False, None

    @property
    def state(self) -> Any:
        """Its own state; after a resume, that of the last pass's end until the next one begins."""
        return self.target.state_dict() if self._between is None else self._between[0]

    def resume_pass(self, state: Any) -> None:
        """Let the next `iter` resume in the middle of a pass."""
        self._load(state)
        self._resumed, self._between = True, None

    def resume_between(self, state: Any, *, exhausted: bool) -> None:
        """Let `begin_pass` begin the pass after one that ended at this state.

        Args:
            state: Its own state at the end of the last pass.
            exhausted: That pass had run out; otherwise it was left in its middle.
        """
        self._resumed, self._between = False, (state, exhausted)
        self.last_end = [state, exhausted]

    def end_pass(self, *, exhausted: bool) -> None:
        """End a pass. After a resumed one, the loaded state may have to be undone."""
        if self._between is None and (self._asks_before_first_pass or self._resumed):
            self.last_end = [copy.deepcopy(self.target.state_dict()), exhausted]
            self._between = (self.last_end[0], exhausted) if self._resumed else None

    def begin_pass(self) -> None:
        """Prepare the next pass as in the uninterrupted run; leave the randomness as it is.

        Raises:
            ConfigurationError: The state from before the first pass is needed, and unknown.
        """
        if self._between is None:
            return
        ended, exhausted = self._between
        self.clear_resume()
        saved_rng, begun, doubt = self._read_rng(), True, ""
        try:
            if exhausted:
                begun = self._find_path_after_end(ended)
            elif not self._find_path_after_leaving(ended):
                doubt = "no way that was tried leads to what a pass has after one that was left"
        except Exception as error:  # noqa: BLE001 - a dataset may raise anything
            self._apply_path(self._load, ended)
            doubt = f"what a new pass has could not be tried: {type(error).__name__}: {error}"
        finally:
            self._write_rng(saved_rng)
        if not begun:
            self._apply_path(self._reset, ended)
            self._write_rng(saved_rng)
        if doubt:
            reason = (
                f"{self.name}: the place of {type(self.target).__qualname__} between two passes is "
                f"inferred ({doubt}); data may differ from the uninterrupted run"
            )
            self._report(Restored(self.name, How.INFERRED, reason))

    def sample_generators(self) -> tuple[Any, Any]:
        """Return the generators after the first sample of the pass prepared by `begin_pass`.

        The second value: the same for another pass, begun under the same randomness.
        """
        rng, states = self._read_rng(), []
        for _ in range(2):
            self._write_rng(rng)
            self._draw(1)
            states.append(self._read_rng())
        self._path_to_pass()
        self._write_rng(rng)
        return states[0], states[1]

    def leave_previous_pass(self) -> None:
        """Go to the next pass by resuming the last one and leaving it."""
        rng = self._read_rng()
        self._path_to_pass()
        self._draw(1)
        self._write_rng(rng)

    def _apply_path(self, way: Callable[[Any], Any], ended: Any) -> None:
        self._path_to_pass = functools.partial(way, ended)
        self._path_to_pass()

    def _load(self, state: Any) -> None:
        if self._as_made is None:
            self._as_made = _AsMade(self.target, asks=self._asks_before_first_pass)
        with self._as_made.record_assignments():
            load(self.target, state)

    def _reset(self, ended: Any) -> None:
        """Undo as little of a load's assignments as lets a pass begin again."""
        made = self._undo_load(ended)
        for keys in [*([key] for key in made.assigned), made.assigned, made.all_keys]:
            self._load(ended)
            made.restore(keys)
            if self._draw(1):
                self._load(ended)
                made.restore(keys)
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

    def _undo_load(self, ended: Any) -> _AsMade:
        """Undo the assignments of a load."""
        self._load(ended)
        assert self._as_made is not None
        self._as_made.restore(self._as_made.assigned)
        return self._as_made

    def _find_path_after_end(self, ended: Any) -> bool:
        """Return False if the iterable would stay at its end for ever."""
        if self._begin_and_leave(ended):
            self._apply_path(self._load, ended)
            return True
        if not self._draw(1):
            return False
        self._apply_path(self._begin_and_leave, ended)
        return True

    def _find_path_after_leaving(self, ended: Any) -> bool:
        """Return True if a way was seen to lead to the same samples and state."""
        made, rng = self._undo_load(ended), self._read_rng()
        self._draw(1)
        left = copy.deepcopy(self.target.state_dict())
        expected = self._sample_pass(rng)
        ways: list[Callable[[Any], Any]] = [self._load, self._undo_load, self._begin_and_leave]
        if made.state is not None:
            ways.insert(1, lambda _: self._load(made.state))
        best, best_score = ways[-1], 0
        for way in ways:
            with suppress(Exception):  # a failing way does not count
                way(left)
                score = _score(self._sample_pass(rng), expected)
                if score >= best_score:  # of two equally good ways, the later one
                    best, best_score = way, score
            if best_score == _ALL:
                break
        self._apply_path(best, ended)
        return best_score == _ALL

    def _sample_pass(self, rng: Any) -> SeenSamples:
        """Begin a pass under fixed randomness and leave it."""
        self._write_rng(rng)
        samples = self._draw(2)
        return SeenSamples(samples, copy.deepcopy(self.target.state_dict()))

    def _begin_and_leave(self, state: Any) -> list[Any]:
        self._load(state)
        return self._draw(1)

    def _draw(self, count: int) -> list[Any]:
        """Return this many samples from a new iterator; fewer if it runs out."""
        iterator = self._iterate()
        samples = [_copy_sample(sample) for _, sample in zip(range(count), iterator, strict=False)]
        if hasattr(iterator, "close"):  # run its cleanup before another load
            iterator.close()
        return samples


class _AsMade:
    """Attributes of an iterable before a state was first loaded into it.

    Attributes:
        state: Its own state at that time; None if it has none until its first pass.
    """

    def __init__(self, target: Any, *, asks: bool) -> None:
        self.state = _initial_state(target) if asks else None
        # Live attributes of the target and of each object inside, and a copy as made; keys are
        # (number, name).
        self._namespaces = [(names, dict(names)) for names in randomness.namespaces(target)]
        self._assigned: dict[tuple[int, str], None] = {}

    @property
    def assigned(self) -> list[tuple[int, str]]:
        """Keys of the attributes assigned by loads, in order."""
        return list(self._assigned)

    @property
    def all_keys(self) -> list[tuple[int, str]]:
        """Keys of all attributes, including those assigned by passes."""
        held = enumerate(self._namespaces)
        return [(at, name) for at, (names, made) in held for name in {**made, **names}]

    @contextmanager
    def record_assignments(self) -> Iterator[None]:
        """Record the attributes assigned by load_state_dict."""
        before = [dict(names) for names, _ in self._namespaces]
        yield
        for at, (old, (names, _)) in enumerate(zip(before, self._namespaces, strict=True)):
            for name in names:
                if old.get(name, self) is not names[name]:
                    self._assigned[at, name] = None

    def restore(self, keys: list[tuple[int, str]]) -> None:
        """Restore these attributes to their values as made."""
        for at, name in keys:
            names, made = self._namespaces[at]
            names.pop(name, None)
            names.update({name: made[name]} if name in made else {})


def _initial_state(target: Any) -> Any:
    """Return the state before the first pass; None if there is none until then."""
    try:
        return copy.deepcopy(target.state_dict())
    except Exception:  # noqa: BLE001 - as above
        return None


_SAMPLES, _STATE, _ALL = 1, 2, 3


def _score(seen: SeenSamples, expected: SeenSamples) -> int:
    score = _SAMPLES if are_equal(seen.samples, expected.samples) else 0
    return score + (_STATE if are_equal(seen.state, expected.state) else 0)


def _copy_sample(sample: Any) -> Any:
    """Return a copy: the dataset may use its memory again. An uncopyable sample equals nothing."""
    try:
        return copy.deepcopy(sample)
    except Exception:  # noqa: BLE001 - as above
        return object()


def load(dataset: Any, state: Any) -> None:
    """Load a copy of the state into the iterable."""
    dataset.load_state_dict(copy.deepcopy(state))  # the iterable may modify its argument later


def are_equal(one: Any, other: Any) -> bool:
    """Return True if two values are equal, tensors to the last element; False if incomparable."""
    try:
        return _same(one, other)
    except Exception:  # noqa: BLE001 - as above
        return False


def _same(one: Any, other: Any) -> bool:
    """Return True if two values are equal, tensors and arrays to the last element."""
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

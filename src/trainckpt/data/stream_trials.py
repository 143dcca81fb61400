"""Resume a stream by its own state, and check that it leads to the batches returned since.

A state may lack a part of the stream (a shuffle buffer, say), and does not show it. So every few
batches the state is recorded, with the inputs to repeat what came after it: a trial. A resume has
three ways, the best first:

    near a pass's start    the first batches are loaded again, and the stream's state after them is
                           compared with the saved one
    later                  the trial: the state of some batches before is loaded, and the batches
                           since are loaded again and compared
    if that fails          the whole pass is loaded again, and compared by `LoaderSource.replay`
"""

from __future__ import annotations

import copy
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.data.carried_state import DataState
from trainckpt.data.iterable import are_equal
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.randomness import main_rng, set_main_rng
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainckpt.data.iterable import StatefulStream
    from trainckpt.data.sources import LoaderSource
    from trainckpt.format.exactness import Report


_INTERVAL = 8  # batches after which a stream's state is recorded
TRIAL_BATCHES = 4  # fewer may come from a wrong state by chance


class Trial(NamedTuple):
    """A stream's own state some batches ago, with the inputs to test it.

    Attributes:
        at: Batches consumed at that time.
        rngs: The main randomness before each fetch since.
    """

    at: int
    own: Any
    data: dict[str, bytes]
    carried: dict[str, Any]
    rngs: list[dict[str, Any]]

    @classmethod
    def loaded(cls, saved: dict[str, Any]) -> Trial:
        """Return the trial from a result of `StreamTrials.newest`."""
        return cls(**{name: saved[name] for name in cls._fields})._replace(rngs=[*saved["rngs"]])


class StreamTrials:
    """The trials of one stream. A resume makes iterators through the loader's source."""

    def __init__(
        self, stream: StatefulStream, source: LoaderSource, name: str, report: Report
    ) -> None:
        self._stream = stream
        self._source = source
        self._name = name
        self._report = report
        self._trials: list[Trial] = []  # the newest, and the one before
        self._is_running = False

    def clear(self) -> None:
        """Forget the trials, as a pass begins or ends."""
        self._trials = []

    def record_fetch(self) -> None:
        """Record the inputs of the next fetch, before it."""
        if self._is_running:
            return
        position = self._source.progress.position
        if position % _INTERVAL == 1:
            own = copy.deepcopy(self._stream.state)
            new = Trial(position, own, *self._source.capture_data(), [])
            self._trials = [*self._trials[-1:], new]
        rng = main_rng()
        for trial in self._trials:
            trial.rngs.append(rng)

    def newest(self) -> dict[str, Any] | None:
        """Return the newest trial with enough batches after it, else the oldest."""
        progress = self._source.progress
        for trial in reversed(self._trials):
            count = progress.position - trial.at
            if count >= TRIAL_BATCHES or trial is self._trials[0]:
                digests = progress.digests
                since = itertools.islice(digests, len(digests) - count, None)
                return {**trial._asdict(), "rngs": list(trial.rngs), "since": _folded(since)}
        return None

    def resume(self, saved: dict[str, Any]) -> Any:
        """Return the iterator at the position of a saved state of the source."""
        stream, trial, last_end = self._stream, saved.get("trial"), saved.get("last end")
        kind, iterator = type(stream.target).__qualname__, None
        is_near_start = saved["position"] <= TRIAL_BATCHES
        if is_near_start:
            iterator = self._load_first_again(saved)
        if iterator is None and trial is not None:
            iterator = self._try_state(trial, saved["position"])
        if iterator is None and is_near_start:
            reason = (
                f"{self._name}: the position of {kind} is inferred: its state was taken after "
                f"{saved['batches']} batches, and a new pass begins with others, so nothing tells "
                "whether the state leads on; data may differ from the uninterrupted run"
            )
            self._report(Restored(self._name, How.INFERRED, reason))
        if iterator is None and (is_near_start or trial is None):
            # without a trial: an older version saved it, or the pass could not be loaded again
            iterator = self._load_state(saved)
        if iterator is not None:
            stream.last_end = last_end
            return iterator
        reason = (
            f"{self._name}: the state of {kind} does not lead to the samples that came after it (a "
            f"shuffle buffer is not in it, say): {saved['batches']} batches are loaded again"
        )
        self._report(Restored(self._name, How.REPLAYED, reason))
        stream.ways_to_restart(saved["own"], last_end)[0]()
        self._source.rewind_all()
        iterator = self._source.open_iterator(skip=0)
        self._source.replay(iterator, saved)
        return iterator

    def _load_state(self, saved: dict[str, Any]) -> Any:
        """Return the iterator that the stream's own state leads to."""
        self._source.rewind_all()
        self._stream.resume_pass(saved["own"])
        iterator = self._source.open_iterator(skip=0)
        self._source.restore_data(DataState.saved_as(saved, "now"))
        return iterator

    def _load_first_again(self, saved: dict[str, Any]) -> Any:
        """Return the iterator after the few consumed batches, loaded again; None if others come."""
        stream, way = self._stream, None
        for restart in stream.ways_to_restart(saved["own"], saved.get("last end")):
            iterator = self._load_again(restart, saved)
            if iterator is not None and are_equal(stream.state, saved["own"]):
                return iterator
            way = way or (restart if iterator is not None else None)
        iterator = None if way is None else self._load_again(way, saved)
        if iterator is None:
            self._restart_progress()
            return None
        reason = (
            f"{self._name}: {saved['batches']} batches are loaded again, and the state of "
            f"{type(stream.target).__qualname__} after them is not the saved one"
        )
        self._report(Restored(self._name, How.REPLAYED, reason))
        return iterator

    def _load_again(self, restart: Callable[[], None], saved: dict[str, Any]) -> Any:
        """Return the iterator at the saved position, or None if other batches came on the way."""
        rngs = [] if saved.get("trial") is None else saved["trial"]["rngs"]
        self._restart_progress()
        with suppress(Exception):  # a dataset may raise anything
            restart()
            self._source.rewind_all()
            iterator = self._source.open_iterator(skip=0)
            for number in range(saved["batches"]):
                if number and rngs:
                    set_main_rng(rngs[number - 1])
                next(iterator)
            if self._source.progress.batches_digest == saved.get("passed"):
                return iterator
        return None

    def _try_state(self, trial: dict[str, Any], position: int) -> Any:
        """Return the iterator at a position if the earlier state leads there, else None."""
        source, self._is_running = self._source, True
        try:
            self._stream.resume_pass(trial["own"])
            iterator = source.open_iterator(skip=0)
            source.restore_data(DataState(trial["data"], trial["carried"]))
            for _, rng in zip(range(trial["at"], position), trial["rngs"], strict=True):
                set_main_rng(rng)
                next(iterator)
        except Exception:  # noqa: BLE001 - a dataset may raise anything
            iterator = None
        finally:
            self._is_running = False
        if iterator is not None and _folded(source.progress.digests) == trial["since"]:
            self._trials = [Trial.loaded(trial)]
            return iterator
        source.restart_progress()
        return None

    def _restart_progress(self) -> None:
        self.clear()
        self._source.restart_progress()


def _folded(digests: Iterable[bytes]) -> bytes:
    folded = b""
    for digest in digests:
        folded = fingerprint(digest, folded)
    return folded

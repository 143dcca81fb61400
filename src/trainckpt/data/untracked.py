"""Watch the DataLoaders that the script does not track.

Their workers are shielded from signals like those of tracked loaders. Their iterators are known, so
that a save can record which of them the script is in the middle of: no resume goes on there.
"""

from __future__ import annotations

import functools
import os
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset
from torch.utils.data import dataloader as torch_loader

from trainckpt.data.iterators import InProcessIterator, WorkersIterator, has_run_out
from trainckpt.data.sampler import length
from trainckpt.data.worker import kill_on_shutdown, kill_workers, signals_blocked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.data import DataLoader

_Base: Any = torch_loader._BaseDataLoaderIter
_Multi: Any = torch_loader._MultiProcessingDataLoaderIter
_TRACKED = (InProcessIterator, WorkersIterator)


_start_callbacks: list[weakref.WeakMethod[Callable[[DataLoader[Any]], None]]] = []


def on_workers_started(callback: Callable[[DataLoader[Any]], None]) -> None:
    """Call this method with each loader whose workers have started, while its object lives."""
    _start_callbacks[:] = [reference for reference in _start_callbacks if reference() is not None]
    _start_callbacks.append(weakref.WeakMethod(callback))


def shield_all_loaders() -> None:
    """Patch torch so that iterators are known, and workers of untracked loaders start shielded too.

    A signal to the process group would kill a validation loader's workers, and with them the
    emergency save. Signals blocked in the creating thread stay blocked in its workers.
    """
    if hasattr(_Multi, "_shields"):
        return
    original_init = _Multi.__init__
    original_birth = _Base.__init__

    @functools.wraps(original_birth)
    def known_birth(iterator: Any, loader: DataLoader[Any]) -> None:
        original_birth(iterator, loader)
        if not _reading:
            note_iterator(iterator)

    @functools.wraps(original_init)
    def shielded_birth(iterator: Any, loader: DataLoader[Any]) -> None:
        if isinstance(iterator, _TRACKED):
            original_init(iterator, loader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing
        with signals_blocked(context.get_start_method()):
            original_init(iterator, loader)
        kill_on_shutdown(iterator)
        for reference in _start_callbacks:
            if (callback := reference()) is not None:
                callback(loader)

    _Base.__init__, _Multi.__init__ = known_birth, shielded_birth
    _Multi._shields = True
    shield_shutdown(_Multi)


def shield_shutdown(kind: Any) -> None:
    """Patch a class of iterators so that it bears workers that have been killed already.

    The garbage collector kills the workers first, then finalizes the iterator. Torchdata's and
    litdata's classes have their own shut-down, in place of torch's.
    """
    original = vars(kind).get("_shutdown_workers")
    if original is None or hasattr(original, "shields"):
        return

    @functools.wraps(original)
    def end_unless_killed(iterator: Any) -> None:
        workers = getattr(iterator, "_workers", ())
        are_own = all(worker._parent_pid == os.getpid() for worker in workers)
        if workers and are_own and not any(worker.is_alive() for worker in workers):
            kill_workers(iterator)
        else:
            original(iterator)

    end_unless_killed.shields = True  # type: ignore[attr-defined]
    kind._shutdown_workers = end_unless_killed


# ---- the iterators that a script is in the middle of


_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_reading: list[None] = []  # one item for each tracked loader that is being read


@contextmanager
def of_tracked_loader() -> Iterator[None]:
    """Return a context in which new iterators belong to a tracked loader, such as torchdata's."""
    _reading.append(None)
    try:
        yield
    finally:
        _reading.pop()


def open_iterators() -> Iterator[tuple[Any, str, int]]:
    """Yield each untracked iterator that is partly read: itself, its data, the batches read.

    Iterators that a DataLoader keeps with its persistent workers are left out: a pass that was
    left early, and one that goes on, look the same.
    """
    for iterator in list(_iterators):
        batches = iterator._num_yielded
        if batches and not iterator._persistent_workers and not _has_ended(iterator, batches):
            dataset = iterator._dataset
            size = length(dataset)
            of = "" if size is None else f" of {size} samples"
            yield iterator, f"{type(dataset).__qualname__}{of}", batches


def _has_ended(iterator: Any, batches: int) -> bool:
    if isinstance(iterator._dataset, IterableDataset):
        return has_run_out(iterator) or not any(getattr(iterator, "_workers_status", [True]))
    count = length(iterator)
    return count is not None and batches >= count


def note_iterator(value: object) -> None:
    """Note an untracked iterator that was made before the first Checkpointer; ignore others."""
    if isinstance(value, _Base) and not isinstance(value, _TRACKED):
        _iterators.add(value)

"""Start the workers of untracked loaders shielded from signals, and notify listeners."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader as torch_loader

from trainckpt.data.iterators import WorkersIterator
from trainckpt.data.worker_signals import kill_on_shutdown, kill_workers, signals_blocked

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

_Multi = torch_loader._MultiProcessingDataLoaderIter
_listeners: list[weakref.WeakMethod[Callable[[DataLoader[Any]], None]]] = []


def on_workers_started(listener: Callable[[DataLoader[Any]], None]) -> None:
    """Call this method with each loader whose workers have started, while its object lives."""
    _listeners[:] = [known for known in _listeners if known() is not None]
    _listeners.append(weakref.WeakMethod(listener))


def shield_all_loaders() -> None:
    """Patch torch so that workers of untracked loaders start shielded too.

    A signal to the process group would kill a validation loader's workers, and with them the
    emergency save. Signals blocked in the creating thread stay blocked in its workers.
    """
    original_init: Any = _Multi.__init__
    if getattr(original_init, "_shields", False):
        return

    @functools.wraps(original_init)
    def shielded_birth(iterator: Any, loader: DataLoader[Any]) -> None:
        if isinstance(iterator, WorkersIterator):
            original_init(iterator, loader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing
        with signals_blocked(context.get_start_method()):
            original_init(iterator, loader)
        kill_on_shutdown(iterator)
        for known in _listeners:
            if (listener := known()) is not None:
                listener(loader)

    marked: Any = shielded_birth
    marked._shields = True
    _Multi.__init__ = marked  # type: ignore[method-assign]
    original_shutdown: Any = _Multi._shutdown_workers

    @functools.wraps(original_shutdown)
    def end_unless_killed(iterator: Any) -> None:
        # the garbage collector kills the workers first, then finalizes the iterator
        workers = getattr(iterator, "_workers", ())
        are_own = all(worker._parent_pid == os.getpid() for worker in workers)
        if workers and are_own and not any(worker.is_alive() for worker in workers):
            kill_workers(iterator)
        else:
            original_shutdown(iterator)

    ends: Any = end_unless_killed
    _Multi._shutdown_workers = ends  # type: ignore[method-assign]

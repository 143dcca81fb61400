"""Loaders that nobody tracks: their workers are born shielded, and whoever wants to hears of them.

Used by: the lifecycle.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader as torch_loader

from trainckpt.data.iterators import WorkersIterator
from trainckpt.data.shield import adopt, kill_workers, shielded

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

_Multi = torch_loader._MultiProcessingDataLoaderIter
_listeners: list[weakref.WeakMethod[Callable[[DataLoader[Any]], None]]] = []


def hear_of_births(listener: Callable[[DataLoader[Any]], None]) -> None:
    """Call this method, as long as its object lives, with each loader whose workers were born."""
    _listeners[:] = [known for known in _listeners if known() is not None]
    _listeners.append(weakref.WeakMethod(listener))


def shield_every_loader() -> None:
    """From now on, workers of loaders that nobody tracks are born shielded too.

    A validation loader's workers die of a signal to the process group like any others, and take
    the emergency save with them. They keep the signals blocked that their creator had blocked.
    """
    born: Any = _Multi.__init__
    if getattr(born, "_shields", False):
        return

    @functools.wraps(born)
    def shielded_birth(iterator: Any, loader: DataLoader[Any]) -> None:
        if isinstance(iterator, WorkersIterator):
            born(iterator, loader)
            return
        context = loader.multiprocessing_context or torch.multiprocessing
        with shielded(context.get_start_method()):
            born(iterator, loader)
        adopt(iterator)
        for known in _listeners:
            if (listener := known()) is not None:
                listener(loader)

    marked: Any = shielded_birth
    marked._shields = True
    _Multi.__init__ = marked  # type: ignore[method-assign]
    end: Any = _Multi._shutdown_workers

    @functools.wraps(end)
    def end_unless_killed(iterator: Any) -> None:
        # the collector of cycles kills the workers first, and then has the iterator end them
        workers = getattr(iterator, "_workers", ())
        mine = all(worker._parent_pid == os.getpid() for worker in workers)
        if workers and mine and not any(worker.is_alive() for worker in workers):
            kill_workers(iterator)
        else:
            end(iterator)

    ends: Any = end_unless_killed
    _Multi._shutdown_workers = ends  # type: ignore[method-assign]

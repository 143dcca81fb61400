"""Keep the job's signals from killing DataLoader workers, and still end workers on time.

torchrun and schedulers signal the whole process group. Unshielded workers die of it, and with them
the save requested by the signal. The order of events:

    parent   block the signals in this thread          they wait; none is lost
    worker   starts with them blocked (masks survive fork and exec)
    parent   unblock: signals that arrived meanwhile are delivered now, once
    worker   `shield_worker`: ignore them, forget the parent's wakeup fd, unblock, watch the parent

Alternatives: ignoring the signals in the parent while workers are made would lose signals; a
worker_init_fn alone would leave the milliseconds before it runs.

For spawn and forkserver, multiprocessing's resource tracker must run first: starting it unblocks
SIGTERM and SIGINT in the parent. It and the fork server start under the mask as well; the loss
of the fork server would end its workers. (A fork server started earlier by other code is not
protected. Processes that it starts later have the signals blocked, and must unblock them.)

A shielded worker ignores `terminate()`. So `adopt` makes torch's own shut-down end with SIGKILL,
and kills the remaining workers before multiprocessing joins its children at exit: that join would
never return.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch._C import _remove_worker_pids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.process import BaseProcess

_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_CAN_MASK = hasattr(signal, "pthread_sigmask")
_ORPHAN_CHECK_SECONDS = 2.0
_REAP_SECONDS = 5.0


@contextmanager
def signals_blocked(start_method: str | None = None) -> Iterator[None]:
    """Block the job's signals in this thread while worker processes are created.

    Args:
        start_method: "fork", "spawn" or "forkserver"; None means multiprocessing's default.
    """
    if not _CAN_MASK:
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if (start_method or multiprocessing.get_start_method()) != "fork":
            _ensure_resource_tracker()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # starting it unblocked two of them
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def shield_worker() -> None:
    """In a worker, before any user code: ignore the job's signals, and exit if orphaned."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)  # a forked worker would write into the parent's pipe
    if _CAN_MASK:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_exit_when_orphaned, args=(os.getppid(),), daemon=True).start()


def kill_on_shutdown(iterator: Any) -> None:
    """Make torch's shut-down of these workers end with SIGKILL, also at process exit."""
    workers: Sequence[BaseProcess] = getattr(iterator, "_workers", ())
    for worker in workers:
        # weak: a cycle would keep the worker's pipes open until the next garbage collection
        worker.terminate = functools.partial(_kill, weakref.ref(worker))  # type: ignore[method-assign]
    if workers:
        multiprocessing.util.Finalize(
            iterator, _kill_at_exit, args=(list(workers), id(iterator)), exitpriority=100
        )


def kill_workers(iterator: Any) -> None:
    """Kill and reap every worker of this iterator now. The iterator is unusable afterwards."""
    workers: Sequence[BaseProcess] = getattr(iterator, "_workers", ())
    if not workers:
        return
    iterator._shutdown = True  # torch's own shut-down would wait on queues that are now broken
    if getattr(iterator, "_worker_pids_set", False):
        iterator._worker_pids_set = False
        _forget_pids(id(iterator))
    if hasattr(iterator, "_pin_memory_thread_done_event"):
        iterator._pin_memory_thread_done_event.set()
    for queue in (*iterator._index_queues, iterator._worker_result_queue):
        queue.cancel_join_thread()
    _kill_all(workers)
    for queue in iterator._index_queues:
        queue.close()


def _ensure_resource_tracker() -> None:
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()


def _exit_when_orphaned(parent: int) -> None:
    # torch looks for a dead parent only between batches, and SIGTERM no longer ends a long one.
    origin = multiprocessing.parent_process()
    while os.getppid() == parent and (origin is None or origin.is_alive()):
        time.sleep(_ORPHAN_CHECK_SECONDS)
    os._exit(1)


def _kill(reference: weakref.ref[BaseProcess]) -> None:
    worker = reference()
    if worker is not None:
        worker.kill()


def _kill_at_exit(workers: Sequence[BaseProcess], key: int) -> None:
    if any(worker.is_alive() for worker in workers):
        _forget_pids(key)
        _kill_all(workers)


def _kill_all(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(_REAP_SECONDS)


def _forget_pids(key: int) -> None:
    # or torch's SIGCHLD handler raises "DataLoader worker is killed by signal" in the main thread
    try:
        _remove_worker_pids(key)
    except ValueError:
        pass  # torch forgot them itself

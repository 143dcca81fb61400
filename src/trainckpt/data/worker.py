"""Send a DataLoader worker's randomness to the main process with each batch.

A worker runs some batches ahead of training, so its current generators are of no use. A resume
needs them as they were after the last *consumed* batch. So each batch carries the generators that
changed since that worker's last batch; the main process keeps the latest ones it unpacked.

    worker starts  `WorkerStart`: shield, the user's worker_init_fn, then the saved generators
    each batch     `RngCollate`: the user's collate_fn, then (batch, worker, changed generators)
    a pass ends    `PassEnd`, by a worker that persists with its copy of a stream: the generators as
                   the pass left them, and the names of what else it left changed

A batch also carries the generators inside the worker's copies of dataset and collate_fn, as one
value (randomness.py), and their states (carried_state.py).

Everything is at module level and picklable: spawn and forkserver send it to the worker. Exceptions
of the user's code pass through torch's ExceptionWrapper and are never wrapped here.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time
import warnings
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._C import _remove_worker_pids
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from trainckpt.data import carried_state, known_streams, randomness, sampler
from trainckpt.data.carried_state import Carried, Seen, Watch
from trainckpt.data.randomness import changed_since, packed_rng, set_main_rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.process import BaseProcess
    from types import FrameType


# ---- signals: keep the job's signals from killing workers
#
# torchrun and schedulers signal the whole process group. Unshielded workers die of it, and with
# them the save requested by the signal. The order of events:
#
#     parent   block the signals in this thread          they wait; none is lost
#     worker   starts with them blocked (masks survive fork and exec)
#     parent   unblock: signals that arrived meanwhile are delivered now, once
#     worker   `shield_worker`: ignore them, forget the parent's wakeup fd, unblock, watch the
#              parent
#
# Alternatives: ignoring the signals in the parent while workers are made would lose signals; a
# worker_init_fn alone would leave the milliseconds before it runs.
#
# For spawn and forkserver, multiprocessing's resource tracker must run first: starting it unblocks
# SIGTERM and SIGINT in the parent. It and the fork server start under the mask as well; the loss
# of the fork server would end its workers. (A fork server started earlier by other code is not
# protected. Processes that it starts later have the signals blocked, and must unblock them.)
#
# A shielded worker ignores `terminate()`. So `kill_on_shutdown` makes torch's own shut-down end
# with SIGKILL, and kills the remaining workers before multiprocessing joins its children at exit:
# that join would never return.


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
    if not _CAN_MASK:  # Windows
        yield
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        if (start_method or multiprocessing.get_start_method()) != "fork":
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # starting it unblocked two of them
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def shield_worker() -> None:
    """Ignore the job's signals in a worker, and exit if orphaned. Before any user code."""
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
    with suppress(ValueError):  # torch forgot them itself
        _remove_worker_pids(key)


@contextmanager
def survive_worker_deaths() -> Iterator[None]:
    """Let no death of a loader worker interrupt the block, which needs no more batches.

    torch's handler of SIGCHLD raises RuntimeError in the main thread, wherever that is.
    """
    number = getattr(signal, "SIGCHLD", 0)
    handler = signal.getsignal(number) if number else None
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            handler(signum, frame)

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, handler)


# ---- randomness, sent home with each batch


OWN_GENERATORS = "own"  # generators inside the data
CARRIED_STATES = "carried"  # the data's own states
COUNTED_PASSES = "passes"  # epochs and seeds inside a stream (known_streams.py)
_LEFT_INTERVAL = 16  # batches; comparing takes up to 10 ms
_sent_states: dict[str, bytes] = {}  # in a worker: its generators as last sent to the main process
_watches: list[Watch] = []  # in a worker: the watch over its data
_pass_watches: list[PassWatch] = []  # in a worker that persists: the watch over its stream
_pass_numbers: list[known_streams.PassNumber] = []  # in a worker: those inside its dataset


class BatchWithRng(NamedTuple):
    """A batch on its way to the main process; None means "as at this worker's last batch".

    Flat, because pin_memory rebuilds named tuples and passes ints, bytes and None untouched, but
    turns inner tuples into lists.
    """

    batch: Any
    worker: int
    python: bytes | None = None
    numpy: bytes | None = None
    torch: bytes | None = None
    own: bytes | None = None
    carried: Carried | None = None
    changing: bytes | None = None
    passes: bytes | None = None
    left: bytes | None = None

    def changed_states(self) -> dict[str, Any]:
        """Return the generators changed by this batch, by name, and the data's states."""
        names = ("python", "numpy", "torch", OWN_GENERATORS, COUNTED_PASSES)
        states = {name: getattr(self, name) for name in names}
        states[CARRIED_STATES] = None if self.carried is None else self.carried.states
        return {name: state for name, state in states.items() if state is not None}

    def changing_attributes(self) -> Seen | None:
        """Return the attributes of the data that were seen to change and are not saved."""
        return None if self.changing is None else Seen(*json.loads(self.changing))

    def left_changed(self) -> list[str] | None:
        """Return the attributes of a stream that a pass would leave changed if it ended here."""
        return None if self.left is None else list(json.loads(self.left))


@dataclass(frozen=True)
class PassEnd(torch_worker._IterableDatasetStopIteration):
    """Sent by a worker that persists as its pass over a stream runs out.

    Attributes:
        states: Its generators and pass numbers that changed since its last batch, by name.
        left: Attributes of the data that the pass left changed and that are not saved.
    """

    states: dict[str, bytes]
    left: list[str]


class RngCollate:
    """The user's collate_fn, with the worker's randomness added to its result.

    Attributes:
        carries: Send the data's states with each batch; False if batches are loaded again instead.
    """

    def __init__(self, collate: Callable[[Any], Any], *, carries: bool) -> None:
        self.collate = collate
        self.carries = carries

    def generator_roots(self) -> dict[str, Any]:
        """Return the worker's objects that may hold generators."""
        worker = get_worker_info()
        return {"dataset": None if worker is None else worker.dataset, "collate_fn": self.collate}

    def __call__(self, samples: Any) -> Any:
        """Collate the samples, and add the worker state that changed."""
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        roots = self.generator_roots()
        changed = _changed_states(roots)
        states = carried_state.capture(roots) if self.carries else {}
        changing = _watches[0].poll_changes() if _watches else None
        left = _pass_watches[0].poll_left() if _pass_watches else None
        return BatchWithRng(
            batch,
            worker.id,
            **changed,
            carried=Carried(states) if states else None,
            changing=None if changing is None else json.dumps(changing).encode(),
            left=None if left is None else json.dumps(left).encode(),
        )

    def end_pass(self, worker: int) -> PassEnd:
        """Return what the worker sends as its pass over a stream runs out."""
        return PassEnd(worker, _changed_states(self.generator_roots()), _pass_watches[0].left())


class PassWatch:
    """Finds attributes of a stream, in a worker that persists, that its passes leave changed.

    Some are set anew in each pass, such as a position: no worker can tell these from a count.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._before = dict(carried_state.plain_values(roots))
        self._batches = 0

    def poll_left(self) -> list[str] | None:
        """Return what would be left if the pass ended after this batch; None after most batches."""
        self._batches += 1
        return self.left() if self._batches % _LEFT_INTERVAL == 1 else None

    def left(self) -> list[str]:
        """Return the attributes that are not as the worker started, except epochs and seeds."""
        return sampler.changed(self._before, dict(carried_state.plain_values(self._roots)))


class WorkerStart:
    """The user's worker_init_fn, after shielding and before the saved generators are restored."""

    def __init__(
        self,
        user: Callable[[int], None] | None,
        saved: Mapping[int, dict[str, Any]],
        tap: RngCollate,
        *,
        sends_end: bool,
    ) -> None:
        self.user = user
        self.tap = tap
        self.saved = saved
        self.sends_end = sends_end

    def __call__(self, worker: int) -> None:
        """Run in the new worker, once."""
        shield_worker()
        if self.user is not None:
            self.user(worker)
        roots = self.tap.generator_roots()
        if worker in self.saved:
            saved = self.saved[worker]
            set_main_rng(saved)
            own = randomness.unpack(saved.get(OWN_GENERATORS, b""))
            lost = randomness.restore(roots, own, f"worker {worker}")
            if lost:
                warnings.warn(lost, stacklevel=2)
            carried_state.restore(roots, saved.get(CARRIED_STATES, {}))
            passes = json.loads(saved.get(COUNTED_PASSES, b"{}"))
            known_streams.restore_pass_numbers(roots["dataset"], passes)
        _pass_numbers[:] = known_streams.find_pass_numbers(roots["dataset"])
        _sent_states.clear()
        _sent_states.update(packed_rng())
        _sent_states[OWN_GENERATORS] = randomness.pack(randomness.capture(roots))
        _sent_states[COUNTED_PASSES] = b""
        _watches[:] = [Watch(roots)] if self.tap.carries else []
        if self.sends_end:
            _pass_watches[:] = [PassWatch(known_streams.outside_state(roots))]
            # torch's worker makes one of these and sends it as a stream runs out
            torch_worker._IterableDatasetStopIteration = self.tap.end_pass  # type: ignore[assignment, misc]


def _changed_states(roots: Mapping[str, Any]) -> dict[str, bytes]:
    """Return this worker's generators and pass numbers that are not as last sent, by name."""
    changed = changed_since(_sent_states)
    packed_generators = randomness.pack(randomness.capture(roots))
    if packed_generators != _sent_states.get(OWN_GENERATORS, b""):
        changed[OWN_GENERATORS] = packed_generators
    passes = _packed_pass_numbers()
    if passes != _sent_states[COUNTED_PASSES]:
        changed[COUNTED_PASSES] = passes
    _sent_states.update(changed)
    return changed


def _packed_pass_numbers() -> bytes:
    """Return the numbers of this worker's passes; empty without any."""
    numbers = known_streams.values_of(_pass_numbers)
    return json.dumps(numbers).encode() if numbers else b""

"""Subclass torch's two DataLoader iterators to count consumed batches and to start in the middle.

They subclass private classes of torch, because only these know which worker made which batch.
`_RELIED_ON` lists each private name in use; `self_test` checks all of them before a loader is
tracked. A changed torch is thus an error naming the attribute, not a wrong resume.

Starting in the middle (`Plan.skip` batches in) touches no data. Indices are drawn and dropped, and
the worker cycle advances by as many steps. Each later batch thus meets the same worker as before.

A pass with reused persistent workers draws no base_seed. A resumed process has no workers to reuse,
and its first iterator must draw one. So `Plan.rewind` puts the generators back before the first
index, and the workers are seeded with `Plan.base_seed` instead of the drawn seed.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data import dataloader as torch_loader

from trainckpt.data.pass_history import fingerprint
from trainckpt.data.worker import (
    BatchWithRng,
    PassEnd,
    RngCollate,
    WorkerStart,
    kill_on_shutdown,
    kill_workers,
    signals_blocked,
)
from trainckpt.errors import ConfigurationError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from trainckpt.data.carried_state import Changing, Seen, Watch
    from trainckpt.data.restored_numbers import LoopNumbers


_Base = torch_loader._BaseDataLoaderIter
_Single = torch_loader._SingleProcessDataLoaderIter
_Multi = torch_loader._MultiProcessingDataLoaderIter

# (function, names its code must use); attributes set in __init__ are not on the class
_RELIED_ON: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_Base.__init__, ("_base_seed", "_sampler_iter", "_auto_collation", "collate_fn")),
    (_Base._reset, ("_sampler_iter", "_index_sampler")),
    (_Single._next_data, ("_next_index",)),
    (_Single.__init__, ("_dataset_fetcher",)),
    (_utils.fetch._IterableDatasetFetcher.fetch, ("ended",)),
    (_Multi.__init__, ("_workers", "_worker_init_fn", "_base_seed", "_worker_result_queue")),
    (_Multi.__init__, ("_index_queues", "_worker_pids_set", "_shutdown", "_reset")),
    (_Multi._reset, ("_task_info", "_worker_queue_idx_cycle", "_try_put_index", "_get_data")),
    (_Multi._reset, ("_workers_status",)),
    (_Multi._try_put_index, ("_next_index", "_worker_queue_idx_cycle")),
    (_Multi._next_data, ("_process_data", "_get_data", "_task_info")),
    (_Multi._next_data, ("_IterableDatasetStopIteration",)),
    (_utils.worker._worker_loop, ("_IterableDatasetStopIteration",)),
)

_DIGESTS = 32  # more than there are batches after a state under trial (see `stream_trials.Trial`)


@dataclass
class Progress:
    """Consumed part of one pass; shared by the loader and its iterator.

    Attributes:
        position: Index batches consumed, including those whose loading raised.
        samples: Dataset indices in the batches returned.
        workers: Worker -> its generators and carried states as of its last consumed batch.
        changing: Attributes of the data that change from batch to batch and are not saved.
        order: Digest of the index lists consumed.
        batches_digest: Of the batches returned; empty if they are not compared.
        digests: Of each of the last batches returned, if they are compared.
    """

    position: int = 0
    samples: int = 0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    changing: Changing | None = None
    order: bytes = b""
    batches_digest: bytes = b""
    digests: deque[bytes] = field(default_factory=lambda: deque(maxlen=_DIGESTS))

    def add_batch(self, batch: Any) -> None:
        """Add a stream's batch to the digests."""
        digest = fingerprint(batch)
        self.batches_digest = fingerprint(digest, self.batches_digest)
        self.digests.append(digest)

    def record(self, batch: BatchWithRng) -> None:
        """Record the worker state that came with a consumed batch."""
        self.record_states(batch.worker, batch.changed_states())
        self.record_changes(batch.worker, batch.changing_attributes())

    def record_states(self, worker: int, changed: dict[str, Any]) -> None:
        """Record the states of a worker that changed."""
        if changed:
            self.workers[worker] = {**self.workers.get(worker, {}), **changed}

    def record_changes(self, worker: int, seen: Seen | None) -> None:
        """Record the attributes of the data that were seen to change."""
        if self.changing is not None and seen is not None:
            self.changing.record(worker, seen)


@dataclass(frozen=True)
class Plan:
    """Start of an iterator: at the beginning, or `skip` batches in with the saved randomness.

    Attributes:
        workers: Worker -> the generators and states to start it with.
        base_seed: Seed for the workers in place of the drawn one.
        rewind: Called before the first index is drawn.
        watch: Inspects the data of an iterator without workers.
        loop_numbers: Compares the dataset's numbers before each batch, and after those loaded here.
        compares: Add batches to `Progress.passed`.
        before_fetch: Called before each fetch, without workers.
        loads_skipped: Load the skipped batches too, without workers: their samples draw from the
            generator that the sampler draws from.
    """

    skip: int = 0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    base_seed: int | None = None
    rewind: Callable[[], None] | None = None
    watch: Watch | None = None
    loop_numbers: LoopNumbers | None = None
    compares: bool = False
    before_fetch: Callable[[], None] | None = None
    loads_skipped: bool = False


def self_test() -> None:
    """Raise ConfigurationError if this torch lacks a private attribute the iterators rely on."""
    for function, names in _RELIED_ON:
        missing = sorted(set(names) - set(function.__code__.co_names))
        if missing:
            raise ConfigurationError(
                f"torch {torch.__version__} changed its DataLoader: {function.__qualname__} no "
                f"longer uses {', '.join(missing)}",
                hint="install a torch version that this trainckpt release lists, or report this",
            )


def make_iterator(loader: DataLoader[Any], progress: Progress, plan: Plan) -> Any:
    """Create the iterator over a private copy of the user's loader; its workers are shielded."""
    if loader.num_workers == 0:
        return InProcessIterator(loader, progress, plan)
    context = loader.multiprocessing_context or torch.multiprocessing
    is_stream = isinstance(loader.dataset, IterableDataset)
    tap = RngCollate(loader.collate_fn, carries=not is_stream)
    sends_end = is_stream and loader.persistent_workers
    loader.worker_init_fn = WorkerStart(
        loader.worker_init_fn, plan.workers, tap, sends_end=sends_end
    )
    loader.collate_fn = tap
    with signals_blocked(context.get_start_method()):
        iterator = WorkersIterator(loader, progress, plan)
    kill_on_shutdown(iterator)
    return iterator


def has_run_out(iterator: Any) -> bool:
    """Return True if its IterableDataset ended while the last, short batch was made."""
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def _number_of_samples(index: Any, auto_collation: bool) -> int:
    return len(index) if auto_collation and hasattr(index, "__len__") else 1


def _extend_order(index: Any, previous: bytes) -> bytes:
    if type(index) is int or (type(index) is list and index and type(index[0]) is int):
        return blake2b(previous + repr(index).encode(), digest_size=8).digest()
    return fingerprint(index, previous)


def _beyond_end_error(skip: int) -> StateMismatch:
    return StateMismatch(
        "the saved position lies beyond the end of the data",
        [f"{skip} batches were consumed, the sampler now yields fewer"],
        hint="resume with the dataset and sampler of the saved run",
    )


class InProcessIterator(_Single):
    """num_workers=0: indices and data are drawn in step."""

    def __init__(self, loader: DataLoader[Any], progress: Progress, plan: Plan) -> None:
        super().__init__(loader)
        self.progress = progress
        self._last_size = 0
        self._plan = plan
        try:
            for _ in range(plan.skip):
                index = next(self._sampler_iter)
                progress.order = _extend_order(index, progress.order)
                if plan.loads_skipped:
                    self._dataset_fetcher.fetch(index)
        except StopIteration:
            raise _beyond_end_error(plan.skip) from None

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._last_size = _number_of_samples(index, self._auto_collation)
        self.progress.position += 1
        if not self._plan.compares:
            self.progress.order = _extend_order(index, self.progress.order)
        return index

    def _next_data(self) -> Any:
        progress, plan = self.progress, self._plan
        if plan.before_fetch is not None:
            plan.before_fetch()
        if plan.watch is not None and plan.compares:
            plan.watch.forget_changes()  # of the loop: a stream may call a method of the training
        numbers = plan.loop_numbers
        if numbers is not None:
            numbers.before_batch()
        data = super()._next_data()  # type: ignore[no-untyped-call]
        if numbers is not None:
            numbers.after_batch()
        progress.samples += self._last_size
        if plan.watch is not None:
            kept = () if numbers is None else numbers.kept
            progress.record_changes(0, plan.watch.poll_changes(kept))
        if plan.compares:
            progress.add_batch(data)
        return data


class WorkersIterator(_Multi):
    """num_workers>0: indices run ahead of batches; each batch brings its worker's randomness.

    Attributes:
        left: Worker -> attributes that its passes over a stream leave changed; they are not saved.
    """

    def __init__(self, loader: DataLoader[Any], progress: Progress, plan: Plan) -> None:
        self.progress = progress
        self._plan = plan
        self._skip = plan.skip
        self._owner_pid = os.getpid()
        self.left: dict[int, list[str]] = {}
        self._ends: list[PassEnd] = []  # of the running pass; they count once it has run out
        self._order = b""
        # Size of each index batch sent and not consumed yet, and the order digest including it.
        self._in_flight: deque[tuple[int, bytes]] = deque()
        super().__init__(loader)

    @property
    def _base_seed(self) -> int:
        return self._seed

    @_base_seed.setter
    def _base_seed(self, drawn: int) -> None:
        self._seed = drawn if self._plan.base_seed is None else self._plan.base_seed

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if first_iter and self._plan.rewind is not None:
            self._plan.rewind()
        self._in_flight.clear()
        self._ends.clear()
        self._order = b""
        super()._reset(loader, first_iter)

    def _try_put_index(self) -> None:
        if self._skip:
            self._fast_forward()
        super()._try_put_index()

    def _fast_forward(self) -> None:
        skip, self._skip = self._skip, 0
        for _ in range(skip % self._num_workers):
            next(self._worker_queue_idx_cycle)
        drawn = 0
        for drawn, index in enumerate(itertools.islice(self._sampler_iter, skip), start=1):  # noqa: B007
            self._order = _extend_order(index, self._order)
        if drawn < skip:
            raise _beyond_end_error(skip)
        self.progress.order = self._order

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if not self._plan.compares:
            self._order = _extend_order(index, self._order)
        self._in_flight.append((_number_of_samples(index, self._auto_collation), self._order))
        return index

    def _get_data(self) -> Any:
        index, data = super()._get_data()  # type: ignore[no-untyped-call]
        if isinstance(data, PassEnd):
            self._ends.append(data)
        return index, data

    def _next_data(self) -> Any:
        try:
            return super()._next_data()  # type: ignore[no-untyped-call]
        except StopIteration:
            self._record_ends()
            raise

    def _record_ends(self) -> None:
        for end in self._ends:
            self.progress.record_states(end.worker_id, end.states)
            self.left[end.worker_id] = end.left

    def _process_data(self, data: Any, *rest: Any) -> Any:
        progress = self.progress
        if self._plan.loop_numbers is not None:
            self._plan.loop_numbers.before_batch()
        size, progress.order = self._in_flight.popleft() if self._in_flight else (0, progress.order)
        progress.position += 1
        data = super()._process_data(data, *rest)  # type: ignore[no-untyped-call]
        progress.samples += size
        batch = self._unwrap(data)
        if self._plan.compares:
            progress.add_batch(batch)
        return batch

    def order_ahead(self, number: int | None = None) -> tuple[int, bytes]:
        """Return how many index lists were drawn ahead, and the digest of the order with them.

        `number`: count so many of them only, or all if there are fewer.
        """
        ahead = [order for _, order in self._in_flight][:number]
        return len(ahead), ahead[-1] if ahead else b""

    def drain(self) -> None:
        """Wait for the batches under way and drop them, as torch does when it reuses workers.

        Afterwards `progress` holds the generators with which the workers enter the next pass.
        """
        for number, task in sorted(self._task_info.items()):
            if len(task) == 2:
                self._unwrap(self._task_info.pop(number)[1])
        # a worker whose stream has run out answers none of its other tasks
        while any(self._workers_status[worker] for worker, *_ in self._task_info.values()):
            number, data = self._get_data()
            del self._task_info[number]
            if isinstance(data, PassEnd):
                self._workers_status[data.worker_id] = False
            self._unwrap(data)
        self._record_ends()

    def _shutdown_workers(self) -> None:
        if os.getpid() != self._owner_pid:
            return  # a forked worker inherited this iterator and drops it
        if not any(worker.is_alive() for worker in self._workers):
            kill_workers(self)  # all have ended, or the garbage collector killed them
        else:
            super()._shutdown_workers()

    def _unwrap(self, data: Any) -> Any:
        if not isinstance(data, BatchWithRng):
            return data
        self.progress.record(data)
        left = data.left_changed()
        if left is not None:
            self.left[data.worker] = left
        return data.batch

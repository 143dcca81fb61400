"""torch's two DataLoader iterators, counting what is consumed and able to start in the middle.

These subclass private classes of torch, because only they know which worker made which batch. Each
private name relied on is listed in `_RELIED_ON`; `self_test` looks for all of them before a loader
is tracked, so that a changed torch is an error that names the attribute, not a wrong resume.

Starting in the middle (`Plan.skip` batches in) touches no data: indices are drawn and dropped, and
the worker cycle is turned on by as many, so that each later batch meets the worker it would have
met.

A pass that reuses persistent workers draws no base_seed. A resumed process has no workers to reuse:
its first iterator must draw one, so `Plan.rewind` puts the generators back before the first index,
and `Plan.base_seed` is what the workers are seeded with, whatever was drawn.

Used by: sources.py.
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

from trainckpt.data.fingerprint import fingerprint
from trainckpt.data.shield import adopt, kill_workers, shielded
from trainckpt.data.worker import Tap, Tapped, WorkerStart
from trainckpt.errors import ConfigurationError, StateMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.data import DataLoader

    from trainckpt.data.carried import Changing, Seen, Watch

_Base = torch_loader._BaseDataLoaderIter
_Single = torch_loader._SingleProcessDataLoaderIter
_Multi = torch_loader._MultiProcessingDataLoaderIter

# (function, names its code must use): attributes made in __init__ are not on the class
_RELIED_ON: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (_Base.__init__, ("_base_seed", "_sampler_iter", "_auto_collation", "collate_fn")),
    (_Base._reset, ("_sampler_iter", "_index_sampler")),
    (_Single._next_data, ("_next_index",)),
    (_Single.__init__, ("_dataset_fetcher",)),
    (_utils.fetch._IterableDatasetFetcher.fetch, ("ended",)),
    (_Multi.__init__, ("_workers", "_worker_init_fn", "_base_seed", "_worker_result_queue")),
    (_Multi.__init__, ("_index_queues", "_worker_pids_set", "_shutdown", "_reset")),
    (_Multi._reset, ("_task_info", "_worker_queue_idx_cycle", "_try_put_index", "_get_data")),
    (_Multi._reset, ("_tasks_outstanding",)),
    (_Multi._try_put_index, ("_next_index", "_worker_queue_idx_cycle")),
    (_Multi._next_data, ("_process_data", "_get_data", "_task_info")),
)


@dataclass
class Progress:
    """What has been consumed of one pass; shared by the loader and its iterator.

    Attributes:
        position: Index batches consumed, those whose loading raised included.
        samples: Dataset indices in the batches returned.
        workers: Worker -> its generators as of its last consumed batch, and what its data carries.
        changing: Attributes of the data that change from batch to batch and are not kept.
        order: Follows from the index lists consumed.
        passed: Follows from the batches returned; empty where they are not compared.
        since: Follows from those returned since the state that a resume tries.
    """

    position: int = 0
    samples: int = 0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    changing: Changing | None = None
    order: bytes = b""
    passed: bytes = b""
    since: bytes = b""

    def compare(self, batch: Any) -> None:
        """Take a batch of a stream into what tells it again."""
        this = fingerprint(batch)
        self.passed, self.since = fingerprint(this, self.passed), fingerprint(this, self.since)

    def note(self, batch: Tapped) -> None:
        """Keep what a consumed batch says about its worker's generators."""
        news = batch.changed()
        if news:
            self.workers[batch.worker] = {**self.workers.get(batch.worker, {}), **news}
        self.note_changes(batch.worker, batch.changes())

    def note_changes(self, worker: int, seen: Seen | None) -> None:
        """Take which attributes of the data were seen to change."""
        if self.changing is not None and seen is not None:
            self.changing.note(worker, seen)


@dataclass(frozen=True)
class Plan:
    """How an iterator starts: at the beginning, or `skip` batches in with what was saved.

    Attributes:
        watch: Looks at the data of an iterator without workers.
        compares: Batches are taken into `Progress.passed`.
        before_fetch: Called before each batch is fetched, without workers.
    """

    skip: int = 0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)
    base_seed: int | None = None
    rewind: Callable[[], None] | None = None
    watch: Watch | None = None
    compares: bool = False
    before_fetch: Callable[[], None] | None = None


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
    tap = Tap(loader.collate_fn, carries=not isinstance(loader.dataset, IterableDataset))
    loader.worker_init_fn = WorkerStart(loader.worker_init_fn, plan.workers, tap)
    loader.collate_fn = tap
    with shielded(context.get_start_method()):
        iterator = WorkersIterator(loader, progress, plan)
    adopt(iterator)
    return iterator


def has_run_out(iterator: Any) -> bool:
    """Whether its IterableDataset ended while the last batch, a short one, was made."""
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


def _size(index: Any, auto_collation: bool) -> int:
    return len(index) if auto_collation and hasattr(index, "__len__") else 1


def _ordered(index: Any, before: bytes) -> bytes:
    if type(index) is int or (type(index) is list and index and type(index[0]) is int):
        return blake2b(before + repr(index).encode(), digest_size=8).digest()
    return fingerprint(index, before)


def _ran_out(skip: int) -> StateMismatch:
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
                progress.order = _ordered(next(self._sampler_iter), progress.order)
        except StopIteration:
            raise _ran_out(plan.skip) from None

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        self._last_size = _size(index, self._auto_collation)
        self.progress.position += 1
        if not self._plan.compares:
            self.progress.order = _ordered(index, self.progress.order)
        return index

    def _next_data(self) -> Any:
        progress, plan = self.progress, self._plan
        if plan.before_fetch is not None:
            plan.before_fetch()
        data = super()._next_data()  # type: ignore[no-untyped-call]
        progress.samples += self._last_size
        if plan.watch is not None:
            progress.note_changes(0, plan.watch.look())
        if plan.compares:
            progress.compare(data)
        return data


class WorkersIterator(_Multi):
    """num_workers>0: indices run ahead of batches; each batch brings its worker's randomness."""

    def __init__(self, loader: DataLoader[Any], progress: Progress, plan: Plan) -> None:
        self.progress = progress
        self._plan = plan
        self._skip = plan.skip
        self._owner = os.getpid()
        self._order = b""
        # Sizes of the index batches sent and not consumed yet, and the order with each of them.
        self._sent: deque[tuple[int, bytes]] = deque()
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
        self._sent.clear()
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
            self._order = _ordered(index, self._order)
        if drawn < skip:
            raise _ran_out(skip)
        self.progress.order = self._order

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        if not self._plan.compares:
            self._order = _ordered(index, self._order)
        self._sent.append((_size(index, self._auto_collation), self._order))
        return index

    def _process_data(self, data: Any, *rest: Any) -> Any:
        progress = self.progress
        size, progress.order = self._sent.popleft() if self._sent else (0, progress.order)
        progress.position += 1
        data = super()._process_data(data, *rest)  # type: ignore[no-untyped-call]
        progress.samples += size
        batch = self._untap(data)
        if self._plan.compares:
            progress.compare(batch)
        return batch

    def drain(self) -> None:
        """Wait for the batches under way and drop them, as torch does when it reuses workers.

        Afterwards the progress holds the generators with which the workers enter the next pass.
        """
        for _, task in sorted(self._task_info.items()):
            if len(task) == 2:
                self._untap(task[1])
        while self._tasks_outstanding > 0:
            self._tasks_outstanding -= 1
            self._untap(self._get_data()[1])  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        if os.getpid() != self._owner:
            return  # a forked worker inherited this iterator and drops it
        if not any(worker.is_alive() for worker in self._workers):
            kill_workers(self)  # nobody to wait for: they ended, or were killed by the collector
        else:
            super()._shutdown_workers()

    def _untap(self, data: Any) -> Any:
        if not isinstance(data, Tapped):
            return data
        self.progress.note(data)
        return data.batch

"""Read from Ray Train what a worker knows of its run: storage, restarts, and draining nodes.

    run_at              the run directory below the run's folder in `storage_path`
    Restarts            the starts of one `trainer.fit()` that have begun a run
    DrainNotices        a notice when a node of the run drains
    preemption_error    the error that makes Ray restart the run at once, as a preemption

The documented `ray.train.get_preemption_info()` waits for the same call on all workers, and counts
collective calls, so neither the watcher's thread nor ranks with unequal batches can use it. The
value that it broadcasts is already on every worker: Ray's PreemptionWatcher calls `mark_preempt` on
each. `DrainNotices` reads that value, without a wait, and the ranks agree on the boundary of the
stop as for any other notice.
"""

from __future__ import annotations

import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.notice import OF_MACHINE, RAY, Notice, PolledSource

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_CONTEXT = "ray.train.v2._internal.execution.context"
RELIED = (
    (f"{_CONTEXT}", "get_train_context", "knows the run of a worker"),
    (f"{_CONTEXT}:TrainContext", "get_storage", "knows the storage path"),
    (
        "ray.train.v2._internal.execution.worker_group.worker:RayTrainWorker",
        "mark_preempt",
        "passes a drain on to a worker",
    ),
    ("ray.experimental.internal_kv", "_internal_kv_put", "outlives the workers"),
    ("ray.exceptions:RayActorError", "preempted", "tells preemptions from failures"),
)
# Ray's name of a file system -> protocol of the same place for trainckpt
_PROTOCOLS = {"s3": "s3", "gcs": "gs", "abfs": "abfs"}
# Ray takes a node without deadline away that long after it saw the drain (its own constant).
UNKNOWN_DEADLINE_S = 120.0
DRAINED = "drained by Ray"
_NAMESPACE = b"trainckpt"


def train_context() -> Any:
    """Return Ray's internal context of this worker.

    Raises:
        ConfigurationError: This process is not a worker of Ray Train V2.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    try:
        return get_train_context()
    except RuntimeError as error:
        raise ConfigurationError(
            "this process is no worker of Ray Train, so there is no storage path to save under",
            hint="make the Checkpointer inside the function given to TorchTrainer; elsewhere use "
            "trainckpt.Checkpointer. With RAY_TRAIN_V2_ENABLED=0 set, unset it",
        ) from error


# ---- the run directory


def run_at(run: str | os.PathLike[str], type_name: str, folder: str) -> str:
    """Return the path or URL of the run. Pure.

    Args:
        run: As the script names it; absolute paths and URLs stay as they are.
        type_name: Kind of the file system of Ray's storage, as Arrow names it.
        folder: Folder of the Ray run on that file system: `storage_path` and the run's name.

    Raises:
        ConfigurationError: The storage is of a kind with no tier.
    """
    text = str(run)
    if "://" in text or text.startswith(("/", "~")):
        return text
    if type_name == "local":
        return str(PurePosixPath(folder) / text)
    if type_name not in _PROTOCOLS:
        raise ConfigurationError(
            f"Ray's storage is a file system of the kind {type_name!r}, for which there is no "
            f"tier, so the run {text!r} cannot lie below {folder}",
            hint="name an absolute path on a shared file system, or a URL such as s3://bucket/run",
        )
    return f"{_PROTOCOLS[type_name]}://{PurePosixPath(folder) / text}"


# ---- restarts


class Restarts:
    """The starts of one `trainer.fit()` at one run directory.

    Ray gives workers no number of their attempt. So rank 0 notes each claimed attempt in the
    cluster's key-value store, under Ray's id of the run, which a restart of the workers keeps.
    """

    def __init__(self, run_id: str, run: str) -> None:
        self._key = f"restarts/{run_id}/{run}".encode()

    def before(self) -> int:
        """Return the number of earlier starts that have claimed an attempt."""
        from ray.experimental.internal_kv import _internal_kv_get

        value = _internal_kv_get(self._key, namespace=_NAMESPACE)
        return int(value) if value else 0

    def note(self, number: int) -> None:
        """Record that so many starts have claimed an attempt. Rank 0."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key, str(number).encode(), True, namespace=_NAMESPACE)


# ---- a drain


def notice_of(info: Any, rank: int, now_s: float) -> Notice:
    """Return the notice of a drain. Pure.

    Args:
        info: Ray's PreemptionInfo.
        rank: This rank; the reason says whether its own node goes.
        now_s: Unix time, as Ray's deadline is.
    """
    seconds_left = UNKNOWN_DEADLINE_S
    if info.deadline_ms is not None:
        seconds_left = max(info.deadline_ms / 1000 - now_s, 0.0)
    ranks = info.preempted_ranks
    if rank in ranks:
        reason = f"{RAY} drains this node"
    else:
        reason = f"the node of rank {', '.join(map(str, ranks))} is {DRAINED}"
    return Notice(reason, seconds_left=seconds_left)


class DrainNotices(PolledSource):
    """Notice source for the drain of a node with workers of this run.

    Args:
        read: Returns Ray's PreemptionInfo for this worker, or None.
        rank: This rank.
        now: Returns the Unix time.
    """

    def __init__(
        self, read: Callable[[], Any], rank: int, now: Callable[[], float] = time.time
    ) -> None:
        self._read, self._rank, self._now = read, rank, now
        self._last: Any = None

    def poll(self) -> list[Notice]:
        """Return a stop for each drain, and for each change of its deadline."""
        info = self._read()
        if info is None or info == self._last:
            return []
        self._last = info
        return [notice_of(info, self._rank, self._now())]


def is_preemption(reason: str) -> bool:
    """Return True if a stop for this reason continues elsewhere: only a machine leaves."""
    return reason.startswith(OF_MACHINE) or reason.endswith(DRAINED)


def preemption_error(message: str) -> Exception:
    """Return the error by which Ray restarts the run, counted as a preemption and not a failure.

    Ray waits for a drain's deadline before it restarts, unless all workers end before, by an error
    of this kind. An end without error would count as a finished run.
    """
    from ray.exceptions import RayActorError

    error: Exception = RayActorError(error_msg=message, preempted=True)
    return error

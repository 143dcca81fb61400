"""Track a run of MLflow: the run of the snapshot goes on, without later metrics.

MLflow has no call that deletes metrics, so they are deleted in the store: the rows of its database,
or the lines of its files. A server is out of reach: there a tag names the attempt and the time from
which on it logged.

The position is a time: each metric has one, by the clock of the process that logged it.

Rows of `synchronous=False` wait in MLflow's queue, and a kill loses them: a save waits for those
batches, with a limit. MLflow's own flush has none, and breaks what the script logs meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil

from trainckpt.attempt.log import logger

_Future = concurrent.futures.Future[Any]
_followed: WeakKeyDictionary[Any, set[_Future]] = WeakKeyDictionary()  # by store


class MLflowRun:
    """A run as `mlflow.start_run` returns it.

    Attributes:
        run: The run, or the snapshot's run that goes on instead.
        place: URL of the run directory.
    """

    name = "mlflow"

    def __init__(self, run: Any, *, place: str, **_: Any) -> None:
        import mlflow

        self.run, self.place = run, place
        self._store = mlflow.MlflowClient()._tracking_client.store
        self._batches = _follow_batches(self._store)
        self._late: set[_Future] = set()
        self._warned = False

    @staticmethod
    def takes(run: Any) -> bool:
        """Return True for a run of MLflow."""
        return type(run).__module__.startswith("mlflow.") and hasattr(run, "info")

    @property
    def id(self) -> str:
        """Return the run's id."""
        return str(self.run.info.run_id)

    def position(self, limit_s: float) -> int:
        """Return the time in milliseconds; what is logged later has a later one.

        It holds for batches that are late too: MLflow goes on sending them.
        """
        if self._late and all(batch.done() for batch in self._late):
            self._late = set()
        if not self._late:
            _send_buffered(self._store)
            self._late = concurrent.futures.wait(self._batches.copy(), limit_s).not_done
        if self._late and not self._warned:
            self._warned = True
            logger.warning(
                "MLflow has not taken %d batches of rows within %.1f s: a save goes on without "
                "them, and a kill before MLflow has them loses them",
                len(self._late),
                limit_s,
            )
        now_ms = time.time_ns() // 1_000_000
        time.sleep(0.001)
        return now_ms

    def go_on(self, run_id: str, time_ms: int, attempt: int) -> None:
        """Go on in this run, without what was logged after this time."""
        import mlflow

        client = mlflow.MlflowClient()
        if run_id != self.id:
            mlflow.flush_async_logging()  # it could not be deleted while something is logged to it
            active = mlflow.active_run()
            if active is not None and active.info.run_id == self.id:
                mlflow.end_run()
                has_parent = mlflow.active_run() is not None
                going_on: Any = mlflow.start_run(run_id=run_id, nested=has_parent)
            else:
                client.update_run(run_id, status="RUNNING")
                going_on = client.get_run(run_id)
            if _is_new(client.get_run(self.id)):
                client.delete_run(self.id)
            self.run = going_on
            logger.info("logging goes on in MLflow's run %s", run_id)
        store = client._tracking_client.store
        if hasattr(store, "engine"):
            _delete_rows(store, run_id, time_ms)
        elif hasattr(store, "_get_run_dir"):
            _delete_lines(Path(store._get_run_dir(self.run.info.experiment_id, run_id)), time_ms)
        else:
            client.set_tag(run_id, f"trainckpt.attempt.{attempt}", f"resumed {time_ms}")
            logger.warning(
                "MLflow's server cannot delete metrics: those logged after %d ms stand twice, and "
                "the later ones count",
                time_ms,
            )


def _follow_batches(store: Any) -> set[_Future]:
    """Return the batches logged from here on that the store has not taken yet, a set that lives."""
    if store not in _followed:
        batches = _followed[store] = set[_Future]()
        log = store.log_batch_async

        def log_and_follow(*args: Any, **how: Any) -> Any:
            operations = log(*args, **how)
            for batch in operations._operation_futures:
                batches.add(batch)
                batch.add_done_callback(batches.discard)
            return operations

        store.log_batch_async = log_and_follow
    return _followed[store]


def _send_buffered(store: Any) -> None:
    """Let MLflow send rows that MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS lets it wait with.

    Only the end of a queue sends them, and a queue that ends takes no row: the script's next ones
    go to a new queue.
    """
    from mlflow import environment_variables

    buffers: Any = environment_variables.MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS
    queue = store._async_logging_queue
    if buffers.get() and queue.is_active():
        store._async_logging_queue = type(queue)(logging_func=store.log_batch)
        threading.Thread(target=queue.shut_down_async_logging, daemon=True).start()


def _is_new(run: Any) -> bool:
    """Return True for a run that this process has started, and logged no metric to."""
    begun_ms = psutil.Process().create_time() * 1000
    return bool(run.info.start_time >= begun_ms and not run.data.metrics)


def _delete_rows(store: Any, run_id: str, time_ms: int) -> None:
    """Delete later metrics, and make the latest ones anew."""
    from mlflow.store.tracking.dbmodels.models import SqlLatestMetric, SqlMetric
    from sqlalchemy import delete, insert, select

    metrics, latest = SqlMetric.__table__.c, SqlLatestMetric.__table__
    is_late = (metrics.run_uuid == run_id) & (metrics.timestamp > time_ms)
    with store.engine.begin() as database:
        keys = database.execute(select(metrics.key).where(is_late).distinct()).scalars().all()
        database.execute(delete(SqlMetric.__table__).where(is_late))
        for key in keys:
            database.execute(
                delete(latest).where((latest.c.run_uuid == run_id) & (latest.c.key == key))
            )
            last = database.execute(
                select(metrics.value, metrics.timestamp, metrics.step, metrics.is_nan)
                .where((metrics.run_uuid == run_id) & (metrics.key == key))
                .order_by(metrics.step.desc(), metrics.timestamp.desc(), metrics.value.desc())
            ).first()
            if last is not None:
                values = {"run_uuid": run_id, "key": key, **last._mapping}
                database.execute(insert(latest).values(**values))


def _delete_lines(folder: Path, time_ms: int) -> None:
    """Delete later metrics: a line begins with its time."""
    for path in (folder / "metrics").rglob("*"):
        if not path.is_file():
            continue
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if int(line.split()[0]) <= time_ms]
        if not kept:
            path.unlink()
        elif len(kept) < len(lines):
            shortened = folder / "metrics.cut"  # a kill amid this loses no row
            shortened.write_text("".join(kept))
            shortened.replace(path)

"""Track a run of MLflow: the run of the snapshot goes on, without later metrics.

MLflow has no call that deletes metrics, so they are deleted in the store: the rows of its database,
or the lines of its files. A server is out of reach: there a tag names the attempt and the time from
which on it logged.

The position is a time: each metric has one, by the clock of the process that logged it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil

from trainckpt.attempt.log import logger


class MLflowRun:
    """A run as `mlflow.start_run` returns it.

    Attributes:
        run: The run, or the snapshot's run that goes on instead.
        place: URL of the run directory.
    """

    name = "mlflow"

    def __init__(self, run: Any, *, place: str, **_: Any) -> None:
        self.run, self.place = run, place

    @staticmethod
    def takes(run: Any) -> bool:
        """Return True for a run of MLflow."""
        return type(run).__module__.startswith("mlflow.") and hasattr(run, "info")

    @property
    def id(self) -> str:
        """Return the run's id."""
        return str(self.run.info.run_id)

    def position(self) -> int:
        """Return the time in milliseconds; what is logged later has a later one."""
        import mlflow

        mlflow.flush_async_logging()  # a kill ends the thread that the Trainer leaves rows to
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

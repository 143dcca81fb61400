"""The Checkpointer for a worker of Ray Train.

Ray differs from other launchers in six points, and this class answers each:

    the loop is not on the main thread      no signals; drains are heard from Ray (`DrainNotices`)
    the working directory is Ray's          relative runs lie in the run's folder of `storage_path`
    Ray restarts workers, never a command   its restarts are evidence that a run must be there
    an end of the function is success       a stop for a leaving machine ends by a preemption error
    Ray keeps checkpoints by reports        `report` names a snapshot, which stays as long as Ray's
    prepared loaders read one batch ahead   the DataLoader inside is tracked, and its batches moved
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.save_handle import SaveHandle
from trainckpt.checkpointer import Checkpointer
from trainckpt.errors import ConfigurationError, SaveFailed, Stopped, TrainckptError
from trainckpt.format.names import SNAPSHOTS
from trainckpt.integrations import ray_report, ray_session
from trainckpt.integrations.compat import check

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.cursor import Cursor
    from trainckpt.notice import NoticeSource

_RELIED = (
    (
        "ray.train.torch.train_loop_utils:_WrappedDataLoader",
        "_move_to_device",
        "moves the batches of a prepared loader",
    ),
    (
        "ray.train.torch.train_loop_utils:_WrappedDataLoader",
        "_wait_for_batch",
        "waits for a batch moved on another stream",
    ),
)


class RayCheckpointer(Checkpointer):
    """Save and resume a training under Ray Train, exactly, at any micro-batch.

    Use it in a `with` statement inside the function given to `TorchTrainer`, on every worker. After
    a lost worker or node, Ray calls the function again, and it resumes.

    Args:
        run: Run directory. A relative path lies in the run's folder, `storage_path` and the name
            of its `RunConfig`; absolute paths and URLs are taken as they are.
        loader: The training data loader, or a list of loaders, also those that Ray has prepared.
        **keywords: Objects to track and options, as for `trainckpt.Checkpointer`, but `on_stop`.

    Raises:
        ConfigurationError: This is no worker of Ray Train, its storage has no tier, or an option
            or an object cannot work; the message names it.
    """

    def __init__(
        self, run: str | os.PathLike[str] = "trainckpt", *, loader: Any = None, **keywords: Any
    ) -> None:
        check("ray", (*ray_session.RELIED, *_RELIED))
        if keywords.get("on_stop") is not None:
            raise ConfigurationError(
                "on_stop cannot be chosen under Ray Train: what follows a stop depends on its "
                "reason (docs/ray.md)",
                hint="leave on_stop out",
            )
        self._train = ray_session.train_context()
        self._movers: dict[int, Any] = {}  # by the id of the DataLoader inside a prepared one
        storage = self._train.get_storage()
        kind = storage.storage_filesystem.type_name
        path = ray_session.run_at(run, kind, storage.experiment_fs_path)
        self._restarts = ray_session.Restarts(self._train.train_run_context.run_id, path)
        super().__init__(path, loader=loader, **keywords, on_stop="return")
        self._reported = ray_report.ReportedSnapshots(self._tier.url)

    def resume(self, mode: str | None = None) -> Cursor:
        """Resume from the newest usable snapshot, or begin at step 0; as `trainckpt.Checkpointer`.

        After a restart by Ray the run must be there: a worker on another node that cannot see it
        is refused, and does not begin anew.
        """
        before = self._restarts.before()
        mode = mode or self.options.resume
        if before and mode == "auto":
            mode = "required"
        cursor = super().resume(mode)
        if self._world.rank == 0:
            self._restarts.note(before + 1)
            if not self._pin_reported():
                with suppress(TrainckptError):
                    attempt = self._must_have_resumed()
                    attempt.saver.pinned = frozenset(self._tier.list(SNAPSHOTS))
        return cursor

    def report(self, metrics: dict[str, Any], **options: Any) -> None:
        """Report metrics to Ray, with a checkpoint that names a snapshot taken here. All workers.

        The checkpoint is a file of some hundred bytes; the snapshot stays as long as Ray keeps it
        (`CheckpointConfig(num_to_keep=...)`). Call it between epochs, as for `evaluation`: it is a
        boundary. Amid an epoch, and where the save fails, metrics alone are reported.

        Args:
            metrics: Metrics of this worker; Ray takes those of rank 0.
            **options: Further arguments of `ray.train.report`, but `checkpoint`.
        """
        import ray.train

        snapshot = self._save_to_report()
        if snapshot is None or self._world.rank != 0:
            ray.train.report(metrics, **options)
        else:
            attempt = self._must_have_resumed()
            attempt.saver.pinned |= {snapshot}
            with ray_report.pointer_to(self._tier.url, snapshot) as checkpoint:
                ray.train.report(metrics, checkpoint=checkpoint, **options)
            self._pin_reported()

    def _save_to_report(self) -> str | None:
        """Save at this boundary, on all ranks; return the committed snapshot's full name."""
        attempt = self._must_have_resumed()
        self._boundary(evaluation=True)
        if not self._position.between_batches or self._phased_restore.to_come:
            return None
        handle = SaveHandle()
        attempt.saver.save(self._position.cursor, "ray.train.report", (), handle)
        self._after_save(attempt)
        try:
            return handle.wait("local").snapshot
        except SaveFailed as error:
            logger.warning("metrics are reported without a checkpoint: %s", error.message)
            return None

    def _pin_reported(self) -> bool:
        """Keep the snapshots that Ray's checkpoints name, and no others. Rank 0.

        Returns:
            False if that is unknown: a checkpoint cannot be read. Then those kept before stay.
        """
        import ray.train
        from ray.train import CheckpointConsistencyMode

        reports = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        named = self._reported.read(report.checkpoint for report in reports)
        if named is None:
            return False
        self._must_have_resumed().saver.pinned = named
        return True

    def loader(self, loader: Iterable[Any]) -> TrackedLoader:
        """Return a loader with the batches of `loader` and a boundary before each of them.

        Batches of a prepared loader are moved to the worker's device by `batches()` alone.
        """
        from ray.train.torch.train_loop_utils import _WrappedDataLoader

        if not isinstance(loader, _WrappedDataLoader):
            return super().loader(loader)
        inside: Any = loader._dataloader
        self._movers[id(inside)] = loader
        return super().loader(inside)

    def batches(self) -> Iterator[Any]:
        """Yield the batches of the next pass, or the rest of the pass in which the run stopped."""
        batches = super().batches()
        mover = self._movers.get(id(self._loaders[0][0]))
        return batches if mover is None else _moved(batches, mover)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        """Finish, or end the attempt by the error. Return True for a stop that Ray must not undo.

        A stop that a person or a time limit asked for ends the `with` statement quietly, because
        Ray would restart the run after an error.
        """
        try:
            super().__exit__(kind, error, trace)
        except Stopped:
            return True
        return isinstance(error, Stopped)

    def _trainer_sources(self) -> Sequence[NoticeSource]:
        context = self._train.preemption_context
        return [ray_session.DrainNotices(lambda: context.preemption_info, self._world.rank)]

    def _boundary(self, **boundary: bool) -> bool:
        """Count, save if due, act on decisions; raise at a stop."""
        if not super()._boundary(**boundary):
            self._leave()
        return True

    def _leave(self) -> None:
        """Raise the error of a stop: Ray's own for a machine that goes, else `Stopped`."""
        outcome = self._must_have_resumed().shutdown.record_writer.record.outcome or {}
        reason, snapshot = str(outcome.get("reason")), outcome.get("snapshot")
        if ray_session.is_preemption(reason):
            raise ray_session.preemption_error(f"{reason}: saved {snapshot}, to go on elsewhere")
        if self._world.rank == 0:
            logger.info(
                "Ray counts this run as finished; trainer.fit() with the same name and "
                "storage_path resumes it"
            )
        raise Stopped(int(outcome.get("exit_code", 0)), snapshot, reason)


def _moved(batches: Iterator[Any], prepared: Any) -> Iterator[Any]:
    """Yield the batches on the device of a prepared loader, as the loader itself moves them."""
    for batch in batches:
        moved = prepared._move_to_device(batch)
        prepared._wait_for_batch(moved)
        yield moved

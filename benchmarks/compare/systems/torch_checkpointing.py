"""torch_checkpointing: `CheckpointManager`, asynchronous.

What is replicated is written by rank 0: given to every rank, it would be written by each. Where
there is no GPU it stages without pinned memory by itself, and in both cases beside the next step.
O_DIRECT, its default, is off: 0.1.1 writes what is not aligned, and fails with EINVAL on ext4. It
does not fsync; so that the same is compared, that is done when its save is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.compare.systems.base import Pending, System, fsync_all
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from benchmarks.compare.training import Training

ITEMS = ("model", "optimizer")


class TorchCheckpointing(System):
    def begin(self, training: Training) -> None:
        super().begin(training)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = self._new(AsyncCheckpointSaverConfig())

    def _new(self, save: CheckpointSaverConfig) -> CheckpointManager:
        items = {
            name: ItemSpec(layout=LayoutInfo(f"{name}.pt", TorchSerialization()), required=False)
            for name in ITEMS
        }
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        return CheckpointManager.Config(items=items, save=save, storage_config=storage).build()

    @staticmethod
    def _state(training: Training) -> dict[str, Any]:
        return {
            "model": training.plain.state_dict(),
            "optimizer": training.optimizer.state_dict(),
        }

    def fence(self) -> AbstractContextManager[Any]:
        return self._manager.lock()

    def save(self) -> Pending:
        path = self.new_path()
        state = self._state(self.training) if self.rank == 0 else {}
        future = self._manager.save(str(path), state)

        def finish() -> None:
            future.result()
            if self.rank == 0:
                fsync_all(path)

        return Pending(finish)

    def end(self) -> None:
        self._manager.close()
        super().end()

    def restore(self, training: Training, *, memory: bool) -> None:
        training.materialise()
        manager = self._new(SyncCheckpointSaverConfig())  # no process is needed for reading
        into = self._state(training)
        loaded = manager.load(str(self.path), into=into)
        training.optimizer.load_state_dict(loaded["optimizer"])
        manager.close()


SYSTEM = TorchCheckpointing

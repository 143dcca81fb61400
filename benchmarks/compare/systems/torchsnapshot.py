"""torchsnapshot: `Snapshot.async_take`, which shares replicated state over the ranks by itself.

It does not fsync; so that the same is compared, that is done when its save is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torchsnapshot
from benchmarks.compare.systems.base import Pending, System, fsync_all

if TYPE_CHECKING:
    from benchmarks.compare.training import Training


class TorchSnapshot(System):
    def save(self) -> Pending:
        path, state = self.new_path(), self._state(self.training)
        snapshot = torchsnapshot.Snapshot.async_take(str(path), state, replicated=["**"])

        def finish() -> None:
            snapshot.wait()
            if self.rank == 0:
                fsync_all(path)

        return Pending(finish)

    @staticmethod
    def _state(training: Training) -> dict[str, torchsnapshot.Stateful]:
        return {"model": training.plain, "optimizer": training.optimizer}

    def restore(self, training: Training, *, memory: bool) -> None:
        torchsnapshot.Snapshot(str(self.path)).restore(self._state(training))


SYSTEM = TorchSnapshot

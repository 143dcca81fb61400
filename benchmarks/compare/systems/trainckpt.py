"""trainckpt through its public Checkpointer; a script asks for a save by `ckpt.save()`.

What it keeps in memory is deleted before a restore that is to read the disk.
"""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from benchmarks.compare.systems.base import Pending, System

import trainckpt
from trainckpt.save import copying
from trainckpt.storage.shared_memory import SharedMemoryDir, reclaim

if TYPE_CHECKING:
    from benchmarks.compare.training import Training

    from trainckpt.attempt.save_handle import SaveHandle

SPIN_S = 0.001
CHOOSE = copying.choose


class Trainckpt(System):
    """`copies` fixes the way to copy, PLAIN or OVERLAP; with None trainckpt chooses."""

    copies: str | None = None
    # the first makes the arena, two prove what they copy; then it tries two ways to copy, each
    # twice, and keeps the better one
    warm_saves = 8
    remembers = True

    def begin(self, training: Training) -> None:
        super().begin(training)
        copying.choose = CHOOSE if self.copies is None else lambda *_: self.copies
        self.checkpointer = self._attach(training, "never")
        self.checkpointer.resume()

    def _attach(self, training: Training, resume: str) -> trainckpt.Checkpointer:
        return trainckpt.Checkpointer(
            self.folder,
            model=training.model,
            optimizer=training.optimizer,
            every="never",
            keep_last=1,
            resume=resume,
        )

    def boundary(self) -> None:
        self.checkpointer.boundary()

    def save(self) -> Pending:
        handle = self.checkpointer.save()
        return Pending(lambda: handle.wait("durable"), lambda: taken(handle))

    def save_now(self) -> Pending:
        """It is taken at a boundary, so boundaries follow until it is."""
        handle = self.checkpointer.save()
        while not taken(handle):
            self.checkpointer.boundary()
            time.sleep(SPIN_S)
        handle.wait("durable")
        return Pending()

    def end(self) -> None:
        """Leave as a run that dies: what was saved stands."""
        self.checkpointer.__exit__(InterruptedError, InterruptedError("the turn is over"), None)
        del self.checkpointer
        super().end()

    def restore(self, training: Training, *, memory: bool) -> None:
        self.checkpointer = self._attach(training, "required")
        self.checkpointer.resume()
        self.checkpointer.boundary()  # here the last of the state is applied

    def restored(self) -> None:
        self.checkpointer.__exit__(InterruptedError, InterruptedError("it was read"), None)
        del self.checkpointer

    def empty_memory(self) -> None:
        place = SharedMemoryDir.found(str(self.folder))
        if place is not None:
            shutil.rmtree(place.root)

    def forget(self) -> None:
        """It deletes older snapshots itself."""

    def discard(self) -> None:
        super().discard()
        reclaim()


def taken(handle: SaveHandle) -> bool:
    """Whether the boundary at which it is captured has been passed, by all ranks the same one."""
    return handle.snapshot is not None or handle.error is not None


SYSTEM = Trainckpt

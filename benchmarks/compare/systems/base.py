"""What a system is asked for, in this order, by all ranks alike:

    begin     once, on a training whose optimizer has its state
    save      now and then between two steps; `fence` is around every optimizer step
    end       nothing is in flight any more, memory is given back
    restore   once, into a training that was just built
    discard   everything it wrote is deleted

Each turn of a system is one such sequence in a folder of its own.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from benchmarks.compare.training import Training


class Pending:
    """A save on its way: a thread waits until it is fsynced, and notes when.

    Args:
        finish: Returns once it is. Without it, it is fsynced already.
        taken: Whether training need not go on for it any more; alike on all ranks between two
            steps.
    """

    def __init__(
        self,
        finish: Callable[[], object] = lambda: None,
        taken: Callable[[], bool] = lambda: True,
    ) -> None:
        self.taken = taken
        self._thread = ThreadPoolExecutor(1)
        self._future = self._thread.submit(self._finish, finish)

    @staticmethod
    def _finish(finish: Callable[[], object]) -> float:
        finish()
        return time.perf_counter()

    def wait(self) -> float:
        """Returns the instant at which the save was fsynced (`time.perf_counter`)."""
        with self._thread:
            return self._future.result()


class System:
    """The base of all systems.

    Attributes:
        warm_saves: After how many saves in training it does what it will do from then on. The
            second may be the first into a second buffer.
        remembers: Whether `restore(memory=True)` reads from memory that outlives the process.
    """

    warm_saves = 2
    remembers = False

    def __init__(self, folder: Path) -> None:
        self.folder, self._saves, self.rank = folder, 0, dist.get_rank()

    def begin(self, training: Training) -> None:
        """Attach to a training."""
        self.training = training

    def boundary(self) -> None:
        """Between two steps."""

    def fence(self) -> AbstractContextManager[Any]:
        """Around the optimizer's step."""
        return nullcontext()

    def save(self) -> Pending:
        """Ask for a save, and do of it what training waits for."""
        raise NotImplementedError

    def save_now(self) -> Pending:
        """As `save`, while nothing else goes on."""
        return self.save()

    def end(self) -> None:
        """Let go of the training and of memory."""
        del self.training

    def restore(self, training: Training, *, memory: bool) -> None:
        """Read the newest save into `training`, which can go on then."""
        raise NotImplementedError

    def restored(self) -> None:
        """What `restore` returned from was measured: let go of it, as a run does that ends."""

    def empty_memory(self) -> None:
        """Rank 0: delete what `restore(memory=True)` reads."""

    def forget(self) -> None:
        """Rank 0: delete all saves but the newest, unless the system does so itself."""
        for number in range(self._saves):
            shutil.rmtree(self.folder / f"save{number}", ignore_errors=True)

    def discard(self) -> None:
        """Rank 0: delete everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- for systems that take a path for each save

    def new_path(self) -> Path:
        """A folder for the next save."""
        self._saves += 1
        return self.path

    @property
    def path(self) -> Path:
        """The newest save's folder."""
        return self.folder / f"save{self._saves}"


def fsync_all(folder: Path) -> None:
    """Fsync every file and folder in `folder`, for a system that does not."""
    for path in (folder, *folder.rglob("*")):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)

"""A process, leader of its own session, whose group is signalled around its loader workers.

`python -m tests.data.signalled START SIGNAL` prints how often the main process saw the signal after
each round and which workers lived through all of it. `... leave KIND` ends with workers running.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

from torch.utils.data import DataLoader

from tests.data.datasets import Plain
from trainckpt.data.loader import TrackedLoader


class Alarm:
    """Signals the group at its second call, when worker 0 is half born and worker 1 on its way."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == 2:
            os.killpg(os.getpgrp(), self.number)


class Alarming(Plain):
    """Rings whenever the main process pickles it for a worker."""

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm

    def __getstate__(self) -> dict[str, Any]:
        self.alarm()
        return self.__dict__


def signalled(start: str, number: int) -> None:
    seen: list[int] = []
    signal.signal(number, lambda got, _: seen.append(got))
    alarm = Alarm(number)
    if start == "fork":
        os.register_at_fork(after_in_parent=alarm)
    loader = DataLoader(
        Alarming(alarm),
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=start,
    )
    tracked = TrackedLoader(loader, name="train")
    batches = iter(tracked)
    next(batches)
    workers = tracked._source._persistent_iterator._workers
    counts = [len(seen)]
    for _ in range(2):
        os.killpg(os.getpgrp(), number)
        counts.append(len(seen))
        next(batches)
    rest = sum(1 for _ in batches)
    print(counts, rest, [worker.is_alive() for worker in workers])
    tracked.shutdown()
    print([worker.exitcode for worker in workers])


def leave(persistent: bool) -> None:
    loader = DataLoader(
        Plain(), num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    tracked = TrackedLoader(loader, name="train")
    batches = iter(tracked)
    next(batches)
    print([worker.pid for worker in tracked._source._last_iterator()._workers])
    sys.modules["kept until the very end"] = (tracked, batches)  # type: ignore[assignment]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "leave":
        leave(sys.argv[2] == "kept")
    else:
        signalled(sys.argv[1], getattr(signal, sys.argv[2]))

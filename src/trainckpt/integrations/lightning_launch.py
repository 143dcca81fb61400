"""Lightning's own ways with signals and processes, where a stop meets them.

Its SIGTERM handler runs a collective inside the handler, and its Slurm handler saves there: neither
is installed while a run lasts. A signal that Slurm was asked to send ahead of the time limit is a
notice like any other.

Its launcher starts the other ranks as children of rank 0, and every five seconds kills all of them,
rank 0 too, once a child has ended with anything but 0.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from trainckpt.integrations.lightning_needs import is_a

if TYPE_CHECKING:
    from contextlib import ExitStack

LINGER_S = 4.0  # below the time after which a process that was stopped ends itself
LOOK_S = 0.02


def take_over_requeue(trainer: Any, undo: ExitStack) -> None:
    """Hear the signal that Lightning's Slurm plugin would save and requeue at."""
    environment = trainer._accelerator_connector.cluster_environment
    wanted = getattr(environment, "requeue_signal", None)
    heard = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    on_main = threading.current_thread() is threading.main_thread()
    if wanted is None or wanted in heard or not on_main:
        return
    undo.callback(signal.signal, wanted, signal.getsignal(wanted))
    signal.signal(wanted, lambda *_: signal.raise_signal(signal.SIGUSR1))


def leave_together(trainer: Any) -> None:
    """After a stop, when everything is committed: no child ends before rank 0 expects it."""
    environment = trainer._accelerator_connector.cluster_environment
    if not is_a(environment, "LightningEnvironment") or trainer.world_size == 1:
        return
    if trainer.local_rank == 0:
        for thread in threading.enumerate():
            if is_a(thread, "_ChildProcessObserver"):
                thread._terminate_all = lambda: None  # type: ignore[attr-defined]
        return
    parent, until_s = os.getppid(), time.monotonic() + LINGER_S
    while os.getppid() == parent and time.monotonic() < until_s:
        time.sleep(LOOK_S)

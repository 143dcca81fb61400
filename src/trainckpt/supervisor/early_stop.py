"""A Slurm job that is stopped before its ranks could ask to be queued again.

Ranks ask to be queued again after their commit. Before they have begun there is nobody to ask: the
signal ends them while they import and build, and a job that leaves so counts as completed. So the
supervisor asks, of the first task alone. What runs next goes on where the run was, if there is one;
Slurm is told where there is none, since a job that is started again must find its run.
Likewise where the ranks were dumped instead of hearing the signal.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from trainckpt.format.dump import KIND as DUMP
from trainckpt.supervisor import recorded_options
from trainckpt.supervisor.verdict import START_AGAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.supervisor.signals import Inbox
    from trainckpt.supervisor.supervise import Ended

TASK_VARIABLE = "SLURM_PROCID"


def ask_to_be_queued_again(
    ended: Ended,
    inbox: Inbox,
    sleep: Callable[[float], object] = time.sleep,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Ask, where it is right and nobody else does. Main thread, while `inbox` hears signals.

    Args:
        ended: How the command ended.
        inbox: Knows the first signal.
        sleep: How to linger, see `lifecycle.stopping.requeue`.
        facts: Of the attempt that the command was to go on from, where it has none of its own.
    """
    outcome = (ended.record.outcome or {}) if ended.record is not None else {}
    begun = ended.record is not None and outcome.get("kind") != DUMP  # then ranks have asked
    begun = begun or ended.exit_code != START_AGAIN
    if begun or not inbox.first or os.environ.get(TASK_VARIABLE, "0") != "0":
        return
    from trainckpt.lifecycle.run.log import prepare
    from trainckpt.lifecycle.stopping.requeue import Requeue

    requeue = Requeue.of(os.environ)
    known = ended.record.facts if ended.record is not None else facts or {}
    if requeue is not None and recorded_options.read(known).requeue != "never":
        prepare()
        requeue.ask(inbox.first, sleep, has_begun=ended.record is not None)

"""Requeue: after a committed stop in a Slurm job, see to it that the job is started again.

    commit, record     all ranks
    ask                rank 0: what the job's state says, `scontrol requeue` where that is right
    linger             where the requeue is Slurm's own to do, and leaving would look like the end
    leave              all ranks, together: a launcher may kill the others once one has left

What is right is decided in preemption.slurm.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainckpt.lifecycle.log import logger
from trainckpt.lifecycle.place import PROVE_VARIABLE
from trainckpt.preemption import slurm
from trainckpt.preemption.notice import OF_MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINGER_S = 600.0


class Requeue:
    """Of the Slurm job that these processes belong to."""

    def __init__(self, job: str, scontrol: slurm.Scontrol) -> None:
        self._job, self._scontrol = job, scontrol

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Requeue | None:
        """None where this is no Slurm job, or a proof that stops its runs by itself."""
        job = slurm.job_to_requeue(environment)
        if job is None or environment.get(PROVE_VARIABLE):
            return None
        return cls(job, slurm.Scontrol(job, environment))

    def ask(self, reason: str, sleep: Callable[[float], object] = time.sleep) -> None:
        """Ask, and linger if that is right. One rank.

        Args:
            reason: Of the stop.
            sleep: How to linger; the process is killed meanwhile.
        """
        job = self._scontrol.show()
        todo = slurm.decide(reason, job, of_machine=reason.startswith(OF_MACHINE))
        if todo == slurm.REQUEUE:
            refused = self._scontrol.requeue()
            if not refused:
                logger.info("Slurm job %s is queued again", self._job)
                return
            logger.warning("Slurm did not queue job %s again: %s", self._job, refused)
            todo = slurm.after_refusal(reason, job)
        if todo == slurm.LINGER:
            logger.info("Slurm will end job %s; waiting for that, %g s at most", self._job,
                        LINGER_S)  # fmt: skip
            sleep(LINGER_S)

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

from trainckpt.lifecycle.places.place import PROVE_VARIABLE
from trainckpt.lifecycle.run.log import logger
from trainckpt.preemption import slurm
from trainckpt.preemption.notice import OF_MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINGER_S = 600.0
NOTE_S = 2.0  # a note that is lost costs a start by hand; a requeue that comes too late, the job


class Requeue:
    """Of the Slurm job that these processes belong to."""

    def __init__(
        self, job: str, scontrol: slurm.Scontrol, *, in_step: bool = True, restart: int = 0
    ) -> None:
        self._job, self._scontrol, self._in_step = job, scontrol, in_step
        self._restart = restart

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Requeue | None:
        """None where this is no Slurm job, or a proof that stops its runs by itself."""
        job = slurm.job_to_requeue(environment)
        if job is None or environment.get(PROVE_VARIABLE):
            return None
        in_step = slurm.STEP_VARIABLE in environment
        restart = slurm.restarts(environment)
        return cls(job, slurm.Scontrol(job, environment), in_step=in_step, restart=restart)

    def ask(
        self,
        reason: str,
        sleep: Callable[[float], object] = time.sleep,
        *,
        unbegun: str = "",
    ) -> None:
        """Ask, and linger if that is right. One rank.

        Args:
            reason: Of the stop.
            sleep: How to linger; the process is killed meanwhile.
            unbegun: A word for the command, if no run of it has begun in this start.
        """
        job = self._scontrol.show()
        of_machine = reason.startswith(OF_MACHINE)
        todo = slurm.decide(reason, job, of_machine=of_machine, in_step=self._in_step)
        before = self._note(job, unbegun) if unbegun and todo != slurm.LEAVE else None
        if self._queued_or_waited(reason, job, todo, sleep) or before is None:
            return
        # The job goes on, and may yet begin the run in this start.
        refused = self._scontrol.note(before)
        if refused:
            logger.warning("Slurm did not take back a note with job %s: %s", self._job, refused)

    def _queued_or_waited(
        self, reason: str, job: slurm.Job | None, todo: str, sleep: Callable[[float], object]
    ) -> bool:
        """Do it. Whether the job is queued again; else, after the wait if any, it goes on."""
        if todo == slurm.REQUEUE:
            refused = self._scontrol.requeue()
            if not refused:
                logger.info("Slurm job %s is queued again", self._job)
                return True
            logger.warning("Slurm did not queue job %s again: %s", self._job, refused)
            todo = slurm.after_refusal(reason, job, in_step=self._in_step)
        elif job is not None and job.state == slurm.UNKNOWN:
            logger.info("Slurm knows no job %s, so nothing is queued again", self._job)
        if todo == slurm.LINGER:
            why = "it is preempted" if job else f"it may be preempted: {self._scontrol.why}"
            logger.warning(
                "waiting to be ended by Slurm, %g s at most, since a job that leaves by itself is "
                "not queued again (%s); requeue='never' leaves at once", LINGER_S, why,
            )  # fmt: skip
            sleep(LINGER_S)
        return False

    def _note(self, job: slurm.Job | None, command: str) -> str | None:
        """Have the next start know that it begins the run. The comment before, if it was tried."""
        before = job.comment if job is not None else None
        if before is None or not slurm.began_nothing(before, self._restart, command):
            return None
        refused = self._scontrol.note(slurm.noted(before, self._restart + 1, command), NOTE_S)
        if refused:
            logger.warning(
                "Slurm did not note with job %s that its run has not begun (%s): if it is started "
                "again and finds no run, that is an error (66), and nothing is lost", self._job,
                refused,
            )  # fmt: skip
        return before

"""Have a Slurm job started again after a committed stop.

    commit, record     all ranks
    ask                rank 0: reads the job's state, runs `scontrol requeue` where appropriate
    linger             where Slurm itself requeues the job, and an exit would look like its end
    leave              all ranks, together: a launcher may kill the others once one has left

`preemption.slurm` decides between these.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.notice import OF_MACHINE
from trainckpt.preemption import slurm
from trainckpt.run_directory.run_url import PROVE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINGER_S = 600.0
NOTE_S = 2.0  # a note that is lost costs a start by hand; a requeue that comes too late, the job


class Requeue:
    """Requeue protocol of the Slurm job around these processes."""

    def __init__(
        self, job: str, scontrol: slurm.Scontrol, *, in_step: bool = True, restart: int = 0
    ) -> None:
        self._job, self._scontrol, self._in_step = job, scontrol, in_step
        self._restart = restart

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Requeue | None:
        """Return None outside a Slurm job, or in a proof, which stops its runs by itself."""
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
        """Ask for the requeue, and linger if appropriate. One rank.

        Args:
            reason: Reason of the stop.
            sleep: Sleeps while lingering; the process is killed meanwhile.
            unbegun: Hash of the command, if no run of it has begun in this start.
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
            logger.warning("Slurm did not remove the note from job %s: %s", self._job, refused)

    def _queued_or_waited(
        self, reason: str, job: slurm.Job | None, todo: str, sleep: Callable[[float], object]
    ) -> bool:
        """Requeue or linger. Return True if the job is queued again; else it goes on after the
        wait."""
        if todo == slurm.REQUEUE:
            refused = self._scontrol.requeue()
            if not refused:
                logger.info("Slurm job %s is queued again", self._job)
                return True
            logger.warning("Slurm did not queue job %s again: %s", self._job, refused)
            todo = slurm.after_refusal(reason, job, in_step=self._in_step)
        elif job is not None and job.state == slurm.UNKNOWN:
            logger.info("Slurm job %s is not queued again: Slurm does not know it", self._job)
        if todo == slurm.LINGER:
            why = "it is preempted" if job else f"it may be preempted: {self._scontrol.why}"
            logger.warning(
                "waiting at most %g s for Slurm to end the job (%s). Slurm does not queue a job "
                "again that leaves by itself; requeue='never' leaves at once",
                LINGER_S,
                why,
            )
            sleep(LINGER_S)
        return False

    def _note(self, job: slurm.Job | None, command: str) -> str | None:
        """Mark the job comment: the next start begins the run. Return the old comment if tried."""
        before = job.comment if job is not None else None
        if before is None or not slurm.began_nothing(before, self._restart, command):
            return None
        refused = self._scontrol.note(slurm.noted(before, self._restart + 1, command), NOTE_S)
        if refused:
            logger.warning(
                "Slurm job %s has no note that its run never began (%s). Its next start may end "
                "with 66; nothing is lost, so submit the script again",
                self._job,
                refused,
            )
        return before

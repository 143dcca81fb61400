"""Stop the ranks after the process that started them was killed: `trainckpt run`, or torchrun.

Without it a scheduler's signal reaches no rank, no restart follows, and a repeated command would
train beside the ranks. So they stop as at any notice: nothing is lost, and the run directory is
free. Where other agents of an elastic torchrun are left, they start ranks again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainckpt.attempt.rank_agent import agent_pid, is_orphan
from trainckpt.attempt.status_files import supervisor_died
from trainckpt.notice import OF_MACHINE, Notice, PolledSource

if TYPE_CHECKING:
    from pathlib import Path

REASON = "loss of `trainckpt run`, which started this"


class SupervisorLost(PolledSource):
    """Notice source for a lost supervisor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def poll(self) -> list[Notice]:
        """Return a stop, once the supervisor is gone."""
        return [Notice(REASON)] if supervisor_died(self._folder) else []


AGENT_REASON = "loss of torchrun, which started this rank"
# Prefixes of reasons that concern one host. An elastic launch goes on without it.
OF_ONE_HOST = (*OF_MACHINE, "SIG", REASON, AGENT_REASON)


class AgentLost(PolledSource):
    """Notice source for a lost agent of torchrun.

    It knows the agent as the parent of a process that leads a session, as torchrun's ranks do.
    Behind a wrapper that does not `exec` the script, it never has a notice.
    """

    def __init__(self) -> None:
        self._agent = agent_pid()
        self._is_lost = self._agent is not None and is_orphan()

    def poll(self) -> list[Notice]:
        """Return a stop, once this process has no agent, or another parent than at first."""
        is_lost = self._is_lost or self._agent not in (None, os.getppid())
        return [Notice(AGENT_REASON)] if is_lost else []

"""A dump brought back under a new supervisor: the same processes, as another attempt.

claim      the attempt that they become, its parent the dump: nobody restores it twice
restore    the tree is a child of this process; its output goes on to where ours goes
images     are deleted: the processes have gone on from them
watch      as if they had been launched here; what is started again after a failure is the command
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.attempt import FAILED
from trainckpt.format.dump import IMAGES
from trainckpt.lifecycle import attempt_number
from trainckpt.lifecycle.told import REFUSED
from trainckpt.process_dump import restore
from trainckpt.supervisor.adopted import Adopted
from trainckpt.supervisor.dumpable import outputs
from trainckpt.supervisor.flush_left import flush_left
from trainckpt.supervisor.launched import Launched
from trainckpt.supervisor.orders import starts_again
from trainckpt.supervisor.supervise import Ended, settle
from trainckpt.supervisor.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.dump import DumpRecord
    from trainckpt.supervisor.dumpable import Dumpable
    from trainckpt.supervisor.record import NamedRun
    from trainckpt.supervisor.signals import Inbox
    from trainckpt.tiers.local import LocalTier

LISTENS = "listens"  # in the record: the attempt under whose number the ranks look for notices


@dataclass(frozen=True)
class Dumped:
    """What is brought back, and as what.

    Attributes:
        tier: The run's place.
        record: The dump.
        named: The run, of which nothing is claimed yet.
        facts: Of the attempt that was dumped.
        dumpable: So that it can be dumped again.
        output: As `supervise` has it.
        has_agent: The tree's root is torchrun under our agent.
        max_restarts: How often the command is started again where it fails.
        key: Of its images, if they are encrypted.
    """

    tier: LocalTier
    record: DumpRecord
    named: NamedRun
    facts: Mapping[str, Any]
    dumpable: Dumpable
    output: Any = None
    has_agent: bool = True
    max_restarts: int = 0
    key: bytes = b""


def supervise_restored(dumped: Dumped, inbox: Inbox) -> Ended:
    """Bring it back, and look after it to its end. Main thread.

    Raises:
        UnusableSnapshot: it cannot be restored, or its ranks could not be made whole; the attempt
            says why, and nothing of it runs.
    """
    record, named = dumped.record, dumped.named
    claimed = named.claim_from(str(record.name), dumped.facts)
    if claimed is None:
        raise UnusableSnapshot(f"{record.name}: no attempt can be claimed: {named.problem}")
    folder = Path(record.folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with outputs(dumped.dumpable, folder, dumped.output) as logs:
            try:
                number = attempt_number.spell(claimed.attempt)
                restore.bring_back(dumped.tier, record, claimed.attempt, number, key=dumped.key)
            except UnusableSnapshot as error:
                verdict = Verdict(error.exit_code, FAILED, error.message)
                named.end((), verdict)
                raise
            dumped.dumpable.say(f"restored {record.name} as attempt {claimed.attempt}")
            with contextlib.suppress(OSError):
                shutil.rmtree(dumped.tier.root / record.name.folder / IMAGES)
            process = Adopted(record.root)
            launched = Launched(
                process, folder, inbox,
                has_agent=dumped.has_agent, ours=LISTENS in dumped.facts, named=named,
                dumping=dumped.dumpable.dumping(process, folder, logs, named),
            )  # fmt: skip
            course = launched.run()
        ranks = launched.told()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        named.close()
    # They know their attempt by the number under which they began.
    ranks = [replace(r, attempt=claimed.attempt) if r.attempt is not None else r for r in ranks]
    verdict, found, _, asked = settle(course, ranks, inbox, named)
    if any(told.how == REFUSED for told in ranks):
        raise UnusableSnapshot(f"{record.name} was brought back, but {verdict.why}")
    again = starts_again(verdict, done=0, most=dumped.max_restarts, signalled=asked)
    if found is not None and not again:
        say, url = dumped.dumpable.say, dumped.tier.url
        found = flush_left(found, ranks, inbox, os.environ, say, url)
    return Ended(verdict.exit_code, found, 0, verdict.why, again)

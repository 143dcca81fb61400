"""A resume in between whose restore and claim somebody else begins an attempt.

    python -m tests.process_dump.refused_resume PLACE DUMP

It runs below a process that takes its orphans, and waits for none of them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.process_dump.test_refusals import Slower
from trainckpt.format.dump import DumpName
from trainckpt.launcher.dumper import Dumpable
from trainckpt.launcher.processes import orphans_come_here
from trainckpt.launcher.restored_dump import AlreadyResumed, RestoredDump, supervise_restored
from trainckpt.launcher.supervisor_signals import Inbox
from trainckpt.process_dump import criu, process_tree, restore
from trainckpt.storage.local import LocalTier


def resume(place: str, name: str) -> None:
    tier = LocalTier(Path(place))
    record = restore.load(tier, "run", DumpName.parse(name))
    named = Slower(place, ["python"], tempfile.gettempdir(), 1)
    dumped = RestoredDump(tier, record, named, {}, Dumpable(criu.examine(), print))
    try:
        with Inbox() as inbox:
            supervise_restored(dumped, inbox)
    except AlreadyResumed as error:
        print(error.message)
    print("left:", process_tree.taken(record.tasks), flush=True)


if __name__ == "__main__":
    with orphans_come_here():
        if (child := os.fork()) == 0:
            resume(*sys.argv[1:])
            os._exit(0)
        os.waitpid(child, 0)

"""doctor: whether processes can be dumped here, tried with two small ones."""

from __future__ import annotations

from trainckpt.lifecycle.machine import Item
from trainckpt.process_dump import criu, toy

NAME = "process dumps"


def examine() -> Item:
    """One item; a run does without."""
    found = criu.examine()
    if found.why_not or found.program is None:
        return Item(NAME, ok=False, value=found.why_not, cure=found.cure, needed=False)
    trial = toy.run(found.program)
    if trial.why_not:
        return Item(NAME, ok=False, value=trial.why_not, cure=criu.INSTALL, needed=False)
    took = f"two processes were dumped in {trial.dump_s:.1f} s, restored in {trial.restore_s:.1f} s"
    return Item(NAME, ok=True, value=f"CRIU {found.version}: {took}", needed=False)

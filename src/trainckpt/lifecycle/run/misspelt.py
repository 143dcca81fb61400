"""Variables that look like those of an option and are read by nobody: said, with the name meant."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.options import TABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX, LIKENESS = "TRAINCKPT_", 0.8
# Read elsewhere, or set for whoever is launched.
_OTHERS = (
    "ACCEPT_OLDER", "CAN_DUMP", "COMMAND", "CRIU", "DUMPS", "MEMORY", "PROVE", "RESTART",
    "RESUME_AT", "RUN", "STARTED", "SUPERVISOR",
)  # fmt: skip


def misspelt(environment: Mapping[str, str]) -> list[str]:
    """One sentence for each; what resembles no name of ours is somebody else's. Pure."""
    known = {name.upper() for name in TABLE} | {*_OTHERS}
    found = []
    for variable in sorted(environment):
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in known:
            continue
        near = get_close_matches(name.upper(), sorted(known), n=1, cutoff=LIKENESS)
        if near:
            found.append(f"{variable} is read by nobody: {_PREFIX}{near[0]} is the option's name")
    return found

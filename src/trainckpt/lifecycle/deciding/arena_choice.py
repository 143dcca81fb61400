"""Which memory a rank's shard files are laid out in: a pure function of what there is.

two in shared memory    one holds the newest snapshot while the next is captured into the other
memory that is held     by the supervisor, where shared memory has no room for two: found there
                        by the next attempt under this supervisor
one in shared memory    the newest is overwritten while it stands in the run's place only
memory of its own       as fast; gone with the process
private memory          where the system has nothing better; as above, and not shared with the
                        process that writes beside the rank
none                    not even that fits the budget: training waits while the file is written
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ARENAS = 2
SHARED, HELD, OWN, PRIVATE, STREAMED = "shared", "held", "own", "private", "streamed"


@dataclass(frozen=True)
class Room:
    """What one rank may take.

    Attributes:
        budget: Bytes of memory for all its arenas, by the option and by what is left; None: nobody
            knows a limit.
        shared: Whether there is shared memory at all.
        shared_bytes: That are free there, what this rank has already included.
        beyond: What there is beside it: `HELD`, `OWN`, or "" for neither.
    """

    budget: int | None
    shared: bool
    shared_bytes: int = 0
    beyond: str = ""


def choose(room: Room, num_bytes: int) -> tuple[str, int]:
    """The kind of arenas for files of this size, and how many: pure."""
    budget = room.budget if room.budget is not None else MAX_ARENAS * num_bytes
    most = min(budget // num_bytes, MAX_ARENAS)
    shared = min(room.shared_bytes // num_bytes, most) if room.shared else 0
    # Nothing but the budget limits what lies in no file system.
    beyond = room.beyond if room.budget is not None else ""
    if shared < most and beyond == HELD:
        return HELD, most
    if shared:
        return SHARED, shared
    if most and beyond == OWN:
        return OWN, most
    return (PRIVATE, 1) if most else (STREAMED, 0)

"""How long an attempt that ends goes on copying to slower tiers: a pure function of what is known.

The snapshot is committed in the run's place by then. What is lost with the processes is none of
it; what is lost with the host is all of it, if the place lies on that host alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainckpt.lifecycle.deciding.stop_plan import CAUTION

UNLIMITED_S = 86400.0
UNASKED_S = 60.0  # where nobody says how long there is, and nobody else would do it


@dataclass(frozen=True)
class Leaving:
    """What is known when the ranks could leave.

    Attributes:
        left_s: Until the deadline; None: there is none.
        predicted_s: How long copying would take; 0: nothing waits; None: not measured.
        supervised: Somebody on this host copies what is left after the ranks have left.
        host_goes: The machine is taken away, and the run's place lies on it alone.
    """

    left_s: float | None
    predicted_s: float | None
    supervised: bool
    host_goes: bool


def flush_limit_s(leaving: Leaving) -> float:
    """Seconds; 0: leave at once, whoever comes next does it."""
    left_s = leaving.left_s
    if leaving.host_goes:
        return UNLIMITED_S if left_s is None else max(left_s, 0.0)
    if left_s is None:
        return 0.0 if leaving.supervised else UNASKED_S
    fits = leaving.predicted_s is not None and CAUTION * leaving.predicted_s <= left_s
    if not fits and (leaving.supervised or leaving.predicted_s is not None):
        return 0.0
    return max(left_s, 0.0)

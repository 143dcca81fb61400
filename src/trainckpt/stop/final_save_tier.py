"""Choose the tier of the final save: a pure function of its cause and of measurements.

    the processes go    shared memory outlives them, and so does the run directory
    the machine goes    its memory goes with it, and so does a run directory on it alone. Left are a
                        shared one, memory of other hosts (`redundancy`), unless more of them
                        must go than may be lost at once, and slower tiers

The run directory is chosen wherever it outlives the cause and the save fits into the time left;
else the fastest tier that does both. A missing copy there is made after the ranks have left, by
their supervisor (`launcher/finish_uploads.py`) or by the next attempt (`scavenge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import LOCAL
from trainckpt.attempt.stop_plan import CAUTION
from trainckpt.notice import OF_MACHINE
from trainckpt.preemption import kubernetes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MEMORY, PARTNER = "memory", "partner"
AWAY = "the machine is taken away"
SLURM_VARIABLE = "SLURM_JOB_ID"


@dataclass(frozen=True)
class TierOption:
    """Candidate tier for the final save.

    Attributes:
        tier: Its name.
        outlives_machine: A copy there is not lost with this machine.
        predicted_s: Until the save is there; None: nothing was measured.
    """

    tier: str
    outlives_machine: bool
    predicted_s: float | None


@dataclass(frozen=True)
class FinalTierChoice:
    """Chosen tier.

    Attributes:
        tier: Its name.
        predicted_s: Until the save is there; None: nothing was measured.
        why: In words.
    """

    tier: str
    predicted_s: float | None
    why: str

    def to_json(self, left_s: float | None) -> dict[str, Any]:
        """Return the choice for the attempt's record."""
        predicted, left = (None if s is None else round(s, 3) for s in (self.predicted_s, left_s))
        return {"tier": self.tier, "why": self.why, "predicted_s": predicted, "seconds_left": left}


def takes_machine(reason: str, environment: Mapping[str, str]) -> str:
    """Return why this machine's memory may be lost at this stop, or "".

    A pod takes its shared memory with it, and a Slurm job may begin again on other nodes.
    """
    if reason.startswith(OF_MACHINE):
        return AWAY
    if kubernetes.in_pod(environment):
        return "the pod takes its memory with it"
    if SLURM_VARIABLE in environment:
        return "the job may continue on other nodes"
    return ""


def choose_tier(
    machine_goes: str, left_s: float | None, options: Sequence[TierOption]
) -> FinalTierChoice:
    """Return the tier of the final save.

    Args:
        machine_goes: Result of `takes_machine`.
        left_s: Until the deadline; None: there is none.
        options: The candidates, the run directory first.
    """
    place = options[0]
    safe = [way for way in options if way.outlives_machine or not machine_goes]
    if place in safe and (left_s is None or place.predicted_s is None):
        why = "there is no deadline" if left_s is None else "no save was measured yet"
        return FinalTierChoice(place.tier, place.predicted_s, why)
    if place in safe and _fits(place, left_s):
        return FinalTierChoice(
            place.tier, place.predicted_s, f"it fits into the {left_s:.1f} s left"
        )
    fitting = [way for way in safe if way.predicted_s is not None and _fits(way, left_s)]
    fastest = min(fitting, key=lambda way: way.predicted_s or 0.0, default=None)
    if fastest is None:
        what = f"{machine_goes}, and nothing" if machine_goes else "nothing"
        more = "" if left_s is None else f" and fits into the {left_s:.1f} s left"
        return FinalTierChoice(place.tier, place.predicted_s, f"{what} else outlives that{more}")
    return FinalTierChoice(fastest.tier, fastest.predicted_s, _why(machine_goes, left_s, place))


def _why(machine_goes: str, left_s: float | None, place: TierOption) -> str:
    if machine_goes and not place.outlives_machine:
        return f"{machine_goes}: {place.tier} may be lost with it"
    took = f"{place.predicted_s:.1f} s" if place.predicted_s is not None else "longer"
    return f"{place.tier} would take about {took}, and {left_s:.1f} s are left"


def _fits(way: TierOption, left_s: float | None) -> bool:
    return left_s is None or way.predicted_s is None or CAUTION * way.predicted_s <= left_s


def tier_options(everyone: Sequence[Mapping[str, Any]]) -> list[TierOption]:
    """Return the candidates from all ranks' estimates (`FinalSave`); rank 0 adds the rest."""
    first = everyone[0]
    local_s = max(each["save_s"] for each in everyone) or None
    leaving = {each["leaving"] for each in everyone} - {""}
    others_stay = (
        first["machine_goes"] in ("", AWAY)  # a whole job or its pods go together
        and len(leaving) <= min(each["num_losses"] for each in everyone)
    )
    ways = [TierOption(LOCAL, outlives_machine=not first["place_goes"], predicted_s=local_s)]
    for tier, key in ((MEMORY, "memory_s"), (PARTNER, "partner_s")):
        estimates = [each[key] for each in everyone]
        if None not in estimates:
            outlives = tier == PARTNER and others_stay
            ways.append(TierOption(tier, outlives_machine=outlives, predicted_s=max(estimates)))
    for name, copy_s in first["slower"]:
        seconds = None if local_s is None or copy_s is None else local_s + copy_s
        ways.append(TierOption(name, outlives_machine=True, predicted_s=seconds))
    return ways

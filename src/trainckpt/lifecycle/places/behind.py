"""Behind: what the run's place has missed while the run went on from one of its slower tiers.

On a host's own disk a run leaves the place that it had there as it was when it went on elsewhere;
so does a backup that is put back. Before an attempt takes its number, what slower tiers know is
brought to the place. Rank 0 does it; a tier that does not answer is left out, as it is later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.lifecycle.places.slower import WHERE, where
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import histories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.lifecycle.places.reach import Reach
    from trainckpt.snapshot.histories import Theirs
    from trainckpt.tiers.base import Tier


@dataclass(frozen=True)
class Known:
    """What the place and all tiers that answer know.

    Attributes:
        records: Of the attempts.
        newest: The highest number of an attempt that a record or snapshot of a slower tier bears.
        tiers: Name and URL of the slower tiers that hold the run, as `Reach.look` tells them.
    """

    records: Mapping[int, AttemptRecord]
    newest: int
    tiers: list[list[str]]


def catch_up(
    reach: Reach, run: str, read: Callable[[], dict[int, AttemptRecord]], *, sure: bool
) -> Known:
    """Bring what the place lacks, and say so.

    Args:
        reach: The place, and its slower tiers.
        run: Id of the run.
        read: Reads the place's records.
        sure: What other places did is this run's, whatever their names.

    Raises:
        ConfigurationError: a tier that the options name holds what a copy of this run did.
        TierUnavailable: the place refused.
    """
    records, newest = read(), 0
    while True:
        tiers, brought = reach.look(run, records), False
        for tier in tuple(reach.answering):
            if (theirs := _theirs(reach, tier, records)) is None:
                continue
            try:
                _must_be_of(reach, theirs, sure=sure)
                written = histories.bring(reach.place, records, theirs)
            except ConfigurationError as error:
                if tier in reach.slower.tiers:
                    raise
                logger.warning("the tier %s is left out: %s", tier.name, error.message)
                reach.leave(tier)
                continue
            newest = max(newest, theirs.newest)
            if written:
                _say(reach, tier, written)
                records, brought = read(), True
        if not brought:  # else a newer attempt may have named other tiers
            answering = {tier.name for tier in reach.answering}
            return Known(records, newest, [told for told in tiers if told[0] in answering])


def _theirs(reach: Reach, tier: Tier, records: Mapping[int, AttemptRecord]) -> Theirs | None:
    try:
        return histories.read_theirs(tier, records)
    except TrainckptError as error:
        reach.leave(tier, error.message)
        return None


def _must_be_of(reach: Reach, theirs: Theirs, *, sure: bool) -> None:
    """Refuse what a run at another place has done: that one, or this, is a copy."""
    told = [r.facts[WHERE] for _, r in sorted(theirs.records.items()) if WHERE in r.facts]
    if sure or not theirs.saved or not told or told[-1] == where(reach.place):
        return
    raise ConfigurationError(
        f"the tier {theirs.tier.name} at {theirs.tier.url} holds attempts of the run at "
        f"{str(told[-1])[:200]} that {reach.place.url} lacks: one of the two is a copy of the "
        "other",
        hint="name other tiers for a copy that goes its own way ({run} in a URL stands for the "
        "name of its place); or, to go on from here with what that run did, resume='required'",
    )


def _say(reach: Reach, tier: Tier, written: list[int]) -> None:
    numbers = ", ".join(map(str, sorted(written)))
    logger.warning(
        "%s was behind: the tier %s told it of the attempts %s", reach.place.url, tier.name, numbers
    )

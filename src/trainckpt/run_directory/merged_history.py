"""Merge into the run directory the attempts made elsewhere, from the slower tiers' records.

On a host's own disk a run leaves its old run directory unchanged when it continues elsewhere; a
restored backup is as outdated. Before an attempt takes its number, rank 0 copies the slower tiers'
records to the run directory. A tier that does not answer is left out, as it is later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.run_directory.tier_config import WHERE, where
from trainckpt.snapshot import attempt_history

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.run_directory.tier_set import TierSet
    from trainckpt.snapshot.attempt_history import OtherHistory
    from trainckpt.storage.base import Tier


@dataclass(frozen=True)
class MergedHistory:
    """Merged history of the run directory and all responding tiers.

    Attributes:
        records: Records of the attempts.
        newest: The highest attempt number in a record or snapshot of a slower tier.
        tiers: Name and URL of the slower tiers with this run, as returned by `TierSet`.
    """

    records: Mapping[int, AttemptRecord]
    newest: int
    tiers: list[list[str]]


def catch_up(
    reach: TierSet, run: str, read: Callable[[], dict[int, AttemptRecord]], *, sure: bool
) -> MergedHistory:
    """Copy missing records to the run directory, and log it.

    Args:
        reach: The run directory, and its slower tiers.
        run: Id of the run.
        read: Reads the run directory's records.
        sure: Attempts at other places belong to this run, whatever their names.

    Raises:
        ConfigurationError: a tier named by the options holds attempts of a copy of this run.
        TierUnavailable: the run directory refused.
    """
    records, newest = read(), 0
    while True:
        tiers, brought = reach.look(run, records), False
        for tier in tuple(reach.answering):
            if (theirs := _theirs(reach, tier, records)) is None:
                continue
            try:
                _must_be_of(reach, theirs, sure=sure)
                written = attempt_history.bring(reach.place, records, theirs)
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
            return MergedHistory(records, newest, [told for told in tiers if told[0] in answering])


def _theirs(
    reach: TierSet, tier: Tier, records: Mapping[int, AttemptRecord]
) -> OtherHistory | None:
    try:
        return attempt_history.read_theirs(tier, records)
    except TrainckptError as error:
        reach.leave(tier, error.message)
        return None


def _must_be_of(reach: TierSet, theirs: OtherHistory, *, sure: bool) -> None:
    """Refuse attempts of a run at another place: that one, or this, is a copy."""
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


def _say(reach: TierSet, tier: Tier, written: list[int]) -> None:
    numbers = ", ".join(map(str, sorted(written)))
    logger.warning(
        "%s was behind: the tier %s told it of the attempts %s", reach.place.url, tier.name, numbers
    )

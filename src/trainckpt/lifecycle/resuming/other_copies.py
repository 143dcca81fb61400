"""Other copies: a candidate's copy was not good, so all its copies are looked through, once.

    every rank   reads its share of the files, in one tier after the other, until a copy is good
    all          bring what they found: from where each file is read now, or that there is none

Whole files are compared with the digests in the manifest, whatever the first reading failed of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import TierUnavailable, TrainckptError
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.verify import check_file, files_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.ladder import Ladder


def find_good_copies(
    ladder: Ladder, manifest: Manifest | None, channel: Channel
) -> tuple[dict[str, int] | None, list[str]]:
    """From which tier to read which file, the nearest good copy of each. Every rank calls it.

    Args:
        ladder: From where it was read.
        manifest: Of the candidate, if this rank could read it.
        channel: Fresh keys.

    Returns:
        Key -> number of the tier; None if nothing would be read from elsewhere than it was, or if
        some file has no good copy. And why each copy that is passed over is not good.

    Raises:
        TierUnavailable: on all ranks: a file has no good copy where one could look, and some tier
            did not answer.
    """
    mine: dict[str, Any] = {
        "chosen": {}, "bad": [], "silent": "", "lost": manifest is None, "other": False,
    }  # fmt: skip
    files = list(files_of(manifest)) if manifest is not None else []
    for number, (key, file) in enumerate(files):
        if number % channel.world.size == channel.world.rank:
            _look(ladder.tiers, key, file, mine)
            mine["other"] |= mine["chosen"].get(key, 0) != _nearest(ladder, key)
    everyone = channel.gather("copies", mine, RANKS_TIMEOUT_S)
    bad = [reason for each in everyone for reason in each["bad"]]
    if any(each["lost"] for each in everyone):
        silent = next((each["silent"] for each in everyone if each["silent"]), "")
        if silent:
            raise TierUnavailable(f"{silent}; and elsewhere: {'; '.join(bad)[:500]}")
        return None, bad
    if not any(each["other"] for each in everyone):
        return None, bad
    if channel.world.rank == 0:
        for reason in bad[:16]:
            logger.warning("not used: %s", reason)
    return {key: at for each in everyone for key, at in each["chosen"].items()}, bad


def _nearest(ladder: Ladder, key: str) -> int:
    try:
        return ladder.number_of(key)
    except TrainckptError:
        return -1  # it was read from nowhere


def _look(tiers: Sequence[Tier], key: str, file: FileEntry, found: dict[str, Any]) -> None:
    """Find the nearest good copy of one file, and note why others are not."""
    for number, tier in enumerate(tiers):
        try:
            why = check_file(tier, key, file)
        except TierUnavailable as error:
            found["silent"] = why = error.message
        except TrainckptError as error:
            why = error.message
        if not why:
            found["chosen"][key] = number
            return
        found["bad"].append(f"{key} in {tier.name}: {why}")
    found["lost"] = True

"""Read together what several ranks hold columns of: agree on it, find each other, read, compare.

every rank   has read what it reads alone, and brought what it offers to read with others
all          a group reads together if all of its members offer the same; every rank knows that
             of every group from what was brought, so all come here, or none
BARRIER      the groups have found each other, or read alone: no network, no shared read
members      read, verify, send; a failure reaches whoever waited for the bytes
all          bring the result, as after any read (`resume`)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.ranks.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.lifecycle.resuming.read_state import Reading
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.shared_read import Refusal, SharedRead

    Offers = Mapping[str, str]  # a group's key -> its digest


def offers(reading: Reading) -> dict[str, str]:
    """What this rank could read together with others."""
    return {part.group.key: part.offer for part in reading.shared}


def read_together(reading: Reading, channel: Channel, everyone: Sequence[Offers]) -> Refusal | None:
    """Read all that is left of a snapshot. Every rank calls it, also those with nothing left.

    Args:
        reading: As far as this rank has come alone.
        channel: For this snapshot only.
        everyone: What each rank offers.

    Returns:
        Why this rank did not get all it needs; None: it did.

    Raises:
        UnusableSnapshot, TierUnavailable: of what this rank reads alone after all.
        NoAgreement: a rank is gone.
    """
    agreed = [part for part in reading.shared if _is_agreed(part, everyone)]
    with contextlib.ExitStack() as stack:
        found: dict[str, Any] = {}
        for part in agreed:
            with contextlib.suppress(NoAgreement):
                members = part.group.members
                made = Exchange(channel, part.group.key, members, RANKS_TIMEOUT_S)
                stack.callback(made.close)
                found[part.group.key] = made
        connected = channel.gather("connected", sorted(found), RANKS_TIMEOUT_S)
        refusal: Refusal | None = None
        for part in agreed:
            group = part.group
            if all(group.key in connected[rank] for rank in group.members):
                refused = part.read(found[group.key], reading.destination)
                refusal = refusal or refused
                reading.shared.remove(part)
    left = {tensor.name for part in reading.shared for tensor in part.group.tensors}
    if left and refusal is None:
        logger.warning("each rank reads whole rows of %d tensors: they could not be read together "
                       "with the ranks that hold other columns of them", len(left))  # fmt: skip
        reading.read_alone(left)
        reading.shared.clear()
    return refusal


def _is_agreed(part: SharedRead, everyone: Sequence[Offers]) -> bool:
    group = part.group
    told = {everyone[rank].get(group.key) for rank in group.members}
    return bool(part.offer) and told == {part.offer}

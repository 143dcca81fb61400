"""Where a run can live: in a directory, or in an object store.

What the two do differently beyond the contract of a tier is asked for by their kind, where it is
needed: files of the run that are no records (notices, heartbeats, a crash's last words), what the
place can do, and how long a call may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.object_store import ObjectStoreTier

if TYPE_CHECKING:
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.breaker import Health

Place = LocalTier | ObjectStoreTier


def health_of(tier: Tier) -> Health | None:
    """Whether calls to it go through, as far as this process knows; None: it is no store."""
    return tier.health() if isinstance(tier, ObjectStoreTier) else None

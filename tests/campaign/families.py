"""The families of cases, and what a seed of each stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign import cases, layouts, one_rank, reshard

if TYPE_CHECKING:
    from tests.campaign.cases import Case
    from tests.campaign.reshard import Chain

RANDOM, ONE_RANK, LAYOUTS, RESHARD = "random", "one-rank", "layouts", "reshard"
FAMILIES = {  # with all files that draw
    RANDOM: [cases],
    ONE_RANK: [one_rank, cases],
    LAYOUTS: [layouts, cases],
    RESHARD: [reshard, cases],
}


def draw(family: str, seed: int) -> Case | Chain:
    """The case of this seed."""
    return FAMILIES[family][0].draw(seed)


def drawn_by(family: str) -> str:
    """A digest of the files that draw: with others a seed stands for another case."""
    text = b"".join(Path(module.__file__).read_bytes() for module in FAMILIES[family])
    return hashlib.sha256(text).hexdigest()[:8]


def of(line: dict) -> str:
    """The family of a line of the results."""
    return line.get("family", RANDOM)  # lines older than the second family do not say

"""The families of cases, and what a seed of each stands for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaign import cases, one_rank

if TYPE_CHECKING:
    from tests.campaign.cases import Case

RANDOM, ONE_RANK = "random", "one-rank"
FAMILIES = {RANDOM: [cases], ONE_RANK: [one_rank, cases]}  # with all files that draw


def draw(family: str, seed: int) -> Case:
    """The case of this seed."""
    return FAMILIES[family][0].draw(seed)


def drawn_by(family: str) -> str:
    """A digest of the files that draw: with others a seed stands for another case."""
    text = b"".join(Path(module.__file__).read_bytes() for module in FAMILIES[family])
    return hashlib.sha256(text).hexdigest()[:8]


def of(line: dict) -> str:
    """The family of a line of the results."""
    return line.get("family", RANDOM)  # lines older than the second family do not say

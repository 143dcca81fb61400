"""Plan the copies or parities of shard files over the ranks, so that no lost host loses data.

    partner    a rank of another failure domain stores a copy
    parity     ranks of different domains form a set. Each stores its own file, and parities of
               the others' chunks; as many members can be lost as there are parities

Every plan is a pure function of all ranks' failure domains, so all ranks compute the same one.

In a set of n members with m parities a file is cut into k = n - m chunks. A stripe takes one
element of every member, a chunk or a parity. Stripes are rotated, so every member stores the same
number of parities:

    n = 4, m = 1    member 0   1   2   3          element of member i in stripe s: (i - s) mod n,
    stripe 0               P   c0  c1  c2         the first m of which are parities
    stripe 1               c2  P   c0  c1
    stripe 2               c1  c2  P   c0
    stripe 3               c0  c1  c2  P
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.format.parity_file import MAX_PARITIES
from trainckpt.snapshot.parity import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTHING, PARTNER, PARITY = "none", "partner", "parity"
_XOR = re.compile(r"xor:([0-9]{1,3})")
_CODE = re.compile(r"rs:([0-9]{1,3})\+([0-9]{1,3})")


@dataclass(frozen=True)
class RedundancySpec:
    """The parsed option `redundancy`.

    Attributes:
        kind: `NOTHING`, `PARTNER` or `PARITY`.
        num_members: Members of a set, parities included.
        num_parity: Members of a set that may be lost.
        text: As typed.
    """

    kind: str = NOTHING
    num_members: int = 0
    num_parity: int = 0
    text: str = NOTHING


def parse_redundancy(text: str) -> RedundancySpec:
    """Parse the option `redundancy`.

    Raises:
        ValueError: unknown or impossible.
    """
    if text in (NOTHING, PARTNER):
        return RedundancySpec(text, num_parity=int(text == PARTNER), text=text)
    if match := _XOR.fullmatch(text):
        num_members, num_parity = int(match[1]), 1
    elif match := _CODE.fullmatch(text):
        num_members, num_parity = int(match[1]) + int(match[2]), int(match[2])
    else:
        raise ValueError(text)
    is_code = 1 <= num_parity <= MAX_PARITIES and num_parity < num_members <= MAX_MEMBERS
    if not is_code:
        raise ValueError(text)
    return RedundancySpec(PARITY, num_members, num_parity, text)


@dataclass(frozen=True)
class CodedSet:
    """Ranks able to compute each other's files.

    Attributes:
        members: One rank from each of as many domains.
        num_own: The first so many bring their file; the rest only help, as their file is in another
            set.
        num_parity: Members that may be lost.
    """

    members: tuple[int, ...]
    num_own: int
    num_parity: int

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks each file is cut into."""
        return len(self.members) - self.num_parity

    def chunk_bytes(self, longest: int) -> int:
        """Return the length of every chunk and parity, given the longest file's bytes."""
        return -(-longest // self.num_chunks)

    def element(self, place: int, stripe: int) -> int:
        """Return the element of a member in a stripe: a parity if below `num_parity`, else a chunk.

        The chunk's number is the element minus `num_parity`.
        """
        return (place - stripe) % len(self.members)


@dataclass(frozen=True)
class RedundancyPlan:
    """Assignment of copies and parities to ranks.

    Attributes:
        partners: By rank, the rank storing its copy; empty: no copies.
        sets: In the order in which a rank in several takes part in them.
        num_losses: Domains that can be lost at once; 0: none.
        warnings: Reasons why it is less than requested.
    """

    partners: tuple[int, ...] = ()
    sets: tuple[CodedSet, ...] = ()
    num_losses: int = 0
    warnings: tuple[str, ...] = ()

    def kept_by(self, rank: int) -> list[int]:
        """Return the ranks whose copies this rank stores."""
        return [owner for owner, partner in enumerate(self.partners) if partner == rank]


def make_plan(spec: RedundancySpec, domains: Sequence[str]) -> RedundancyPlan:
    """Assign partners or sets.

    Args:
        spec: The requested redundancy.
        domains: The failure domain of each rank.
    """
    if spec.kind == NOTHING:
        return RedundancyPlan()
    num_domains = len(set(domains))
    if num_domains < 2:
        where = domains[0] if domains else "none"
        needs = f"redundancy={spec.text!r} needs ranks on two hosts or more"
        return RedundancyPlan(warnings=(f"{needs}, all are on {where}: no copies are made",))
    if spec.kind == PARTNER:
        return RedundancyPlan(_partners(domains), num_losses=1)
    num_parity = min(spec.num_parity, num_domains - 1)
    num_members = max(min(spec.num_members, num_domains), num_parity + 1)
    found = []
    if num_parity < spec.num_parity:
        found.append(
            f"redundancy={spec.text!r}: {num_domains} hosts survive the loss of {num_parity}, "
            f"not of {spec.num_parity}"
        )
    sets = _sets(domains, num_members, num_parity)
    return RedundancyPlan((), sets, num_parity, tuple(found))


def _by_domain(domains: Sequence[str]) -> list[int]:
    """Return all ranks, grouped by domain, the largest domain first."""
    sizes, first = Counter(domains), dict[str, int]()
    for rank, domain in enumerate(domains):
        first.setdefault(domain, rank)
    return sorted(range(len(domains)), key=lambda r: (-sizes[domains[r]], first[domains[r]], r))


def _partners(domains: Sequence[str]) -> tuple[int, ...]:
    """Assign one copy to each rank, as long as no domain has more than half of all ranks."""
    line, most = _by_domain(domains), max(Counter(domains).values())
    partners = [0] * len(line)
    if 2 * most <= len(line):
        for at, rank in enumerate(line):
            partners[rank] = line[(at + most) % len(line)]
        return tuple(partners)
    large, others = line[:most], line[most:]
    for at, rank in enumerate(large):
        partners[rank] = others[at % len(others)]
    for at, rank in enumerate(others):
        partners[rank] = large[at]
    return tuple(partners)


def _sets(domains: Sequence[str], num_members: int, num_parity: int) -> tuple[CodedSet, ...]:
    """Put each rank's file in one set; sets that are too small get helpers from other sets."""
    most = max(Counter(domains).values())
    number = max(-(-len(domains) // num_members), most)
    dealt: list[list[int]] = [[] for _ in range(number)]
    for at, rank in enumerate(_by_domain(domains)):
        dealt[at % number].append(rank)
    helped: Counter[int] = Counter()
    found = []
    for own in dealt:
        members = sorted(own)
        while len(members) < num_parity + 1:
            members.append(_helper(domains, members, helped))
        found.append(CodedSet(tuple(members), len(own), num_parity))
    return tuple(found)


def _helper(domains: Sequence[str], members: Iterable[int], helped: Counter[int]) -> int:
    taken = {domains[rank] for rank in members}
    free = (rank for rank in range(len(domains)) if domains[rank] not in taken)
    chosen = min(free, key=lambda rank: (helped[rank], rank))
    helped[chosen] += 1
    return chosen

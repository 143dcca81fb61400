"""Redundancy: which rank keeps what of whose shard file, so that losing a host loses nothing.

    partner    a rank of another failure domain holds a copy of it
    parity     ranks of as many domains form a set: each holds its own file, and parities of parts
               of the others' files; so many members can be lost as there are parities

Everything in here is a plan, computed from the failure domain of every rank and nothing else, so
all ranks compute the same.

In a set of n members with m parities a file is cut into k = n - m chunks. A stripe takes one
element of every member, a chunk or a parity; the stripes are turned against each other, so that
every member holds as many parities as any other:

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

from trainckpt.snapshot.parity import MAX_MEMBERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NOTHING, PARTNER, PARITY = "none", "partner", "parity"
_XOR = re.compile(r"xor:([0-9]{1,3})")
_CODE = re.compile(r"rs:([0-9]{1,3})\+([0-9]{1,3})")


@dataclass(frozen=True)
class Wish:
    """What the user asked for.

    Attributes:
        kind: `NOTHING`, `PARTNER` or `PARITY`.
        num_members: Of a set, its parities included.
        num_parity: How many of a set may be lost.
        text: As it was typed.
    """

    kind: str = NOTHING
    num_members: int = 0
    num_parity: int = 0
    text: str = NOTHING


def parse_wish(text: str) -> Wish:
    """The option `redundancy`.

    Raises:
        ValueError: it says nothing that there is.
    """
    if text in (NOTHING, PARTNER):
        return Wish(text, num_parity=int(text == PARTNER), text=text)
    if match := _XOR.fullmatch(text):
        num_members, num_parity = int(match[1]), 1
    elif match := _CODE.fullmatch(text):
        num_members, num_parity = int(match[1]) + int(match[2]), int(match[2])
    else:
        raise ValueError(text)
    if num_parity < 1 or not num_parity < num_members <= MAX_MEMBERS:
        raise ValueError(text)
    return Wish(PARITY, num_members, num_parity, text)


@dataclass(frozen=True)
class CodedSet:
    """Ranks that can compute each other's files.

    Attributes:
        members: One of each of as many domains.
        num_own: The first so many bring their file; the rest only help, theirs is in another set.
        num_parity: How many may be lost.
    """

    members: tuple[int, ...]
    num_own: int
    num_parity: int

    @property
    def num_chunks(self) -> int:
        """Into which each file is cut."""
        return len(self.members) - self.num_parity

    def chunk_bytes(self, longest: int) -> int:
        """Length of every chunk and every parity, where the longest file has so many bytes."""
        return -(-longest // self.num_chunks)

    def element(self, place: int, stripe: int) -> int:
        """What the member at this place has in a stripe: a parity below `num_parity`, or a chunk.

        The chunk's number is what is left after `num_parity` was taken off.
        """
        return (place - stripe) % len(self.members)


@dataclass(frozen=True)
class Plan:
    """Who keeps what of whom.

    Attributes:
        partners: Of every rank, the one that holds its copy; empty: there are none.
        sets: In the order in which a rank that is in several takes part in them.
        num_losses: How many domains can be lost at once; 0: none.
        warnings: Where it is less than was asked for.
    """

    partners: tuple[int, ...] = ()
    sets: tuple[CodedSet, ...] = ()
    num_losses: int = 0
    warnings: tuple[str, ...] = ()

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose copies this one holds."""
        return [owner for owner, partner in enumerate(self.partners) if partner == rank]


def make_plan(wish: Wish, domains: Sequence[str]) -> Plan:
    """Deal out partners or sets.

    Args:
        wish: What is wanted.
        domains: The failure domain of each rank.
    """
    if wish.kind == NOTHING:
        return Plan()
    num_domains = len(set(domains))
    if num_domains < 2:
        where = domains[0] if domains else "none"
        needs = f"redundancy={wish.text!r} needs ranks on two hosts or more"
        return Plan(warnings=(f"{needs}, all are on {where}: nothing is kept twice",))
    if wish.kind == PARTNER:
        return Plan(_partners(domains), num_losses=1)
    num_parity = min(wish.num_parity, num_domains - 1)
    num_members = max(min(wish.num_members, num_domains), num_parity + 1)
    found = []
    if num_parity < wish.num_parity:
        found.append(f"redundancy={wish.text!r}: of {num_domains} hosts only {num_parity} may be "
                     f"lost at once, not {wish.num_parity}")  # fmt: skip
    sets = _sets(domains, num_members, num_parity)
    return Plan((), sets, num_parity, tuple(found))


def _by_domain(domains: Sequence[str]) -> list[int]:
    """All ranks, those of one domain beside each other, the largest domain first."""
    sizes, first = Counter(domains), dict[str, int]()
    for rank, domain in enumerate(domains):
        first.setdefault(domain, rank)
    return sorted(range(len(domains)), key=lambda r: (-sizes[domains[r]], first[domains[r]], r))


def _partners(domains: Sequence[str]) -> tuple[int, ...]:
    """Everybody holds one copy, as long as no domain has more than half of all ranks."""
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
    """Each rank in one set with its file; sets that are too small get help from others."""
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

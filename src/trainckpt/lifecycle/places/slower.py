"""The slower tiers of a run: which there are, what they are called, which of them is durable.

The run's place is the tier "local": the home of the run's records, and where each snapshot is
committed first. Each slower tier, nearest first, holds copies of snapshots under the same names
and a copy of the records, so that the run can go on from any of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.lifecycle.places import place
from trainckpt.lifecycle.run import launch
from trainckpt.lifecycle.run.options import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Tier

TIERS, DURABLE, COMMITS = "tiers", "durable", "tier_commits"  # in an attempt's record
TROUBLE = "tier_trouble"  # there too: tier -> what its flusher has met
WHERE = "where"  # the run's place, in an attempt's record
RUN_FIELD = "{run}"
_TAKEN = (LOCAL, "memory", "staged", "partner", "durable")


@dataclass(frozen=True)
class Slower:
    """The slower tiers, opened; nothing was asked of them yet.

    Attributes:
        tiers: Nearest first; each has a name of its own.
        durable: Name of the tier that the moment "durable" means.
    """

    tiers: tuple[Tier, ...] = ()
    durable: str = LOCAL

    def to_facts(self) -> dict[str, Any]:
        """For the attempt's record; secrets in URLs are left out."""
        told = [{"name": t.name, "url": launch.redact_text(t.url)} for t in self.tiers]
        return {TIERS: told, DURABLE: self.durable} if told else {}


def open_slower(urls: Sequence[str], durable: str | None, local: Tier) -> Slower:
    """The tiers at these URLs, for the run at `local`.

    Raises:
        ConfigurationError: a URL cannot be opened, two are one place, or none is called `durable`.
    """
    if os.environ.get(place.PROVE_VARIABLE):
        return Slower()  # a proof leaves the user's own tiers alone
    tiers: list[Tier] = []
    seen = {_place(local): LOCAL}
    called: dict[str, str] = {LOCAL: LOCAL, local.url: LOCAL}
    for number, url in enumerate(urls):
        tier = _open(url, local)
        if (found := _place(tier)) in seen:
            raise ConfigurationError(
                f"tiers: {launch.redact_text(url)} is the place of the tier {seen[found]}",
                hint="name each place once, and not the run's own",
            )
        tier.name = _free_name(url, [t.name for t in tiers], number)
        tiers.append(tier)
        seen[found] = tier.name
        called.update({tier.name: tier.name, url: tier.name, tier.url: tier.name})
    if durable is not None and durable not in called:
        raise ConfigurationError(
            f"durable={launch.redact_text(durable)!r} is none of this run's tiers",
            hint=f"one of {', '.join([LOCAL, *(t.name for t in tiers)])}",
        )
    last = tiers[-1].name if tiers else LOCAL
    return Slower(tuple(tiers), last if durable is None else called[durable])


def recorded(
    records: Mapping[int, AttemptRecord], local: Tier, known: Iterable[Tier] = ()
) -> tuple[tuple[Tier, ...], list[str]]:
    """Tiers that the newest attempt which had any has recorded, beside those that are known.

    Returns:
        The tiers, and the names of those whose URL holds a secret that was not stored.
    """
    found: list[Tier] = []
    unknown: list[str] = []
    names = {tier.name for tier in known}
    if os.environ.get(place.PROVE_VARIABLE):
        return (), []
    there = {_place(t) for t in known} | {_place(local)}
    for name, url in _told(records):
        if launch.REDACTED in url:
            unknown += [name] if name not in names else []
            continue
        tier = place.open_other_place(url)
        if _place(tier) not in there:
            tier.name = name
            found.append(tier)
    return tuple(found), unknown


def newest_commits(records: Mapping[int, AttemptRecord]) -> dict[str, dict[int, str]]:
    """Tier -> attempt -> the newest snapshot that it committed there."""
    found: dict[str, dict[int, str]] = {}
    for number, record in records.items():
        commits = record.facts.get(COMMITS)
        for name, snapshot in commits.items() if isinstance(commits, dict) else ():
            if isinstance(snapshot, str):
                found.setdefault(name, {})[number] = snapshot
    return found


def is_copy(records: Mapping[int, AttemptRecord], tier: Tier) -> bool:
    """Whether this is one of the slower tiers of the run whose records it holds."""
    here = where(tier)
    return any(here == (url if "://" in url else os.path.abspath(url))  # noqa: PTH100
               for _, url in _told(records))  # fmt: skip


def _told(records: Mapping[int, AttemptRecord]) -> list[tuple[str, str]]:
    for _, record in sorted(records.items(), reverse=True):
        told = record.facts.get(TIERS)
        if isinstance(told, list) and told:
            pairs = [(t.get("name"), t.get("url")) for t in told if isinstance(t, dict)]
            return [(n, u) for n, u in pairs if isinstance(n, str) and isinstance(u, str)]
    return []


def where(place: Tier) -> str:
    """The run's place as a record names it: a whole path, or a URL without secrets."""
    is_url = "://" in place.url
    return launch.redact_text(place.url) if is_url else os.path.abspath(place.url)  # noqa: PTH100


def _place(tier: Tier) -> str:
    """Names its place, as far as that can be known without a look at it: it may hang."""
    return tier.url if "://" in tier.url else os.path.normpath(tier.url)


def _open(url: str, local: Tier) -> Tier:
    name = PurePosixPath(local.url.replace("\\", "/")).name
    return place.open_other_place(url.replace(RUN_FIELD, name))


def _free_name(url: str, taken: Sequence[str], number: int) -> str:
    """What a tier is called: by its protocol, or the last folder of its path."""
    protocol, colon, rest = url.partition("://")
    is_path = not colon or protocol in ("file", LOCAL)
    last = PurePosixPath((rest if colon else url).replace(RUN_FIELD, "").rstrip("/")).name
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last if is_path else protocol).strip("-.")
    name = name if name and name not in _TAKEN else f"tier{number + 1}"
    same = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in taken)
    return f"{name}-{same + 1}" if same else name

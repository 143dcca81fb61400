"""Configure the slower tiers of a run: their order, their names, and the durable one.

The run directory is the tier "local": the home of the run's records, and the first commit of each
snapshot. Each slower tier, nearest first, holds copies of snapshots under the same names and a copy
of the records, so that the run can resume from any of them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import ConfigurationError
from trainckpt.run_directory import run_url
from trainckpt.run_directory.recorded_place import place_of
from trainckpt.storage.redact import REDACTED, redact_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.storage.base import Tier

TIERS, DURABLE, COMMITS = "tiers", "durable", "tier_commits"  # in an attempt's record
TROUBLE = "tier_trouble"  # there too: tier -> trouble with its uploads
RUN_FIELD = "{run}"
_TAKEN = (LOCAL, "memory", "staged", "partner", "durable")


@dataclass(frozen=True)
class TierConfig:
    """The slower tiers, opened but not accessed yet.

    Attributes:
        tiers: Nearest first; each has a name of its own.
        durable: Name of the tier for the moment "durable".
    """

    tiers: tuple[Tier, ...] = ()
    durable: str = LOCAL

    def to_facts(self) -> dict[str, Any]:
        """Return the facts for the attempt's record; secrets in URLs are left out."""
        tiers = [{"name": t.name, "url": redact_text(t.url)} for t in self.tiers]
        return {TIERS: tiers, DURABLE: self.durable} if tiers else {}


def open_slower(urls: Sequence[str], durable: str | None, local: Tier) -> TierConfig:
    """Open the tiers at these URLs, for the run at `local`.

    Raises:
        ConfigurationError: a URL cannot be opened, two are one place, or none is called `durable`.
    """
    if os.environ.get(run_url.PROVE_VARIABLE):
        return TierConfig()  # a proof leaves the user's own tiers alone
    tiers: list[Tier] = []
    seen = {_location(local): LOCAL}
    called: dict[str, str] = {LOCAL: LOCAL, local.url: LOCAL}
    for number, url in enumerate(urls):
        name = _free_name(url, [t.name for t in tiers], number)
        tier = _open(url, local, name)
        if (found := _location(tier)) in seen:
            raise ConfigurationError(
                f"tiers: {redact_text(url)} is the place of the tier {seen[found]}",
                hint="name each place once, and not the run's own",
            )
        tiers.append(tier)
        seen[found] = tier.name
        called.update({tier.name: tier.name, url: tier.name, tier.url: tier.name})
    if durable is not None and durable not in called:
        raise ConfigurationError(
            f"durable={redact_text(durable)!r} is none of this run's tiers",
            hint=f"one of {', '.join([LOCAL, *(t.name for t in tiers)])}",
        )
    last = tiers[-1].name if tiers else LOCAL
    return TierConfig(tuple(tiers), last if durable is None else called[durable])


def recorded(
    records: Mapping[int, AttemptRecord], local: Tier, known: Iterable[Tier] = ()
) -> tuple[tuple[Tier, ...], list[str]]:
    """Return the recorded tiers of the newest attempt with any, besides the known ones.

    Returns:
        The tiers, and the names of those with a secret in the URL, which was not stored.
    """
    found: list[Tier] = []
    unknown: list[str] = []
    names = {tier.name for tier in known}
    if os.environ.get(run_url.PROVE_VARIABLE):
        return (), []
    there = {_location(t) for t in known} | {_location(local)}
    for name, url in _recorded_tiers(records):
        if REDACTED in url:
            unknown += [name] if name not in names else []
            continue
        tier = run_url.open_tier_at(url, name)
        if _location(tier) not in there:
            found.append(tier)
    return tuple(found), unknown


def newest_commits(records: Mapping[int, AttemptRecord]) -> dict[str, dict[int, str]]:
    """Return tier -> attempt -> its newest snapshot committed there."""
    found: dict[str, dict[int, str]] = {}
    for number, record in records.items():
        commits = record.facts.get(COMMITS)
        for name, snapshot in commits.items() if isinstance(commits, dict) else ():
            if isinstance(snapshot, str):
                found.setdefault(name, {})[number] = snapshot
    return found


def is_copy(records: Mapping[int, AttemptRecord], tier: Tier) -> bool:
    """Return True if `tier` is a slower tier of the run whose records it holds."""
    here = place_of(tier)
    return any(
        here == (url if "://" in url else os.path.abspath(url))  # noqa: PTH100
        for _, url in _recorded_tiers(records)
    )


def _recorded_tiers(records: Mapping[int, AttemptRecord]) -> list[tuple[str, str]]:
    for _, record in sorted(records.items(), reverse=True):
        tiers = record.facts.get(TIERS)
        if isinstance(tiers, list) and tiers:
            pairs = [(t.get("name"), t.get("url")) for t in tiers if isinstance(t, dict)]
            return [(n, u) for n, u in pairs if isinstance(n, str) and isinstance(u, str)]
    return []


def _location(tier: Tier) -> str:
    """Return an identifier of the tier's location without access to it, which may hang."""
    return tier.url if "://" in tier.url else os.path.normpath(tier.url)


def _open(url: str, local: Tier, name: str) -> Tier:
    run = PurePosixPath(local.url).name
    return run_url.open_tier_at(url.replace(RUN_FIELD, run), name)


def _free_name(url: str, taken: Sequence[str], number: int) -> str:
    """Return a free name for a tier: its protocol, or the last folder of its path."""
    protocol, colon, rest = url.partition("://")
    is_path = not colon or protocol in ("file", LOCAL)
    last = PurePosixPath((rest if colon else url).replace(RUN_FIELD, "").rstrip("/")).name
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", last if is_path else protocol).strip("-.")
    name = name if name and name not in _TAKEN else f"tier{number + 1}"
    same = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in taken)
    return f"{name}-{same + 1}" if same else name

"""Everywhere: a run and all of its tiers, for whoever looks at it from outside, or moves snapshots.

The slower tiers are those that the options name here and now, and those that the newest attempt
with any has recorded. Nothing is claimed.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, SaveFailed, TierUnavailable, UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST
from trainckpt.lifecycle.places import place as places
from trainckpt.lifecycle.places.not_a_run import no_run_at
from trainckpt.lifecycle.places.reach import Reach
from trainckpt.lifecycle.places.slower import Slower, open_slower
from trainckpt.lifecycle.run.options import read_options
from trainckpt.snapshot import attempts, catalog, flush, histories
from trainckpt.snapshot.verify import check_file, files_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.tiers.base import Tier


@dataclass(frozen=True)
class Everywhere:
    """One run in all of its tiers.

    Attributes:
        run: Its id.
        tiers: Those that answer, nearest first: its place, where that holds it, then slower ones.
        place: Its place, whether or not that holds it.
        empty: Slower tiers that answer, and hold nothing of any run yet.
        silent: Name of a tier that did not answer -> why.
        records: Of its attempts.
    """

    run: str
    tiers: tuple[Tier, ...]
    place: Tier
    empty: tuple[Tier, ...]
    silent: Mapping[str, str]
    records: Mapping[int, AttemptRecord]

    def candidates(self) -> tuple[Candidate, ...]:
        """What there is, in whatever tier."""
        return catalog.read_copies(self.tiers, self.run, self.records)

    def tier(self, wanted: str) -> Tier:
        """The tier of this name; else the one at this URL, which need not hold the run yet.

        Raises:
            TierUnavailable: it is one of the run's, and does not answer.
        """
        if wanted in self.silent:
            raise TierUnavailable(self.silent[wanted])
        for tier in (*self.tiers, *self.empty, self.place):
            if wanted in (tier.name, tier.url):
                return tier
        slower = open_slower([wanted], None, self.place)
        for tier in self.tiers:
            if tier.url == slower.tiers[0].url:
                return tier
        return slower.tiers[0]

    def holding(self, wanted: str) -> Tier:
        """As `tier`, of those that hold the run.

        Raises:
            ConfigurationError: it does not.
            TierUnavailable: it does not answer.
        """
        tier = self.tier(wanted)
        if tier in self.tiers:
            return tier
        names = ", ".join(each.name for each in self.tiers)
        raise ConfigurationError(
            f"no tier {wanted!r} holds the run of {self.place.url}", hint=f"one of {names}"
        )


def open_everywhere(run: str | os.PathLike[str], *also: str) -> Everywhere:
    """The run at this place, or at slower tiers where its place holds none.

    Args:
        run: Its place, or any tier that holds it.
        also: URLs of tiers beside those that are known.

    Raises:
        NothingToResume: neither holds a run.
        TierUnavailable: the place refused.
    """
    local = places.open_place(run)
    reach = Reach(local, _named(local, also), accept_older=True)
    found = attempts.run_id(local)
    source: Tier = local
    if found is None:
        found = reach.find_run(must=False)
        if found is None:
            raise no_run_at(local)
        source = next(t for t in reach.slower.tiers if attempts.run_id(t) == found)
    records = attempts.read_attempts(source)
    reach.look(found, records)
    tiers = (*([local] if source is local else []), *reach.answering)
    empty = tuple(reach.empty)
    return Everywhere(found, tiers, local, empty, dict(reach.silent), records)


def _named(local: Tier, also: Sequence[str]) -> Slower:
    urls = [*read_options({}).tiers, *also]
    return open_slower([url for url in dict.fromkeys(urls) if url != local.url], None, local)


@dataclass(frozen=True)
class Moved:
    """What became of one snapshot in one tier.

    Attributes:
        tier: Its name.
        snapshot: Full name.
        how: "copied", "was there", or "repaired".
        num_bytes: That were written.
    """

    tier: str
    snapshot: str
    how: str
    num_bytes: int


COPIED, WAS_THERE, REPAIRED = "copied", "was there", "repaired"


def move(
    everywhere: Everywhere,
    manifest: Manifest,
    target: Tier,
    sources: Sequence[Tier],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> Moved:
    """Copy a snapshot to a tier, from the nearest good copy of each file.

    If it is there already every byte of that copy is read, and what is not good is copied again.

    Raises:
        UnusableSnapshot: some file has no good copy in the sources.
        ConfigurationError: one of both holds what a copy of this run did.
        SaveFailed: the target refused, or holds another snapshot of this name: it stays as it is.
        TierUnavailable: the target refused.
    """
    sources = [tier for tier in sources if tier is not target]
    flush.must_not_be_another(target, manifest)
    if attempts.run_id(target) is None and sources:
        flush.adopt(target, sources[0])
    flush.found_there(sources[0] if sources else target, target, everywhere.run)
    if sources and sources[0] is everywhere.place:
        flush.mirror_records(sources[0], target, {})
    elif sources and target is everywhere.place:
        ours = attempts.read_attempts(target)
        histories.bring(target, ours, histories.read_theirs(sources[0], ours))
    elif sources:  # who is no run's place may have them as they were long ago
        flush.bring_records(target, sources[0])
    there = flush.holds(target, manifest.name)
    data = _manifest_bytes([*sources, target], manifest)
    committed = flush.committed_keys(target, everywhere.run)
    num_bytes = 0
    for key, file in files_of(manifest):
        is_new = key not in committed and not there
        if is_new or check_file(target, key, file):
            if not sources:
                raise UnusableSnapshot(f"{key} in {target.url} is not good, and no other copy is")
            copied = True
            if is_new:
                copied = flush.copy_missing(sources, target, manifest, key, file)
            else:
                flush.copy_file(sources, target, key, file)
            num_bytes += file.num_bytes * copied
        progress(file.num_bytes)
    flush.commit_copy(target, manifest, data)
    how = COPIED if not there else REPAIRED if num_bytes else WAS_THERE
    return Moved(target.name, str(manifest.name), how, num_bytes)


def _manifest_bytes(tiers: Sequence[Tier], manifest: Manifest) -> bytes:
    """As it stands in the first tier where it is good, and of no other snapshot of its name."""
    for tier in tiers:
        with contextlib.suppress(UnusableSnapshot):
            there = catalog.load_manifest(tier, manifest.run, manifest.name)
            if manifests.bound(there) == manifests.bound(manifest):
                key = f"{manifest.name.folder}/{MANIFEST}"
                return tier.read(key, max_bytes=manifests.MAX_BYTES)
    raise SaveFailed(f"no tier has a good manifest of {manifest.name}")

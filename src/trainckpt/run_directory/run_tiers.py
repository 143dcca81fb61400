"""A run and all of its tiers, for commands that inspect it from outside or move snapshots.

The slower tiers are those named by the options here and now, and those recorded by the newest
attempt with any. Nothing is claimed.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainckpt.attempt.options import read_options
from trainckpt.errors import (
    ConfigurationError,
    NothingToResume,
    SaveFailed,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format import manifest as manifests
from trainckpt.format.names import MANIFEST, split_target
from trainckpt.run_directory import run_url
from trainckpt.run_directory.tier_config import TierConfig, open_slower
from trainckpt.run_directory.tier_set import TierSet
from trainckpt.snapshot import attempt_history, catalog, tier_copy
from trainckpt.snapshot.verify import check_file, files_of
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.snapshot.catalog import Candidate
    from trainckpt.storage.base import Tier


# ---- `RUN[@SNAPSHOT]`: one snapshot, read without a resume
#
# Without `@SNAPSHOT`, and with `@latest`, it is the newest usable one. By name it may also be one
# that a resume would refuse. Nothing is claimed and nothing is written.


LATEST = "latest"


@dataclass(frozen=True)
class SnapshotSource:
    """One committed snapshot, and its tier.

    Attributes:
        passed_over: Newer damaged ones with the reason, if the newest usable one was requested.
    """

    tier: Tier
    manifest: Manifest
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.tier.url}@{self.manifest.name}"


def open_source(target: str) -> SnapshotSource:
    """Open the snapshot named by `RUN[@SNAPSHOT]`.

    Raises:
        NothingToResume: there is no such run, or it has committed nothing.
        UnusableSnapshot: there is no such snapshot, or its manifest is damaged.
        ConfigurationError, TierUnavailable: the run directory cannot be opened.
    """
    run, wanted = split_target(target)
    tier = run_url.open_tier_at(run)
    if wanted in (None, LATEST):
        records = attempt_history.RecordsAsNeeded(tier)
        candidates = catalog.read_newest(tier, _run_at(tier), records)
    else:
        candidates = read_candidates(tier)
    candidate = choose(tier, wanted, candidates)
    if candidate.manifest is None:
        raise candidate.refusal(tier.url)
    harmless = (catalog.NOT_COMMITTED, catalog.ABANDONED)
    passed_over = [
        f"{c.name} is passed over: {c.reason}"
        for c in (candidates if wanted in (None, LATEST) else ())
        if c.name > candidate.name and not c.usable and c.reason not in harmless
    ]
    return SnapshotSource(tier, candidate.manifest, tuple(passed_over))


def read_candidates(tier: Tier) -> tuple[Candidate, ...]:
    """Return the catalog of the run at `tier`; raise `NothingToResume` if there is no run."""
    return catalog.read_catalog(tier, _run_at(tier), attempt_history.read_attempts(tier))


def _run_at(tier: Tier) -> str:
    run = attempt_history.run_id(tier)
    if run is None:
        raise no_run_at(tier)
    return run


def choose(tier: Tier, wanted: str | None, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate called `wanted`, or the newest usable one; errors as `open_source`."""
    if all(c.reason == catalog.NOT_COMMITTED for c in candidates):
        raise NothingToResume(
            f"{tier.url}: no snapshot was committed yet",
            hint=f"trainckpt list --attempts {tier.url}",
        )
    if wanted in (None, LATEST) and not any(c.usable for c in candidates):
        why = "; ".join(f"{c.name}: {c.reason}" for c in candidates[:3])
        raise UnusableSnapshot(
            f"{tier.url} has no usable snapshot: {why}",
            hint=f"trainckpt list {tier.url}, and name one of them",
        )
    return catalog.find(candidates, wanted or LATEST, tier.url)


# ---- a run and its tiers


@dataclass(frozen=True)
class RunTiers:
    """One run in all of its tiers.

    Attributes:
        run: Id of the run.
        tiers: Responding tiers with the run, nearest first: its run directory if it holds the run,
            then slower ones.
        run_tier: Its run directory, whether or not it holds the run.
        empty: Responding slower tiers without any run.
        silent: Name of an unresponsive tier -> reason.
        cures: Name of such a tier -> what to change, where its error says it.
        records: Records of its attempts.
    """

    run: str
    tiers: tuple[Tier, ...]
    run_tier: Tier
    empty: tuple[Tier, ...]
    silent: Mapping[str, str]
    cures: Mapping[str, str]
    records: Mapping[int, AttemptRecord]

    def candidates(self) -> tuple[Candidate, ...]:
        """Return the snapshots of all tiers."""
        return catalog.read_copies(self.tiers, self.run, self.records)

    def tier(self, wanted: str) -> Tier:
        """Return the tier of this name; else the one at this URL, which need not hold the run yet.

        Raises:
            TierUnavailable: it belongs to the run, and does not answer.
        """
        if wanted in self.silent:
            raise TierUnavailable(self.silent[wanted], hint=self.cures.get(wanted, ""))
        for tier in (*self.tiers, *self.empty, self.run_tier):
            if wanted in (tier.name, tier.url):
                return tier
        slower = open_slower([wanted], None, self.run_tier)
        for tier in self.tiers:
            if tier.url == slower.tiers[0].url:
                return tier
        return slower.tiers[0]

    def holding(self, wanted: str) -> Tier:
        """Return the tier as `tier` does, if it holds the run.

        Raises:
            ConfigurationError: it does not.
            TierUnavailable: it does not answer.
        """
        tier = self.tier(wanted)
        if tier in self.tiers:
            return tier
        names = ", ".join(each.name for each in self.tiers)
        raise ConfigurationError(
            f"no tier {wanted!r} holds the run of {self.run_tier.url}", hint=f"one of {names}"
        )


def open_everywhere(run: str | os.PathLike[str], *also: str) -> RunTiers:
    """Open the run at this place, or at slower tiers if its run directory holds none.

    Args:
        run: Its run directory, or any tier with the run.
        also: URLs of tiers besides the known ones.

    Raises:
        NothingToResume: neither holds a run.
        TierUnavailable: the run directory refused.
    """
    local = run_url.open_run_tier(run)
    reach = TierSet(local, _named(local, also), accept_older=True)
    found = attempt_history.run_id(local)
    source: Tier = local
    if found is None:
        found = reach.find_run(must=False)
        if found is None:
            raise no_run_at(local)
        source = next(t for t in reach.slower.tiers if attempt_history.run_id(t) == found)
    records = attempt_history.read_attempts(source)
    reach.look(found, records)
    tiers = (*([local] if source is local else []), *reach.answering)
    empty = tuple(reach.empty)
    return RunTiers(
        run=found,
        tiers=tiers,
        run_tier=local,
        empty=empty,
        silent=dict(reach.silent),
        cures=dict(reach.cures),
        records=records,
    )


def _named(local: Tier, also: Sequence[str]) -> TierConfig:
    urls = [*read_options({}).tiers, *also]
    return open_slower([url for url in dict.fromkeys(urls) if url != local.url], None, local)


@dataclass(frozen=True)
class RunMoved:
    """Result of moving one snapshot to one tier.

    Attributes:
        tier: Name of the tier.
        snapshot: Full name.
        how: "copied", "was there", or "repaired".
        num_bytes: Bytes written.
    """

    tier: str
    snapshot: str
    how: str
    num_bytes: int


COPIED, WAS_THERE, REPAIRED = "copied", "was there", "repaired"


def move(
    everywhere: RunTiers,
    manifest: Manifest,
    target: Tier,
    sources: Sequence[Tier],
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> RunMoved:
    """Copy a snapshot to a tier, from the nearest good copy of each file.

    If the tier has it already, every byte of that copy is read, and bad files are copied again.

    Raises:
        UnusableSnapshot: some file has no good copy in the sources.
        ConfigurationError: one of both holds attempts of a copy of this run.
        SaveFailed: the target refused, or holds another snapshot of this name, which stays as it
            is.
        TierUnavailable: the target refused.
    """
    sources = [tier for tier in sources if tier is not target]
    tier_copy.must_not_be_another(target, manifest)
    if attempt_history.run_id(target) is None and sources:
        tier_copy.adopt(target, sources[0])
    tier_copy.found_there(sources[0] if sources else target, target, everywhere.run)
    if sources and sources[0] is everywhere.run_tier:
        tier_copy.mirror_records(sources[0], target, {})
    elif sources and target is everywhere.run_tier:
        ours = attempt_history.read_attempts(target)
        attempt_history.bring(target, ours, attempt_history.read_theirs(sources[0], ours))
    elif sources:  # a slower tier may hold outdated records
        tier_copy.bring_records(target, sources[0])
    there = tier_copy.holds(target, manifest.name)
    data = _manifest_bytes([*sources, target], manifest)
    complete = tier_copy.complete_keys(target, everywhere.run)
    num_bytes = 0
    for key, file in files_of(manifest):
        is_new = key not in complete and not there
        if is_new or check_file(target, key, file):
            if not sources:
                raise UnusableSnapshot(f"{key} in {target.url} is not good, and no other copy is")
            copied = True
            if is_new:
                copied = tier_copy.copy_missing(sources, target, manifest, key=key, file=file)
            else:
                tier_copy.copy_file(sources, target, key, file)
            num_bytes += file.num_bytes * copied
        progress(file.num_bytes)
    tier_copy.commit_copy(target, manifest, data)
    how = COPIED if not there else REPAIRED if num_bytes else WAS_THERE
    return RunMoved(target.name, str(manifest.name), how, num_bytes)


def _manifest_bytes(tiers: Sequence[Tier], manifest: Manifest) -> bytes:
    """Return the manifest's bytes from the first tier with a good copy of this very snapshot."""
    for tier in tiers:
        with contextlib.suppress(UnusableSnapshot):
            there = catalog.load_manifest(tier, manifest.run, manifest.name)
            if manifests.bound(there) == manifests.bound(manifest):
                key = f"{manifest.name.folder}/{MANIFEST}"
                return tier.read(key, max_bytes=manifests.MAX_BYTES)
    raise SaveFailed(f"no tier has a good manifest of {manifest.name}")


MOST_RUNS = 10  # listed in a message, at most
DEEPEST = 4  # run, folder of snapshots, snapshot, file


def no_run_at(tier: Tier, before: str = "") -> NothingToResume:
    """Return the error for a place without a run; it names runs in the folder or around it.

    Args:
        tier: The place.
        before: Text put first.
    """
    sentence = f"{before}there is no run at {tier.url}"
    if not isinstance(tier, LocalTier):
        return NothingToResume(sentence, hint="check the path")
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders = sorted(tier.root.iterdir())
    if held := [folder.name for folder in folders if _is_run(folder)]:
        listed = ", ".join(held[:MOST_RUNS])
        more = f" and {len(held) - MOST_RUNS} more" if len(held) > MOST_RUNS else ""
        one = shlex.quote(str(tier.root / held[0])) if len(held) == 1 else f"{tier.root}/<name>"
        return NothingToResume(
            f"{sentence}: it is a folder that holds runs: {listed}{more}", hint=f"name one: {one}"
        )
    around = list(tier.root.parents)[:DEEPEST]
    if (run := next(filter(_is_run, around), None)) is not None:
        return NothingToResume(
            f"{sentence}: it is in the run {run}", hint=f"name that: {shlex.quote(str(run))}"
        )
    return NothingToResume(sentence, hint="check the path")


def _is_run(folder: Path) -> bool:
    """Return True if the folder holds a run's readable record; others call files run.json too."""
    try:
        return attempt_history.run_id(LocalTier(folder)) is not None
    except (OSError, TrainckptError):
        return False

"""Read and verify one snapshot on all ranks, or refuse it on all with the reasons.

The files that all ranks need are first read into their hosts' memory (`host_cache`). Each file is
then read from this host's memory if present, else from the nearest tier. After a digest mismatch on
any rank, all ranks read the snapshot once more: first without memory, then, with several tiers,
each file from its nearest good copy.

`find_good_copies`, once per candidate:

    every rank   reads its share of the files, tier by tier, until a copy is good
    all          exchange the results: the tier to read each file from, or none

Whole files are compared with the digests in the manifest, whatever the first failure was.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import error_json
from trainckpt.attempt.log import logger
from trainckpt.attempt.memory_budget import copy_threads
from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.resume.host_cache import fetch_together
from trainckpt.resume.read_state import read_state
from trainckpt.run_directory.validate import RANKS_TIMEOUT_S
from trainckpt.snapshot import catalog
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.snapshot.verify import check_file, files_of
from trainckpt.storage.cached_tier import MemoryCachedTier
from trainckpt.storage.tiered_reader import TieredReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.ranks.world import World
    from trainckpt.resume.read_state import StateRead
    from trainckpt.snapshot.restore import Reader
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier
    from trainckpt.storage.shared_memory import SharedMemoryDir


def find_good_copies(
    ladder: TieredReader, manifest: Manifest | None, channel: RankStore
) -> tuple[dict[str, int] | None, list[str]]:
    """Find the nearest tier with a good copy of each file. Every rank calls it.

    Args:
        ladder: From where it was read.
        manifest: Of the candidate, if this rank could read it.
        channel: Fresh keys.

    Returns:
        Key -> number of the tier; None if nothing would be read from elsewhere than it was, or if
        some file has no good copy. And why each copy that is passed over is not good.

    Raises:
        TierUnavailable: on all ranks: a file has no good copy where one could look, and some tier
            did not answer.
    """
    mine: dict[str, Any] = {
        "chosen": {},
        "bad": [],
        "silent": "",
        "lost": manifest is None,
        "other": False,
    }
    files = list(files_of(manifest)) if manifest is not None else []
    for number, (key, file) in enumerate(files):
        if number % channel.world.size == channel.world.rank:
            _look(ladder.tiers, key, file, mine)
            mine["other"] |= mine["chosen"].get(key, 0) != _nearest(ladder, key)
    everyone = channel.gather("copies", mine, RANKS_TIMEOUT_S)
    bad = [reason for each in everyone for reason in each["bad"]]
    if any(each["lost"] for each in everyone):
        silent = next((each["silent"] for each in everyone if each["silent"]), "")
        if silent:
            raise TierUnavailable(f"{silent}; other tiers: {'; '.join(bad)[:500]}")
        return None, bad
    if not any(each["other"] for each in everyone):
        return None, bad
    if channel.world.rank == 0:
        for reason in bad[:16]:
            logger.warning("bad copy, not used: %s", reason)
    return {key: at for each in everyone for key, at in each["chosen"].items()}, bad


def _nearest(ladder: TieredReader, key: str) -> int:
    try:
        return ladder.number_of(key)
    except TrainckptError:
        return -1  # it was read from nowhere


def _look(tiers: Sequence[Tier], key: str, file: FileEntry, found: dict[str, Any]) -> None:
    """Find the nearest good copy of one file, and note why others are not."""
    for number, tier in enumerate(tiers):
        try:
            why = check_file(tier, key, file)
        except TierUnavailable as error:
            found["silent"] = why = error.message
        except TrainckptError as error:
            why = error.message
        if not why:
            found["chosen"][key] = number
            return
        found["bad"].append(f"{key} in {tier.name}: {why}")
    found["lost"] = True


@dataclass
class ReadCandidate:
    """One rank's state from the snapshot, and a reader for more of it.

    `reasons` lists the grounds for refusing it; empty for a usable candidate.
    """

    manifest: Manifest | None = None
    saved: Saved | None = None
    reader: Reader | None = None
    reasons: list[str] = field(default_factory=list)


def read_candidate(
    *,
    tiers: Sequence[Tier],
    memory: SharedMemoryDir | None,
    channel: RankStore,
    registry: Registry,
    run: str,
    name: SnapshotName,
    hosts: Sequence[str] = (),
    opener: KeyRing | None = None,
) -> ReadCandidate:
    """Read this rank's part. Every rank calls it, and all return the same result.

    Args:
        tiers: Tiers that may hold the snapshot, nearest first; the first one is the run directory.
        memory: This host's shared memory of the run, if any.
        channel: Fresh keys.
        registry: Live objects to compare with; not modified.
        run, name: The snapshot.
        hosts: Host of each rank.
        opener: Key ring for an encrypted snapshot.

    Raises:
        TierUnavailable: the run directory failed on any rank.
        StateMismatch: the script's objects differ from the snapshot on any rank.
    """
    chosen: dict[str, int] | None = None
    for scope in ("near", "far", "other copies"):
        place = memory if scope == "near" else None
        ladder = TieredReader(tiers, chosen)
        opened = DecryptingTier(ladder, opener or KeyRing())
        near = MemoryCachedTier(opened, place)  # shared memory holds decrypted files
        read = _Read(
            tier=near,
            opened=opened,
            ladder=ladder,
            world=channel.world,
            registry=registry,
            run=run,
            name=name,
        )
        here = hosts.count(channel.world.host) or 1
        read.num_threads = near.num_threads = copy_threads(here)
        part = channel.scoped(scope)
        with ExitStack() as stack:
            stack.callback(near.close)
            if scope == "near":
                fetch_together(
                    source=opened,
                    ladder=ladder,
                    place=place,
                    channel=part,
                    hosts=hosts or [""],
                    name=name,
                    load=read.load,
                )
            results = part.gather("results", read.read(), RANKS_TIMEOUT_S)
            _must_fit(name, results)
        reasons = list(dict.fromkeys(r["message"] for r in results if r["kind"] != "ok"))
        from_memory = any(r["near"] for r in results)
        if not reasons or scope == "other copies":
            break
        if from_memory:
            if channel.world.rank == 0:
                logger.warning(
                    "%s is damaged in memory, reading it from %s: %s",
                    name,
                    tiers[0].url,
                    "; ".join(reasons)[:500],
                )
            continue
        if len(tiers) == 1 or chosen is not None:
            break
        chosen, bad = find_good_copies(ladder, read.manifest, part)
        reasons += bad
        if chosen is None:
            break
    if any(r["kind"] == "tier" for r in results):
        raise TierUnavailable("; ".join(reasons), hint="make the run directory readable again")
    if not reasons and channel.world.rank == 0:
        _say_from_where(name, ladder, from_memory=from_memory)
    return ReadCandidate(read.manifest, read.saved, read.reader, reasons)


def _say_from_where(name: SnapshotName, ladder: TieredReader, *, from_memory: bool) -> None:
    slower = sorted({number for number in ladder.read_from.values() if number})
    if from_memory:
        logger.info("%s was read from memory", name)
    elif slower:
        tiers = ", ".join(ladder.tiers[number].name for number in slower)
        logger.info("%s was read from %s", name, tiers)


def _load_manifest(ladder: TieredReader, run: str, name: SnapshotName) -> Manifest:
    """Return the manifest from the nearest tier with a good one; needed to find the files."""
    errors: list[TrainckptError] = []
    for tier in ladder.tiers:
        try:
            manifest = catalog.load_manifest(tier, run, name)
        except (UnusableSnapshot, TierUnavailable) as error:
            errors.append(error)
            continue
        ladder.sizes = {key: file.num_bytes for key, file in files_of(manifest)}
        return manifest
    raise next((e for e in errors if isinstance(e, TierUnavailable)), errors[0])


class _Read:
    """This rank's part of one candidate; each step returns a result for the other ranks.

    Attributes:
        manifest: The candidate's manifest, once read.
        saved: This rank's state, once complete.
        num_threads: Number of concurrent copies.
    """

    def __init__(
        self,
        *,
        tier: MemoryCachedTier,
        opened: DecryptingTier,
        ladder: TieredReader,
        world: World,
        registry: Registry,
        run: str,
        name: SnapshotName,
    ) -> None:
        self.num_threads = 1
        self._opened, self._ladder = opened, ladder
        self.manifest: Manifest | None = None
        self._is_admitted = False
        self.saved: Saved | None = None
        self._reading: StateRead | None = None
        self._tier, self._world, self._registry = tier, world, registry
        self._run, self._name = run, name

    def load(self) -> Manifest:
        """Return the verified manifest; read once."""
        if not self._is_admitted:
            self.manifest = _load_manifest(self._ladder, self._run, self._name)
            self.manifest = self._opened.admit(self.manifest)
            self._is_admitted = True
        assert self.manifest is not None
        return self.manifest

    @property
    def reader(self) -> Reader | None:
        """Reads more of the candidate, without this host's memory."""
        return self._reading.again if self._reading is not None else None

    def read(self) -> dict[str, Any]:
        """Read this rank's part of the snapshot; return the result, without raising for a bad
        one."""
        try:
            manifest = self.load()
            self._reading, self.saved = read_state(
                self._tier,
                manifest,
                self._registry,
                self._world,
                later=self._opened,
                num_threads=self.num_threads,
            )
            result = {"kind": "ok", "exact": self._reading.targets.exact}
        except NoAgreement:
            raise
        except TrainckptError as error:
            result = _failed(error, self._world.rank)
        return {**result, "near": bool(self._tier.used)}


def _failed(error: TrainckptError, rank: int) -> dict[str, Any]:
    """Return the result of a failed rank; a reason common to several ranks stays the same."""
    told = error_json.to_json(error)
    if isinstance(error, ConfigurationError):
        return {"kind": "mismatch", **told}
    told["message"] = f"rank {rank}: {told['message']}"
    return {"kind": "tier" if isinstance(error, TierUnavailable) else "unusable", **told}


def _must_fit(name: SnapshotName, results: list[dict[str, Any]]) -> None:
    """Raise the first difference between the script's objects and the snapshot, on all ranks."""
    mismatch = [r for r in results if r["kind"] == "mismatch"]
    if mismatch:
        raise error_json.from_json(mismatch[0])
    _must_agree(name, results)


def _must_agree(name: SnapshotName, results: list[dict[str, Any]]) -> None:
    """Refuse a mix of exact and changed layouts: some ranks would continue the window, others
    restart it."""
    exact = [r["exact"] for r in results if r["kind"] == "ok"]
    if len(set(exact)) > 1:
        raise StateMismatch(
            f"snapshot {name} cannot be resumed in this layout",
            [f"rank {rank} has the saved layout" for rank, e in enumerate(exact) if e],
            hint="wrap the model in the same way on every rank",
        )

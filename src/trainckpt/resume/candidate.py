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

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.attempt.options import MEMORY
from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.ranks import store
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.resume.host_cache import fetch_together
from trainckpt.snapshot import catalog
from trainckpt.snapshot.decrypting_tier import DecryptingTier, KeyRing
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.verify import MISSING, check_file, files_of
from trainckpt.state import apply, imported
from trainckpt.state.captured import VALUES, Saved, parse_values
from trainckpt.state.destination import Destination
from trainckpt.state.restore_targets import find_targets
from trainckpt.state.zero_copy import FROM_BYTES, AdoptedTensors, Proofs
from trainckpt.storage.host_resources import copy_threads
from trainckpt.storage.tiered_reader import MemoryCachedTier, TieredReader

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

    from trainckpt.format.manifest import FileEntry, Manifest, TensorEntry
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.ranks.world import World
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Readable, Tier
    from trainckpt.storage.shared_memory import SharedMemoryDir


# ---- this rank's part of a snapshot; the values come first
#
# A snapshot saved by as many ranks in the same layout is read as it was: every rank its own part.
# Otherwise each rank reads the boxes it holds now, and takes the values of a donor: the rank of its
# number, or else of its number modulo the saved number of ranks.
#
# A rank may have names that others lack, as a pipeline stage does: each is compared with its own
# saved names. On another number of ranks it is compared with the names of all, or a stage would be
# lost unnoticed.


SAME_WAY = "launch the same number of ranks and layout, or move sharded tensors out of that object"


def read_state(
    tier: Readable,
    manifest: Manifest,
    registry: Registry,
    world: World,
    *,
    later: Readable | None = None,
    num_threads: int = 1,
) -> tuple[Saved, Reader]:
    """Read and verify the data this rank needs, and compare it with the live objects.

    Args:
        tier, manifest: The snapshot, and the tier to read it from.
        registry: The live objects; not touched.
        world: This rank.
        later: Source for state that the script changes before training goes on; default `tier`.
        num_threads: Number of concurrent copies.

    Returns:
        The state, and a reader for what the script changes before training goes on.

    Raises:
        StateMismatch: the script's objects differ from the snapshot; lists every difference.
        UnusableSnapshot: anything is missing or damaged.
        TierUnavailable: the tier refused.
    """
    reader, donor = Reader(tier, manifest, num_threads=num_threads), world.rank % manifest.world
    first = Destination({VALUES: None})
    reader.read({VALUES: None}, first, donor=donor)
    values = parse_values(first.finish({})[VALUES])
    entries = _held_by(reader, donor)
    elsewhere = frozenset(manifest.tensors.keys() - entries.keys())
    is_imported = bool(imported.source(values))
    if is_imported:
        values, entries = imported.fit(values, entries, registry)
    is_as_it_was = not (manifest.lost or is_imported)
    then = manifest.world if is_as_it_was else 0  # the window begins anew for all
    targets = find_targets(registry, values, entries, world=world.size, then=then)
    if manifest.window is None and manifest.cursor.micro and not targets.exact:
        targets.problems.append(
            "an older release took it inside a window, without the window's start"
        )
    if targets.problems:
        raise StateMismatch(
            f"snapshot {manifest.name} cannot be resumed in this layout",
            targets.problems,
            hint=SAME_WAY,
        )
    again = reader.from_tier(later or tier)

    def read_again(names: Collection[str]) -> dict[str, torch.Tensor]:
        wanted = {name: targets.wanted[name] for name in names}
        destination = Destination(wanted)
        again.read(wanted, destination, donor=donor)
        return destination.finish({name: manifest.tensors[name].dtype for name in wanted})

    destination = Destination(targets.wanted, own=_become_live(registry, manifest.tensors))
    reader.read(targets.wanted, destination, donor=donor)
    dtypes = {name: entries[name].dtype for name in targets.wanted}
    tensors = targets.filled(destination.finish(dtypes))
    alike = manifest.world == world.size or is_imported
    compared = entries if alike else manifest.tensors
    # Ranks that train the same samples now, and perhaps did not then, would drift apart with
    # generators that differ.
    drew_alike = targets.exact or not registry.has_peers
    models = registry.models
    saved = Saved(
        tensors,
        values,
        shapes={name: entry.shape for name, entry in compared.items()},
        elsewhere=elsewhere,
        wraps=targets.wraps,
        exact=targets.exact,
        is_own=donor == world.rank
        and donor not in manifest.lost
        and drew_alike
        and not is_imported,
        worlds=(manifest.world, world.size),
        left=frozenset(n for m in models for n in m.left_out(values, entries)),
        proofs=(proofs := Proofs(reader.verified)),
        given=AdoptedTensors(tensors, proofs, read_again, destination.borrowed),
        num_threads=num_threads,
    )
    apply.check(registry, saved, str(manifest.name))
    return saved, again


def _become_live(registry: Registry, entries: Mapping[str, TensorEntry]) -> set[str]:
    """Return the large tensors whose memory the resume makes live: those of CPU optimizers."""
    on_host = [o for o in registry.optimizers if all(p.is_cpu for p in o.parameters())]
    of_optimizers = tuple(f"{optimizer.name}/" for optimizer in on_host)
    return {
        name
        for name, entry in entries.items()
        if name.startswith(of_optimizers)
        and entry.num_bytes >= FROM_BYTES
        and (entry.layout is None or not entry.layout.dividing)
    }


def _held_by(reader: Reader, donor: int) -> Mapping[str, TensorEntry]:
    """Return the snapshot's tensors, without the unsharded ones of other ranks alone."""
    entries, lost = reader.manifest.tensors, reader.manifest.lost
    if lost:  # other ranks' tensors stand in for those of the lost
        return entries
    own = {place.region.tensor for place in reader.places(donor)}
    return {n: entry for n, entry in entries.items() if entry.layout is not None or n in own}


# ---- all ranks together: read, verify, or refuse


def find_good_copies(
    ladder: TieredReader, manifest: Manifest | None, channel: RankStore
) -> tuple[dict[str, int] | None, list[str], list[str]]:
    """Find the nearest tier with a good copy of each file. Every rank calls it.

    Args:
        ladder: From where it was read.
        manifest: Of the candidate, if this rank could read it.
        channel: Fresh keys.

    Returns:
        Key -> number of the tier; None if nothing would be read from elsewhere than it was, or if
        some file has no good copy. Why each copy that is passed over is not good. The tier of each
        damaged one.

    Raises:
        TierUnavailable: on all ranks: a file has no good copy where one could look, and some tier
            did not answer.
    """
    mine: dict[str, Any] = {
        "chosen": {},
        "bad": [],
        "damaged": [],
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
    bad = [reason for answer in everyone for reason in answer["bad"]]
    damaged = [tier for answer in everyone for tier in answer["damaged"]]
    if any(answer["lost"] for answer in everyone):
        silent = next((answer["silent"] for answer in everyone if answer["silent"]), "")
        if silent:
            raise TierUnavailable(f"{silent}; other tiers: {'; '.join(bad)[:500]}")
        return None, bad, damaged
    if not any(answer["other"] for answer in everyone):
        return None, bad, damaged
    if channel.world.rank == 0:
        for reason in bad[:16]:
            logger.warning("bad copy, not used: %s", reason)
    chosen = {key: at for answer in everyone for key, at in answer["chosen"].items()}
    return chosen, bad, damaged


def _nearest(ladder: TieredReader, key: str) -> int:
    try:
        return ladder.number_of(key)
    except TrainckptError:
        return -1  # it was read from nowhere


def _look(tiers: Sequence[Tier], key: str, file: FileEntry, copies: dict[str, Any]) -> None:
    """Find the nearest good copy of one file, and note why others are not."""
    for number, tier in enumerate(tiers):
        try:
            why = check_file(tier, key, file)
        except TierUnavailable as error:
            copies["silent"] = why = error.message
        except TrainckptError as error:
            why = error.message
        else:
            copies["damaged"] += [tier.name] if why not in ("", MISSING) else []
        if not why:
            copies["chosen"][key] = number
            return
        copies["bad"].append(f"{key} in {tier.name}: {why}")
    copies["lost"] = True


@dataclass
class ReadCandidate:
    """One rank's state from the snapshot, and a reader for more of it.

    `reasons` lists the grounds for refusing it; empty for a usable candidate. `sources` has the
    bytes of the files read, by tier; `damaged` the copies that did not pass verification.
    """

    manifest: Manifest | None = None
    saved: Saved | None = None
    reader: Reader | None = None
    reasons: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)


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
    damaged = Counter[str]()
    for scope in ("near", "far", "other copies"):
        place = memory if scope == "near" else None
        ladder = TieredReader(tiers, chosen)
        opened = DecryptingTier(ladder, opener or KeyRing())
        num_threads = copy_threads(hosts.count(channel.world.host) or 1)
        # Shared memory holds decrypted files.
        near = MemoryCachedTier(opened, place, num_threads=num_threads)
        read = _Read(
            tier=near,
            opened=opened,
            ladder=ladder,
            world=channel.world,
            registry=registry,
            run=run,
            name=name,
            num_threads=num_threads,
        )
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
            damaged[MEMORY] += 1
            if channel.world.rank == 0:
                logger.warning(
                    "%s is damaged in memory, reading it from %s: %s",
                    name,
                    tiers[0].url,
                    "; ".join(reasons)[:500],
                )
            continue
        if len(tiers) == 1:
            damaged[tiers[0].name] += any(r["kind"] == "unusable" for r in results)
        if len(tiers) == 1 or chosen is not None:
            break
        chosen, bad, found = find_good_copies(ladder, read.manifest, part)
        reasons += bad
        damaged.update(found)
        if chosen is None:
            break
    if any(r["kind"] == "tier" for r in results):
        raise TierUnavailable("; ".join(reasons), hint="make the run directory readable again")
    if not reasons and channel.world.rank == 0:
        slower = sorted({number for number in ladder.read_from.values() if number})
        if from_memory or slower:
            sources = "memory" if from_memory else ", ".join(tiers[n].name for n in slower)
            logger.info("%s was read from %s", name, sources)
    return ReadCandidate(
        read.manifest, read.saved, read.reader, reasons, _sources(ladder, near), damaged
    )


def _sources(ladder: TieredReader, near: MemoryCachedTier) -> dict[str, int]:
    """Return the bytes of the files that this rank read, by the tier that they came from."""
    found: dict[str, int] = {}
    for key, num_bytes in ladder.sizes.items():
        if key in ladder.read_from:
            name = ladder.tiers[ladder.read_from[key]].name
        elif key in near.used:
            name = MEMORY
        else:
            continue
        found[name] = found.get(name, 0) + num_bytes
    return found


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
        reader: Reads more of the candidate, without this host's memory.
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
        num_threads: int,
    ) -> None:
        self.num_threads = num_threads
        self._opened, self._ladder = opened, ladder
        self.manifest: Manifest | None = None
        self._is_admitted = False
        self.saved: Saved | None = None
        self.reader: Reader | None = None
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

    def read(self) -> dict[str, Any]:
        """Read this rank's part of the snapshot; return the result, without raising for a bad
        one."""
        try:
            manifest = self.load()
            self.saved, self.reader = read_state(
                self._tier,
                manifest,
                self._registry,
                self._world,
                later=self._opened,
                num_threads=self.num_threads,
            )
            result = {"kind": "ok", "exact": self.saved.exact}
        except NoAgreement:
            raise
        except TrainckptError as error:
            result = _failed(error, self._world.rank)
        return {**result, "near": bool(self._tier.used)}


def _failed(error: TrainckptError, rank: int) -> dict[str, Any]:
    """Return the result of a failed rank; a reason common to several ranks stays the same."""
    result = store.to_json(error)
    if isinstance(error, ConfigurationError):
        return {"kind": "mismatch", **result}
    result["message"] = f"rank {rank}: {result['message']}"
    return {"kind": "tier" if isinstance(error, TierUnavailable) else "unusable", **result}


def _must_fit(name: SnapshotName, results: list[dict[str, Any]]) -> None:
    """Raise the first difference between the script's objects and the snapshot, on all ranks.

    A mix of exact and changed layouts is one: some ranks would continue the window, others
    restart it.
    """
    if mismatch := [r for r in results if r["kind"] == "mismatch"]:
        raise store.from_json(mismatch[0])
    exact = [r["exact"] for r in results if r["kind"] == "ok"]
    if len(set(exact)) > 1:
        raise StateMismatch(
            f"snapshot {name} cannot be resumed in this layout",
            [f"rank {rank} has the saved layout" for rank, e in enumerate(exact) if e],
            hint="wrap the model in the same way on every rank",
        )

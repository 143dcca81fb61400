"""A candidate: one snapshot, read and verified by all ranks, or refused by all with the reasons.

What all ranks need is brought into their hosts' memory first (`fetch_together`).
Each file is read from this host's memory where it is there, else from the nearest tier. If anything
does not match its digest, on any rank, all read the snapshot once more: first without memory, then,
if there are several tiers, each file from the nearest copy that is good (`other_copies`).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.resuming.fetch_together import fetch_together, is_directory
from trainckpt.lifecycle.resuming.other_copies import find_good_copies
from trainckpt.lifecycle.resuming.read_shares import Circle, circle, fewer_readers, take
from trainckpt.lifecycle.resuming.read_state import read_state
from trainckpt.lifecycle.resuming.read_together import offers, read_together
from trainckpt.lifecycle.run import error_json
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.memory import copy_threads
from trainckpt.lifecycle.run.told import folder_of_launch
from trainckpt.snapshot import catalog
from trainckpt.snapshot.opened import Opened, Opener
from trainckpt.snapshot.verify import files_of
from trainckpt.snapshot.vouched import vouched
from trainckpt.state.warm import WarmMemory, made_anew
from trainckpt.tiers.ladder import Ladder
from trainckpt.tiers.near import NearTier
from trainckpt.tiers.userfault import filling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.resuming.read_state import Reading
    from trainckpt.ranks.channel import Channel
    from trainckpt.ranks.world import World
    from trainckpt.snapshot.restore import Reader
    from trainckpt.snapshot.shares import Share
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.memory import MemoryPlace


@dataclass
class Candidate:
    """What one rank has read of it, and what can read more of it once it is chosen.

    `reasons` are why all refuse it, none if they do not.
    """

    manifest: Manifest | None = None
    saved: Saved | None = None
    reader: Reader | None = None
    reasons: list[str] = field(default_factory=list)


def read_candidate(
    tiers: Sequence[Tier],
    memory: MemoryPlace | None,
    channel: Channel,
    registry: Registry,
    run: str,
    name: SnapshotName,
    hosts: Sequence[str] = (),
    opener: Opener | None = None,
) -> Candidate:
    """Read this rank's part. Every rank calls it, and all come to the same result.

    Args:
        tiers: That may hold it, nearest first: the run's place is the first one.
        memory: Of this host, if it has any of this run.
        channel: Fresh keys.
        registry: What is compared with it, and not touched.
        run, name: The snapshot.
        hosts: Of each rank.
        opener: Who reads it if it is encrypted.

    Raises:
        TierUnavailable: the run's place refused on any rank.
        StateMismatch: the script's objects differ from it on any rank.
    """
    chosen: dict[str, int] | None = None
    for scope in ("near", "far", "other copies"):
        place = memory if scope == "near" else None
        ladder = Ladder(tiers, chosen)
        opened = Opened(ladder, opener or Opener())
        near = NearTier(opened, place)  # what is there is not encrypted
        read = _Read(near, opened, ladder, channel.world, registry, run, name)
        here = hosts.count(channel.world.host) or 1
        read.num_threads = near.num_threads = copy_threads(here)
        part = channel.scoped(scope)
        with ExitStack() as stack:
            stack.enter_context(filling())
            stack.callback(near.close)
            stack.callback(read.end)
            if scope == "near":
                read.circle = stack.enter_context(circle(part, hosts))
                fetch_together(
                    opened, ladder, place, part, hosts or [""], name, read.load, read.warm,
                    by_shares=read.circle is not None,
                )  # fmt: skip
            results = _read(read, part, name)
        reasons = list(dict.fromkeys(r["message"] for r in results if r["kind"] != "ok"))
        from_memory = any(r["near"] for r in results)
        if not reasons or scope == "other copies":
            break
        if from_memory or any(r["common"] for r in results):
            _say_it_is_read_again(channel, name, tiers[0], reasons, from_memory=from_memory)
            continue
        if len(tiers) == 1 or chosen is not None:
            break
        chosen, bad = find_good_copies(ladder, read.manifest, part)
        reasons += bad
        if chosen is None:
            break
    if any(r["kind"] == "tier" for r in results):
        raise TierUnavailable("; ".join(reasons), hint="make the run's place readable again")
    if not reasons and channel.world.rank == 0:
        _say_from_where(name, ladder, from_memory=from_memory)
    return Candidate(read.manifest, read.saved, read.reader, reasons)


def _say_it_is_read_again(
    channel: Channel, name: SnapshotName, tier: Tier, reasons: Sequence[str], *, from_memory: bool
) -> None:
    if channel.world.rank == 0:
        what = "in memory is not good, reading it" if from_memory \
            else "was not good as the ranks of a host read it together, each reads it"  # fmt: skip
        logger.warning("%s %s from %s: %s", name, what, tier.url, "; ".join(reasons)[:500])


def _say_from_where(name: SnapshotName, ladder: Ladder, *, from_memory: bool) -> None:
    slower = sorted({number for number in ladder.read_from.values() if number})
    if from_memory:
        logger.info("%s was read from memory", name)
    elif slower:
        tiers = ", ".join(ladder.tiers[number].name for number in slower)
        logger.info("%s was read from %s", name, tiers)


def _load_manifest(ladder: Ladder, run: str, name: SnapshotName) -> Manifest:
    """The manifest from the nearest tier where it is good; from now on its files can be found."""
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


def _read(read: _Read, channel: Channel, name: SnapshotName) -> list[dict[str, Any]]:
    """What all ranks bring of it, in the end."""
    results = channel.gather("alone", read.alone(), RANKS_TIMEOUT_S)
    _must_fit(name, results)
    if all(r["kind"] == "ok" for r in results) and any(r["share"] for r in results):
        taken = channel.gather("taken", read.take(results), RANKS_TIMEOUT_S)
        results = [{**result, **each} for result, each in zip(results, taken, strict=True)]
        _must_fit(name, results)
    if all(r["kind"] == "ok" for r in results) and any(r["offers"] for r in results):
        result = read.together(channel, [r["offers"] for r in results])
        results = channel.gather("together", result, RANKS_TIMEOUT_S)
        _must_fit(name, results)
    return results


class _Read:
    """This rank's part of one candidate; each step answers what to bring to the others.

    Attributes:
        manifest: The candidate's, once it was read.
        saved: This rank's state of it, once it is complete.
        num_threads: That may copy at once.
        warm_memory: For what is copied from this host's memory.
        circle: Of those that read between them.
    """

    def __init__(
        self,
        tier: NearTier,
        opened: Opened,
        ladder: Ladder,
        world: World,
        registry: Registry,
        run: str,
        name: SnapshotName,
    ) -> None:
        self.num_threads = 1
        self.warm_memory = WarmMemory()
        self.circle: Circle | None = None
        self._opened, self._ladder = opened, ladder
        self.manifest: Manifest | None = None
        self._is_admitted = False
        self.saved: Saved | None = None
        self._reading: Reading | None = None
        self._shared: Share | None = None
        self._tier, self._world, self._registry = tier, world, registry
        self._run, self._name = run, name

    def warm(self, manifest: Manifest) -> None:
        """What is read comes to the host's memory: have this rank's own made meanwhile."""
        self.warm_memory.begin(made_anew(self._registry, manifest.tensors))

    def end(self) -> None:
        """Neither make memory any more, nor take what others have read."""
        self.warm_memory.end()
        if self._shared is not None:
            self._shared.end()

    def load(self) -> Manifest:
        """The manifest, proven; read once."""
        if not self._is_admitted:
            self.manifest = _load_manifest(self._ladder, self._run, self._name)
            self.manifest = self._opened.admit(self.manifest)
            self._is_admitted = True
            if (folder := folder_of_launch()) is not None:
                self._tier.vouched = vouched(folder, self.manifest)
        assert self.manifest is not None
        return self.manifest

    def alone(self) -> dict[str, Any]:
        """What no other rank needs a part of; and what to read together."""
        return self._result(self._alone)

    @property
    def reader(self) -> Reader | None:
        """Reads more of the candidate, without this host's memory."""
        return self._reading.again if self._reading is not None else None

    def together(self, channel: Channel, everyone: list[dict[str, str]]) -> dict[str, Any]:
        """The rest, with the ranks that offer the same. All ranks were fine so far.

        Raises:
            NoAgreement: a rank is gone.
        """
        return self._result(lambda: self._together(channel, everyone))

    def _alone(self) -> dict[str, Any]:
        manifest = self.load()
        self._shared = share = self._share(manifest)
        with fewer_readers(self._ladder.tiers, self.circle if share is not None else None):
            self._reading, self.saved = read_state(
                self._tier, manifest, self._registry, self._world,
                later=self._opened, num_threads=self.num_threads, warm=self.warm_memory,
                share=share,
            )  # fmt: skip
        exact = self._reading.targets.exact
        told = {"share": self._reading.told, "dealt": share.dealt if share is not None else ""}
        return {"kind": "ok", "exact": exact, "offers": offers(self._reading), **told}

    def _share(self, manifest: Manifest) -> Share | None:
        """Of a directory; a store is asked once for each header, and for what is small."""
        if self.circle is None or not is_directory(self._ladder, manifest):
            return None
        return self.circle.share(manifest)

    def take(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """What the other ranks of this host have read for it. All ranks were fine so far."""
        return self._result(lambda: self._take(results))

    def _take(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._reading is not None
        take(self._reading.reader, self.circle, results, self._name)
        if self._reading.is_all and self.saved is None:
            self.saved = self._reading.finish()
        return {"kind": "ok"}

    def _together(self, channel: Channel, everyone: list[dict[str, str]]) -> dict[str, Any]:
        assert self._reading is not None
        refusal = read_together(self._reading, channel, everyone)
        if refusal is not None:
            return _failed(refusal.error, refusal.rank)
        self.saved = self.saved or self._reading.finish()
        return {"kind": "ok", "exact": self._reading.targets.exact, "offers": {}}

    def _result(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            result = call()
        except NoAgreement:
            raise
        except TrainckptError as error:
            result = _failed(error, self._world.rank)
        # What is found bad in memory that other ranks wrote, each reads again by itself.
        has_common = self._shared is not None and self._shared.has_common
        return {**result, "near": bool(self._tier.used), "common": has_common}


def _failed(error: TrainckptError, rank: int) -> dict[str, Any]:
    """The result of a rank that failed; the reason is the same on all whom it reached."""
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
    """Ranks that go on inside the window would wait for ranks that begin it anew."""
    exact = [r["exact"] for r in results if r["kind"] == "ok"]
    if len(set(exact)) > 1:
        raise StateMismatch(
            f"snapshot {name} cannot be resumed in this layout",
            [f"rank {rank} holds its tensors as they were" for rank, e in enumerate(exact) if e],
            hint="wrap the model in the same way on every rank",
        )

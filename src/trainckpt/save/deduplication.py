"""Deduplicate a save: find what one rank need not write.

    replicas    tensors that are equal on several ranks are divided over them (`ReplicaCheck`)
    plan        the regions that this rank stores of them, reused while nothing in it changes
    unchanged   regions that an older file holds are referenced (`IncrementalIndex`)

Replicas: the first and the final save compare all bytes. Between them, large tensors that only
steps change are sampled, another part each time. A tensor found to differ counts as each rank's own
until all its bytes are compared again: the next sample may miss the difference. The rank that
reduces the answers decides for all ranks, also on the part to sample next.

Unchanged regions:

    training thread   begin_from        index the regions that the run directory holds of the
                                        resumed snapshot
                      find_unchanged    digest likely unchanged regions; refer to the unchanged
                                        ones. Regions on a GPU are compared there, by checksum
    saving thread     referenced_files  check that the files still exist, for the manifest
                      on_commit         index this snapshot for the next save

The index describes the newest committed snapshot of this attempt, or the one it began from. A save
that fails changes nothing, unless a file has vanished: then the next save writes everything.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.attempt.log import logger
from trainckpt.errors import SaveFailed, TrainckptError, UnusableSnapshot
from trainckpt.format.digest import compact
from trainckpt.format.manifest import TensorEntry
from trainckpt.format.names import SNAPSHOTS, reached_file
from trainckpt.save.estimates import weigh
from trainckpt.snapshot import save_plan
from trainckpt.snapshot.restore import Reader
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.state import staging, tensor_digests
from trainckpt.state.captured import VALUES, add_values
from trainckpt.state.staging import digests_of, source_of
from trainckpt.state.tensor_digests import checksums

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier


# ---- equal replicas


class ReplicaCheck:
    """Compares the replicas of one rank with those of the others."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        self._number = 0  # of the comparison, of those that all ranks have made
        self._is_whole = True
        self._ever_equal: set[str] = set()  # groups, in some comparison
        self._different: set[str] = set()  # groups, since the last comparison of all bytes

    def report(
        self, captured: Captured, stepped: Collection[str], *, final: bool
    ) -> dict[str, Any]:
        """Return this rank's contribution to `compare`.

        Args:
            captured: State of this rank.
            stepped: Tensors that only steps change.
            final: No save follows this one.
        """
        if self._world < 2:
            return {}
        self._is_whole = final or not self._number
        groups = tensor_digests.group_digests(
            captured,
            self._rank,
            self._world,
            sampled=() if self._is_whole else stepped,
            number=self._number,
        )
        of_steps = sorted({captured.groups[name] for name in stepped if name in captured.groups})
        return {"groups": groups, "stepped": of_steps, "number": self._number}

    def equal_groups(self, combined: Mapping[str, Any]) -> list[str]:
        """Return the groups that are equal on all ranks, given the result of `compare`."""
        if self._is_whole:
            self._different.clear()
        self._number = combined["number"]
        self._warn(set(combined["apart"]) - self._different)
        self._different.update(combined["apart"])
        alike = [group for group in combined["equal"] if group not in self._different]
        self._ever_equal.update(alike)
        return alike

    def _warn(self, differing: set[str]) -> None:
        for group in sorted(differing & self._ever_equal):
            if self._rank == 0:
                logger.warning(
                    "%s: the ranks' copies were equal and now differ; each rank saves its own",
                    tensor_digests.kind_of(group),
                )


def combine_answers(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the groups of tensors with equal replicas, or why nothing can be saved. Pure."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    places = [answer["place"] for answer in answers]
    if any(place != places[0] for place in places):
        errors.append(f"the ranks are not at one boundary: {places[:16]}")
    result = {} if errors else compare(answers)
    behind = any(answer["behind"] for answer in answers)
    attempt = max(answer["attempt"] for answer in answers)  # a dump may fall between two ranks
    return {"error": "; ".join(errors), **result, "behind": behind, "attempt": attempt}


def compare(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the equal groups, and those that may no longer be sampled, from all answers. Pure.

    A rank without the result of the last comparison has sampled other parts. No group counts as
    equal then.
    """
    numbers = [answer.get("number", 0) for answer in answers]
    equal: list[str] = []
    apart: list[str] = []
    if len(set(numbers)) == 1:
        reports = [answer.get("groups", {}) for answer in answers]
        equal = equal_groups(reports)
        stepped = {kind for answer in answers for kind in answer.get("stepped", ())}
        differing = {group for report in reports for group in report} - set(equal)
        apart = sorted(group for group in differing if tensor_digests.kind_of(group) in stepped)
    return {"equal": equal, "apart": apart, "number": max(numbers) + 1}


# ---- the previous save's plan, reused while nothing in it changes
#
# Training waits for the plan: it takes 24 ms for 1,500 replicated regions.


class CachedSavePlan(NamedTuple):
    """Save plan of one rank.

    Attributes:
        regions: Regions this rank stores.
        entries: Manifest entry of each tensor it holds.
        num_bytes: Bytes of the whole state, as saves are timed and predicted by.
    """

    regions: tuple[Region, ...]
    entries: dict[str, TensorEntry]
    num_bytes: int


class SavePlanCache:
    """Plan cache of one rank of an attempt, across saves."""

    def __init__(self, registry: Registry, rank: int, world: int) -> None:
        self._registry, self._rank, self._world = registry, rank, world
        self._facts: Any = None
        self._plan = CachedSavePlan((), {}, 0)

    def plan(self, captured: Captured, equal: Sequence[str]) -> CachedSavePlan:
        """Return the plan for this state, and add its values to it as one tensor.

        Args:
            captured: All state of this rank.
            equal: Groups of tensors with equal replicas.
        """
        add_values(captured)
        known = set(chain.from_iterable(block.names for block in captured.blocks))
        facts = (
            captured.blocks,
            [(n, t.dtype, t.shape) for n, t in captured.tensors.items() if n not in known],
            captured.groups,
            captured.apart,
            captured.placed,
            equal,
        )
        if facts != self._facts:
            self._plan, self._facts = self._make(captured, equal), facts
        return self._plan

    def _make(self, captured: Captured, equal: Sequence[str]) -> CachedSavePlan:
        layouts = tensor_digests.split_layouts(captured, set(equal), self._world)
        regions = staging.regions_of(captured, layouts)
        entries = {r.tensor: TensorEntry(r.dtype, r.of, layouts.get(r.tensor)) for r in regions}
        num_bytes = weigh(self._registry, gradients=True).now
        return CachedSavePlan(plan_save(regions, layouts, rank=self._rank), entries, num_bytes)


# ---- unchanged regions


class IncrementalIndex:
    """Index of the regions that one rank of an attempt need not write."""

    def __init__(self, tier: Tier, rank: int, registry: Registry) -> None:
        self._tier, self._rank, self._registry = tier, rank, registry
        self._known = save_plan.StoredRegions()
        self._digested: dict[str, tuple[bytes, str]] = {}  # key -> checksum on its device, digest

    def begin_from(self, manifest: Manifest, reader: Reader | None = None) -> None:
        """Index the resumed snapshot, whose bytes need not be written again.

        `reader` has read it.
        """
        if self._rank >= manifest.world:
            return
        own = manifest.files[self._rank]
        own = replace(own, name=f"{manifest.name}/{own.name}")
        files = {file.name: file for file in (own, *manifest.reached)}
        try:
            reached_file(own.name)
            reader = reader or Reader(self._tier, manifest)
            places = reader.places(self._rank)
        except TrainckptError as error:  # it was readable a moment ago
            logger.warning("the next save will write all tensors again: %s", error.message)
            return
        regions = {
            p.region.key: save_plan.StoredRegion(
                p.key.removeprefix(f"{SNAPSHOTS}/"), p.region.digested(compact(p.region.digest))
            )
            for p in places
            if p.region.num_bytes >= save_plan.MIN_BYTES
        }
        self._known = self._existing(save_plan.StoredRegions(regions, files))

    def find_unchanged(
        self, captured: Captured, planned: Sequence[Region], *, final: bool = False
    ) -> dict[str, str]:
        """Return the unchanged regions: region key -> the file that holds it.

        `final`: no other save follows if this one fails, so the files are checked first.
        """
        if final:
            self._known = self._existing(self._known)
        tensors = [r for r in planned if r.num_bytes >= save_plan.MIN_BYTES and r.tensor != VALUES]
        if not self._known.held or not tensors:  # the values are read first
            return {}
        models = {model.name for model in self._registry.models}
        trained = self._registry.stepped_parameters()

        def is_untrained(name: str) -> bool:  # a buffer, or frozen
            return name.partition("/")[0] in models and name.partition("#")[0] not in trained

        likely = list(save_plan.candidates(self._known, tensors, is_untrained))
        return save_plan.decide(self._known, planned, self._digests(captured, likely))

    def _digests(self, captured: Captured, regions: Sequence[Region]) -> dict[str, str]:
        """Return the digest of each region's live bytes, by key.

        A region on a GPU with the checksum it had when it was digested is not copied to the host
        again.
        """
        on_device = [r for r in regions if not captured.tensors[r.tensor].is_cpu]
        sums = checksums([source_of(captured, region) for region in on_device])
        now = {region.key: each for region, each in zip(on_device, sums, strict=True)}
        before = {key: self._digested[key] for key in now if key in self._digested}
        digests = {key: digest for key, (each, digest) in before.items() if each == now[key]}
        others = [region for region in regions if region.key not in digests]
        digests |= {key: compact(each) for key, each in digests_of(captured, others).items()}
        self._digested = {key: (each, digests[key]) for key, each in now.items()}
        return digests

    def referenced_files(self, header: ShardHeader) -> tuple[FileEntry, ...]:
        """Return the older files that a new one refers to.

        Raises:
            SaveFailed: one is missing or changed; no snapshot that refers to it can commit.
        """
        files = []
        for name in sorted(set(header.references.values())):
            file = self._known.files[name]
            if self._size(name) != file.num_bytes:
                self._known = save_plan.StoredRegions()
                raise SaveFailed(
                    f"{name}, which holds the unchanged tensors, is missing or has changed",
                    hint="wait for the next save: it writes all tensors again",
                )
            files.append(file)
        return tuple(files)

    def on_commit(self, event: CommitEvent) -> None:
        """Index this rank's file of the committed snapshot."""
        file = replace(event.file, name=f"{event.manifest.name}/{event.file.name}")
        header = event.shard.header
        regions = [
            r.digested(compact(header.digests_of(r)))
            for r in header.regions
            if r.num_bytes >= save_plan.MIN_BYTES
        ]
        self._known = save_plan.regions_after_save(self._known, file, regions, header.references)

    def _existing(self, known: save_plan.StoredRegions) -> save_plan.StoredRegions:
        """Drop files missing in the run directory: the snapshot may have come from another tier."""
        exists: dict[str, bool] = {}
        for file, _ in known.held.values():
            if file not in exists:
                exists[file] = self._size(file) == known.files[file].num_bytes
        regions = {key: each for key, each in known.held.items() if exists[each.file]}
        return known if len(regions) == len(known.held) else replace(known, held=regions)

    def _size(self, name: str) -> int | None:
        try:
            return self._tier.size(f"{SNAPSHOTS}/{name}")
        except UnusableSnapshot:
            return None

"""References: what of this rank's state is not copied, since an older shard file holds it already.

    training thread   begin_from what the run's place holds of the snapshot that was resumed
                      find       digests what is likely to be unchanged; what is, is referred to.
                                 What lies on a GPU is compared there, by its checksum
    saving thread     reached    the files are there still, and what the manifest says of them
                      committed  the next save looks at this one

What is known is of the newest committed snapshot of this attempt, or of the one it began from. A
save that fails changes nothing, unless a file has vanished: then the next save writes all anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.errors import SaveFailed, TrainckptError, UnusableSnapshot
from trainckpt.format.digest import compact
from trainckpt.format.names import SNAPSHOTS, reached_file
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import unchanged
from trainckpt.snapshot.restore import Reader
from trainckpt.state.captured import VALUES
from trainckpt.state.device_checksum import checksums
from trainckpt.state.stage import digests_of, source_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.format.names import SnapshotName
    from trainckpt.format.shard_file import Region, ShardHeader
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier


class References:
    """What one rank of an attempt refers to."""

    def __init__(self, tier: Tier, rank: int, registry: Registry) -> None:
        self._tier, self._rank, self._registry = tier, rank, registry
        self._known = unchanged.Known()
        self._digested: dict[str, tuple[bytes, str]] = {}  # key -> checksum on its device, digest

    def begin_from(self, manifest: Manifest, reader: Reader | None = None) -> None:
        """The attempt goes on from this snapshot, whose bytes need not be written again.

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
            logger.warning("the next save writes everything anew: %s", error.message)
            return
        held = {
            p.region.key: unchanged.Held(p.key.removeprefix(f"{SNAPSHOTS}/"), _compact(p.region))
            for p in places
        }
        self._known = self._in_place(unchanged.Known(held, files))

    def find(
        self, captured: Captured, planned: Sequence[Region], *, last: bool = False
    ) -> dict[str, str]:
        """Key of a region that need not be written -> the file that holds it.

        `last`: no other save follows if this one fails, so the files are looked for first.
        """
        if last:
            self._known = self._in_place(self._known)
        if not self._known.held:
            return {}
        models = {model.name for model in self._registry.models}
        trained = self._registry.stepped_parameters()

        def is_untrained(name: str) -> bool:  # a buffer, or frozen
            return name.partition("/")[0] in models and name.partition("#")[0] not in trained

        tensors = [region for region in planned if region.tensor != VALUES]  # those are read first
        likely = list(unchanged.candidates(self._known, tensors, is_untrained))
        return unchanged.decide(self._known, planned, self._digests(captured, likely))

    def _digests(self, captured: Captured, regions: Sequence[Region]) -> dict[str, str]:
        """Return the digest of each region's live bytes, by key.

        What lies on a GPU and has the checksum that it had when it was digested is not brought to
        the host to be digested again.
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

    def reached(self, header: ShardHeader) -> tuple[FileEntry, ...]:
        """The older files that a new one refers to, which are there still.

        Raises:
            SaveFailed: one is not; nothing can be committed that refers to it.
        """
        found = []
        for name in sorted(set(header.references.values())):
            file = self._known.files[name]
            if self._size(name) != file.num_bytes:
                self._known = unchanged.Known()
                raise SaveFailed(
                    f"{name}, which holds what has not changed since, is not what it was",
                    hint="the next save writes everything anew",
                )
            found.append(file)
        return tuple(found)

    def committed(self, name: SnapshotName, file: FileEntry, header: ShardHeader) -> None:
        """This rank's `file` of the snapshot `name` is committed; `header` has its digests."""
        file = replace(file, name=f"{name}/{file.name}")
        regions = [_compact(region) for region in header.regions]
        self._known = unchanged.committed(self._known, file, regions, header.references)

    def _in_place(self, known: unchanged.Known) -> unchanged.Known:
        """Without what the run's place does not hold: it may have been read from another tier."""
        there: dict[str, bool] = {}
        for file, _ in known.held.values():
            if file not in there:
                there[file] = self._size(file) == known.files[file].num_bytes
        held = {key: each for key, each in known.held.items() if there[each.file]}
        return known if len(held) == len(known.held) else replace(known, held=held)

    def _size(self, name: str) -> int | None:
        try:
            return self._tier.size(f"{SNAPSHOTS}/{name}")
        except UnusableSnapshot:
            return None


def _compact(region: Region) -> Region:
    """With one digest for all its blocks: that is enough to know whether anything changed."""
    found = compact(region.digest)
    return region if found == region.digest else region.digested(found)

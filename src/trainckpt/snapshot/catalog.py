"""List the snapshots of a run, with the reason why one is refused. The mirror of `commit`.

Readers fence: a usable snapshot is on the ancestry of the newest attempt. A commit by a zombie
after its successor began, or one that `resume --at` left behind, is an *abandoned branch*: listed,
and used only by name. Listing reads manifests and file lengths; digests are verified when data is
read.

A pruned snapshot's folder, with files that newer snapshots refer to, is not listed (see `prune`).
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import manifest as manifests
from trainckpt.format import names
from trainckpt.format.attempt_record import UNDECIDED
from trainckpt.format.digest import digest
from trainckpt.format.dump import DumpName
from trainckpt.format.names import SnapshotName
from trainckpt.storage.base import num_looks
from trainckpt.storage.worker_pool import call_all

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.storage.base import Readable, Tier

    Parse = Callable[[bytes, str], Manifest]  # as `manifests.load`


MAX_KNOWN = 32


class ManifestCache:
    """A `manifest.load` that parses equal bytes once, and drops the tensors.

    Each commit is followed by a look at the newest manifests. To parse one of 1,500 tensors takes
    the interpreter from training for 22 ms. The bytes are still read every time: older snapshots
    are deleted on the strength of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Manifest] = {}  # by the digest of its bytes, oldest first

    def __call__(self, data: bytes, what: str) -> Manifest:
        """Return the manifest of these bytes; raise as `manifest.load`."""
        key = digest(data)
        known = self._known.get(key)
        return known or self._keep(key, manifests.load(data, what, with_tensors=False))

    def add(self, manifest: Manifest) -> None:
        """Keep a manifest that was just committed, so that it need not be parsed."""
        if manifest.encryption is None:  # else `load` returns less
            self._keep(digest(manifests.dump(manifest)), replace(manifest, tensors={}))

    def _keep(self, key: str, manifest: Manifest) -> Manifest:
        with self._lock:
            self._known[key] = manifest
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return manifest


NOT_COMMITTED = "not committed: its save was interrupted"
ABANDONED = "abandoned branch: a later attempt resumed from another snapshot"


@dataclass(frozen=True)
class Candidate:
    """A snapshot's folder and the facts known without reading its data.

    Attributes:
        name: From the folder's name.
        manifest: None if missing or damaged.
        usable: True if a resume may try it unasked.
        reason: Why it is not usable, else "".
        tiers: Names of tiers with a complete copy; if only all tiers together have one, of those.
    """

    name: SnapshotName
    manifest: Manifest | None
    usable: bool
    reason: str = ""
    tiers: tuple[str, ...] = ()

    def refusal(self, run: str) -> UnusableSnapshot:
        """Return the error of a command for which this snapshot of `run` was named."""
        return UnusableSnapshot(
            f"{self.name}: {self.reason}", hint=f"trainckpt list {run}, and name another"
        )


def read_catalog(
    tier: Tier,
    run: str,
    attempts: Mapping[int, AttemptRecord],
    parse: Parse = manifests.load,
) -> tuple[Candidate, ...]:
    """Return all snapshots of the run, newest first by (attempt, sequence).

    Args:
        tier, run, attempts: The tier, the run's id, and its known attempts.
        parse: Parses a manifest's bytes.

    Raises:
        TierUnavailable: the tier refused; never reported as an empty catalog.
    """
    return read_copies((tier,), run, attempts, parse)


def read_copies(
    tiers: Sequence[Tier],
    run: str,
    attempts: Mapping[int, AttemptRecord],
    parse: Parse = manifests.load,
) -> tuple[Candidate, ...]:
    """Return all snapshots of the run over all its tiers; as `read_catalog`.

    A snapshot counts if some tier has a valid manifest, and each file it names is in some tier.
    """
    found: dict[SnapshotName, list[Tier]] = {}
    for tier in tiers:
        for name in _listed(tier):
            found.setdefault(name, []).append(tier)
    reach = ancestry(attempts, found)
    sizes = {tier.name: cache(tier.size) for tier in tiers}  # many may refer to one file
    looks: dict[tuple[SnapshotName, str], Candidate] = {}

    def one(name: SnapshotName, tier: Tier) -> None:
        size_of = sizes[tier.name]
        looks[name, tier.name] = look(tier, run, name, reach=reach, size_of=size_of, parse=parse)

    calls = [partial(one, name, tier) for name in found for tier in found[name]]
    call_all(calls, num_looks(tiers), "trainckpt-look")
    return without_remains(
        [
            _merged([(t.name, looks[name, t.name]) for t in found[name]], [*sizes.values()], reach)
            for name in sorted(found, reverse=True)
        ]
    )


def read_newest(
    tier: Tier, run: str, attempts: Mapping[int, AttemptRecord]
) -> tuple[Candidate, ...]:
    """Return the snapshots of the run down to the newest usable one; as `read_catalog`."""
    found = sorted(_listed(tier), reverse=True)
    size_of, listed = cache(tier.size), list[Candidate]()
    for name in found:
        reach = ancestry(attempts, found, name.attempt)
        seen = look(tier, run, name, reach=reach, size_of=size_of, parse=manifests.load)
        listed.append(_merged([(tier.name, seen)], [size_of], reach))
        if seen.usable:
            break
    return without_remains(listed)


def _listed(tier: Tier) -> list[SnapshotName]:
    parsed = map(SnapshotName.parse, tier.list(names.SNAPSHOTS))
    return [name for name in parsed if name is not None]


def without_remains(listed: Collection[Candidate]) -> tuple[Candidate, ...]:
    """Leave out pruned snapshots whose folders stay for the sake of others."""
    reached = {folder for candidate in listed for folder in reached_folders(candidate.manifest)}
    return tuple(c for c in listed if c.reason != NOT_COMMITTED or c.name not in reached)


def _merged(
    looks: Sequence[tuple[str, Candidate]],
    sizes: Sequence[Callable[[str], int | None]],
    reach: Mapping[int, float],
) -> Candidate:
    """Merge the views of one snapshot from the tiers that have some of it, nearest first."""
    whole = [(tier, look) for tier, look in looks if look.reason in ("", ABANDONED)]
    if whole:
        return replace(whole[0][1], tiers=tuple(tier for tier, _ in whole))
    committed = [(tier, look) for tier, look in looks if look.reason != NOT_COMMITTED]
    if len(committed) < 2 and len(sizes) == 1:
        return looks[0][1]
    named = [(tier, look.manifest) for tier, look in committed if look.manifest is not None]
    manifest = named[0][1] if named else None
    why = "; ".join(f"{tier}: {look.reason}" for tier, look in committed) or NOT_COMMITTED
    if manifest is None or not _is_there(manifest, sizes):
        return Candidate(looks[0][1].name, manifest, usable=False, reason=why)
    tiers = tuple(tier for tier, _ in named)
    if is_abandoned(manifest.name, reach):
        return Candidate(manifest.name, manifest, usable=False, reason=ABANDONED, tiers=tiers)
    return Candidate(manifest.name, manifest, usable=True, tiers=tiers)


def _is_there(manifest: Manifest, sizes: Sequence[Callable[[str], int | None]]) -> bool:
    """Return True if each file is in some tier with its full length."""

    def holds(size_of: Callable[[str], int | None], key: str, num_bytes: int) -> bool:
        with contextlib.suppress(UnusableSnapshot):  # it is no file
            return size_of(key) == num_bytes
        return False

    return all(any(holds(s, key, file.num_bytes) for s in sizes) for key, file in _files(manifest))


def is_abandoned(name: SnapshotName, reach: Mapping[int, float]) -> bool:
    """Return True if the newest attempt does not descend from it; `reach`: from `ancestry`."""
    return name.sequence > reach.get(name.attempt, -1)


def _files(manifest: Manifest) -> Iterator[tuple[str, FileEntry]]:
    own = ((f"{manifest.name.folder}/{file.name}", file) for file in manifest.files)
    older = ((f"{names.SNAPSHOTS}/{file.name}", file) for file in manifest.reached)
    return chain(own, older)


def reached_folders(manifest: Manifest | None) -> set[SnapshotName]:
    """Return the older snapshots whose files this one refers to."""
    return {names.reached_file(file.name)[0] for file in manifest.reached} if manifest else set()


def ancestry(
    attempts: Mapping[int, AttemptRecord], found: Iterable[SnapshotName], down_to: int = 1
) -> dict[int, float]:
    """Return attempt -> highest of its sequence numbers that the newest attempt descends from.

    An attempt without a decided parent (it died first, or is deciding) has its predecessor's
    ancestry. `down_to`: the oldest attempt of interest.
    """
    reach: dict[int, float] = {}
    begun, most = None, float("inf")  # the parent of the attempt above, and its sequence
    for at in sorted({*attempts, *(name.attempt for name in found)}, reverse=True):
        if at < max(down_to, 1) or (begun is not None and at > begun):
            continue
        reach[at] = most if at == begun else float("inf")
        begun, record = None, attempts.get(at)
        if record is None or record.parent == UNDECIDED:
            continue
        spelled = record.parent or ""
        parent = SnapshotName.parse(spelled) or DumpName.parse(spelled)
        if parent is None or parent.attempt >= at:
            break
        begun, most = parent.attempt, parent.sequence
    return reach


def load_manifest(
    tier: Readable, run: str, name: SnapshotName, parse: Parse = manifests.load
) -> Manifest:
    """Return the manifest of one snapshot, checked against its run and folder.

    Raises:
        UnusableSnapshot: missing, damaged, of another run, or in another snapshot's folder.
    """
    key = f"{name.folder}/{names.MANIFEST}"
    manifest = parse(tier.read(key, max_bytes=manifests.MAX_BYTES), key)
    if manifest.run != run:
        raise UnusableSnapshot(f"{key} belongs to another run ({manifest.run[:40]})")
    if manifest.name != name:
        raise UnusableSnapshot(f"{key} is the manifest of {manifest.name}")
    return manifest


def find(candidates: Iterable[Candidate], wanted: str, run: str = "RUN") -> Candidate:
    """Return the candidate named `wanted`: a full name, an id, a tag, or "latest".

    For a shared id or tag, the newest usable one. `run`: the run's name in the error's hint.

    Raises:
        UnusableSnapshot: there is none.
    """
    listed = list(candidates)
    matching = [c for c in listed if _is_called(c, wanted)]
    for candidate in sorted(matching, key=lambda c: not c.usable):
        return candidate
    known = ", ".join(str(c.name) for c in listed[:5]) or "none"
    raise UnusableSnapshot(
        f"there is no snapshot {wanted!r}; newest: {known}", hint=f"trainckpt list {run}"
    )


def _is_called(candidate: Candidate, wanted: str) -> bool:
    tags = candidate.manifest.tags if candidate.manifest else ()
    if wanted == "latest":
        return candidate.usable
    return wanted in (str(candidate.name), candidate.name.id, *tags)


def look(
    tier: Tier,
    run: str,
    name: SnapshotName,
    *,
    reach: Mapping[int, float],
    size_of: Callable[[str], int | None],
    parse: Parse,
) -> Candidate:
    """Read one snapshot's manifest, and the lengths of its files.

    Args:
        tier, run, name: The tier, the run's id, and the snapshot.
        reach: From `ancestry`.
        size_of: Returns the length of a file.
        parse: Parses a manifest's bytes.
    """
    try:
        manifest = _committed(tier, run, name, parse)
    except UnusableSnapshot as error:
        return Candidate(name, None, usable=False, reason=error.message)
    if manifest is None:
        return Candidate(name, None, usable=False, reason=NOT_COMMITTED)
    for key, file in _files(manifest):
        try:
            size = size_of(key)
        except UnusableSnapshot as error:  # it is no file
            return Candidate(name, manifest, usable=False, reason=error.message)
        if size != file.num_bytes:
            what = "is missing" if size is None else f"has {size} bytes, not {file.num_bytes}"
            return Candidate(name, manifest, usable=False, reason=f"{file.name} {what}")
    if is_abandoned(name, reach):
        return Candidate(name, manifest, usable=False, reason=ABANDONED)
    return Candidate(name, manifest, usable=True)


def _committed(tier: Tier, run: str, name: SnapshotName, parse: Parse) -> Manifest | None:
    """Return the manifest, or None if there is none. Most are there, so none is looked for first.

    Raises:
        UnusableSnapshot: as `load_manifest`, but not for a missing one.
    """
    try:
        return load_manifest(tier, run, name, parse)
    except UnusableSnapshot:
        if tier.size(f"{name.folder}/{names.MANIFEST}") is None:
            return None
    return load_manifest(tier, run, name, parse)  # committed meanwhile, or damaged

"""Flush: a committed snapshot, copied to a slower tier. Its mirror for whole runs is `adopt`.

    1. shard files   every rank its share, in blocks, digested on their way: a flipped bit is not
                     copied, but refused. Older files that the snapshot refers to come along
    2. reports       every rank
    3. records       of the attempts: readers there have to tell a branch from the ancestry too
    4. the commit    rank 0, after all of 1 and 3: the manifest, the very same bytes

So a slower tier looks as the run's place does, and a run can go on from it when that is gone. A
crash before 4 leaves garbage for `prune`: what lies in a folder without a manifest may be cut
short whatever its length is, so it is never taken for a copy.

Several may copy to one tier at once, and what is copied may be there already, good or bad: a file
takes its place in one act, when it is whole, and whoever fails removes nothing but his own.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from trainckpt.errors import (
    ConfigurationError,
    SaveFailed,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)
from trainckpt.format import manifest as manifests
from trainckpt.format import names
from trainckpt.format.attempt import MAX_BYTES
from trainckpt.format.checking import check_of, over
from trainckpt.format.names import SNAPSHOTS, SnapshotName
from trainckpt.snapshot import attempts, catalog, histories
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from trainckpt.format.checking import Stored
    from trainckpt.format.files import FileEntry
    from trainckpt.format.manifest import Manifest
    from trainckpt.tiers.base import Readable, Tier

BLOCK_BYTES = 8 << 20


def share(manifest: Manifest, rank: int, world: int) -> list[tuple[str, FileEntry]]:
    """What one of `world` ranks copies: its own files, and the older ones it would have written."""
    own = ((number, key) for number, key in enumerate(files_of(manifest)))
    found = []
    for number, (key, file) in own:
        writer = number if number < len(manifest.files) else names.reached_file(file.name)[1]
        if writer % world == rank:
            found.append((key, file))
    return found


def committed_keys(tier: Tier, run: str) -> frozenset[str]:
    """Files that committed snapshots of this tier hold or refer to: they are whole."""
    found: set[str] = set()
    for name in map(SnapshotName.parse, tier.list(SNAPSHOTS)):
        if name is not None:
            with contextlib.suppress(UnusableSnapshot):
                found.update(key for key, _ in files_of(catalog.load_manifest(tier, run, name)))
    return frozenset(found)


def copy_file(
    sources: Sequence[Readable],
    target: Tier,
    key: str,
    file: Stored,
    check: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy one file from the first source that holds it as it should be.

    Args:
        sources: Nearest first; only `read_into` is asked of them.
        target: Where it is written anew. What lies there under this key stands until then.
        key, file: Of the file.
        check: Called at each block, with how many bytes there are to come; with 0 when all came,
            are good, and have yet to be made durable. What it raises ends the copy.

    Raises:
        UnusableSnapshot: no source holds it; the target is as it was.
        TierUnavailable: a tier refused.
    """
    refused: list[UnusableSnapshot] = []
    for source in sources:
        try:
            blocks = _blocks(source, key, file, check)
            target.write(key, blocks, file.num_bytes, replacing=True)
        except _NotGood as error:
            refused.append(error.why)
        except UnusableSnapshot as error:  # its folder vanished under us
            raise TierUnavailable(error.message, hint=error.hint) from error
        else:
            return
    raise refused[-1]


def copy_missing(
    sources: Sequence[Readable],
    target: Tier,
    manifest: Manifest,
    key: str,
    file: FileEntry,
    check: Callable[[int], None] = lambda num_bytes: None,
) -> bool:
    """Copy one file of a snapshot, unless somebody commits that there before; whether it was.

    Raises: as `copy_file`, of which the arguments are; `manifest` is the snapshot's.
        SaveFailed: another snapshot of this name is committed there.
    """
    if _is_committed(target, manifest, key, file):
        return False
    try:
        copy_file(sources, target, key, file, check)
    except TrainckptError:
        if _is_committed(target, manifest, key, file):
            return False
        raise
    return True


def _is_committed(target: Tier, manifest: Manifest, key: str, file: FileEntry) -> bool:
    if not holds(target, manifest.name):
        return False
    return _is_the_same(target, manifest) and target.size(key) == file.num_bytes


def _is_the_same(target: Tier, manifest: Manifest) -> bool:
    """Whether it is what is committed there under its name; False if that is nothing valid.

    Raises:
        SaveFailed: it is another one, of which no byte may be written over.
    """
    try:
        there = catalog.load_manifest(target, manifest.run, manifest.name)
    except UnusableSnapshot:
        return False
    if manifests.bound(there) != manifests.bound(manifest):
        raise _another_snapshot(target, manifest.name)
    return True


def must_not_be_another(target: Tier, manifest: Manifest) -> None:
    """Refuse to copy a snapshot to where another one has its name, or that of one it refers to.

    Raises:
        SaveFailed: so it is: two starts have gone on from one place, each with its own disk.
        TierUnavailable: the target refused.
    """
    if holds(target, manifest.name):
        _is_the_same(target, manifest)
    for older in sorted(catalog.reached_folders(manifest)):
        with contextlib.suppress(UnusableSnapshot):  # pruned there, its files are kept
            own = catalog.load_manifest(target, manifest.run, older).files
            there = {f"{older}/{file.name}": file for file in own}
            for file in manifest.reached:
                if (found := there.get(file.name)) and _tell(found) != _tell(file):
                    raise _another_snapshot(target, older)


def _tell(file: FileEntry) -> tuple[int, str]:
    """What is in it; the digest of the whole file is named by some manifests only."""
    return file.num_bytes, file.header_digest


def _another_snapshot(target: Readable, name: SnapshotName) -> SaveFailed:
    return SaveFailed(
        f"another snapshot is called {name} in {target.url}",
        hint="copy to another place, or move that one away: two copies of one run have gone on",
    )


class _NotGood(Exception):
    """A source does not hold the file as the manifest says; passes through the target's `write`."""

    def __init__(self, why: UnusableSnapshot) -> None:
        super().__init__(why.message)
        self.why = why


def _blocks(
    source: Readable, key: str, file: Stored, check: Callable[[int], None]
) -> Iterator[memoryview]:
    passing = check_of(file)
    memory = memoryview(bytearray(min(BLOCK_BYTES, file.num_bytes)))

    def read() -> Iterator[memoryview]:
        for at in range(0, file.num_bytes, BLOCK_BYTES):
            check(file.num_bytes - at)
            block = memory[: min(BLOCK_BYTES, file.num_bytes - at)]
            try:
                source.read_into(key, at, block)
            except UnusableSnapshot as error:
                raise _NotGood(error) from error
            yield block

    yield from over(read(), passing)
    if not passing.is_right:  # raised inside `write`, which then leaves nothing
        raise _NotGood(UnusableSnapshot(f"{key} in {source.url} does not match its digest"))
    check(0)


def found_there(place: Readable, target: Tier, run: str, *, again: bool = False) -> None:
    """The slower tier holds this run from now on, if it holds none yet.

    Args:
        place: The run's place.
        target, run: The tier, and the id of the run.
        again: It did hold it before; if not, its file system has vanished.

    Raises:
        ConfigurationError: it holds another run.
        TierUnavailable: it refused, or has vanished.
    """
    there = attempts.run_id(target)
    if there is None and again:
        raise TierUnavailable(f"{target.url} is gone", hint="is its file system still mounted?")
    if there is None:
        target.create(names.RUN_RECORD, place.read(names.RUN_RECORD, max_bytes=MAX_BYTES))
        there = attempts.run_id(target)
    if there != run:
        raise another_run(target, there)


def another_run(target: Readable, there: str | None) -> ConfigurationError:
    """Nothing of two runs may lie in one tier."""
    return ConfigurationError(
        f"the tier {target.name} at {target.url} holds another run ({str(there)[:40]})",
        hint="give each run a folder or prefix of its own; {run} in a tier's URL stands for the "
        "name of the run's place",
    )


def mirror_records(place: Readable, target: Tier, sent: dict[str, bytes]) -> None:
    """Copy the attempts' records that the tier lacks, or has as they were before.

    Args:
        place, target: From, to.
        sent: What is known to be there, by name; is added to.

    Raises:
        ConfigurationError: one there is of another attempt, which has saved: a copy of the run
            goes on with this tier too.
        TierUnavailable: one of both refused.
    """
    changed = {}
    for name in place.list(names.ATTEMPTS):
        if (number := names.recorded_attempt(name)) is None:
            continue
        key = f"{names.ATTEMPTS}/{name}"
        data = place.read(key, max_bytes=MAX_BYTES)
        if sent.get(name) != data and target.size(key) is not None:
            with contextlib.suppress(UnusableSnapshot):
                sent[name] = target.read(key, max_bytes=MAX_BYTES)
            if name in sent and sent[name] != data:
                histories.must_not_replace(place, target, number, data, sent[name])
        if sent.get(name) != data:
            changed[name] = data
    for name, data in changed.items():
        target.replace(f"{names.ATTEMPTS}/{name}", data)
        sent[name] = data


def commit_copy(target: Tier, manifest: Manifest, data: bytes) -> None:
    """Every file is there: commit. When it returns the snapshot exists in this tier too.

    Args:
        target: The slower tier.
        manifest, data: Of the snapshot; the bytes as they stand in the run's place.

    Raises:
        SaveFailed: a file is not there with its length, or another snapshot has this name.
    """
    for key, file in files_of(manifest):
        size = target.size(key)
        if size != file.num_bytes:
            raise SaveFailed(f"{key} has {size} bytes in {target.url}, not {file.num_bytes}")
    _commit(target, manifest, data)
    with contextlib.suppress(TrainckptError):  # whoever still copies one of these finds it there
        target.clear_unfinished(manifest.name.folder)


def _commit(target: Tier, manifest: Manifest, data: bytes) -> None:
    key = f"{manifest.name.folder}/{names.MANIFEST}"
    if target.create(key, data):
        return
    there = target.read(key, max_bytes=manifests.MAX_BYTES)
    if there == data:
        return
    with contextlib.suppress(UnusableSnapshot):
        found = manifests.load(there, key)
        if manifests.bound(found) == manifests.bound(manifest):
            target.replace(key, data)  # it has other recipients now
            return
        raise _another_snapshot(target, manifest.name)
    target.replace(key, data)  # what stood there was damaged


def bring_records(target: Tier, source: Readable) -> None:
    """Copy the attempts' records that the run's place lacks; those that it has are its own."""
    there = set(target.list(names.ATTEMPTS))
    for name in source.list(names.ATTEMPTS):
        if names.recorded_attempt(name) is not None and name not in there:
            key = f"{names.ATTEMPTS}/{name}"
            target.create(key, source.read(key, max_bytes=MAX_BYTES))


def adopt(target: Tier, source: Readable) -> None:
    """The run's place is new or was lost: let it be that of the run that `source` holds.

    The run's own record comes last: with it, the place holds the run.
    """
    bring_records(target, source)
    target.create(names.RUN_RECORD, source.read(names.RUN_RECORD, max_bytes=MAX_BYTES))


def holds(tier: Tier, name: SnapshotName) -> bool:
    """Whether the snapshot was committed in this tier."""
    return tier.size(f"{name.folder}/{names.MANIFEST}") is not None


def all_reached(manifest: Manifest, keys: Collection[str]) -> list[str]:
    """Of `keys`, those of older files that the snapshot refers to, sorted."""
    older = {f"{SNAPSHOTS}/{file.name}" for file in manifest.reached}
    return sorted(older.intersection(keys))

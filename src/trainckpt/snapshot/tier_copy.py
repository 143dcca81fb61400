"""Copy a committed snapshot to a slower tier. `adopt` restores a run directory from such a tier.

    1. shard files   each rank copies its share in blocks, and checks digests on the way: a
                     flipped bit is refused. Referenced older files are copied too
    2. reports       from every rank
    3. records       of the attempts: a reader of the tier must tell branches from the ancestry
    4. the commit    rank 0, after all of 1 and 3: the same manifest bytes

The tier then looks like the run directory, so a run can resume from it alone. A crash before 4
leaves garbage for `prune`. Files in a folder without a manifest may be incomplete at any length, so
they never count as a copy.

Several processes may copy to one tier at once, over files good or bad: each file is replaced
atomically once complete, and a failed copy removes only its own bytes.
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
from trainckpt.format.attempt_record import MAX_BYTES
from trainckpt.format.digest_check import check_of
from trainckpt.format.names import SNAPSHOTS, SnapshotName
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from trainckpt.format.digest_check import StoredBytes
    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.storage.base import Readable, Tier

BLOCK_BYTES = 8 << 20


def share(manifest: Manifest, rank: int, world: int) -> list[tuple[str, FileEntry]]:
    """Return the files to copy by one of `world` ranks.

    These are its own files, and the older ones it would have written.
    """
    own = ((number, key) for number, key in enumerate(files_of(manifest)))
    found = []
    for number, (key, file) in own:
        writer = number if number < len(manifest.files) else names.reached_file(file.name)[1]
        if writer % world == rank:
            found.append((key, file))
    return found


def complete_keys(tier: Tier, run: str) -> frozenset[str]:
    """Return the keys of files in this tier's committed snapshots, referenced ones included.

    These files are complete.
    """
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
    file: StoredBytes,
    check: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Copy one file from the first source with a correct copy.

    Args:
        sources: Nearest first; only `read_into` is used.
        target: The destination. The old file under this key stays until it is replaced.
        key, file: The file.
        check: Called at each block with the bytes still to come, and with 0 once all came and
            are correct but not yet durable. Its exceptions end the copy.

    Raises:
        UnusableSnapshot: no source has it; the target is unchanged.
        TierUnavailable: a tier refused.
    """
    refused: list[UnusableSnapshot] = []
    for source in sources:
        try:
            blocks = _blocks(source, key, file, check)
            target.write(key, blocks, file.num_bytes, replacing=True)
        except _NotGood as error:
            refused.append(error.why)
        except UnusableSnapshot as error:  # the target's folder vanished during the write
            raise TierUnavailable(error.message, hint=error.hint) from error
        else:
            return
    raise refused[-1]


def copy_missing(
    sources: Sequence[Readable],
    target: Tier,
    manifest: Manifest,
    *,
    key: str,
    file: FileEntry,
    check: Callable[[int], None] = lambda num_bytes: None,
) -> bool:
    """Copy one file of a snapshot unless the snapshot is committed there; return True if copied.

    Arguments are those of `copy_file`; `manifest` is the snapshot's.

    Raises: as `copy_file`, and
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
    """Return True if this snapshot is committed there; False if its manifest there is invalid.

    Raises:
        SaveFailed: another snapshot has the name; none of its bytes may be overwritten.
    """
    try:
        there = catalog.load_manifest(target, manifest.run, manifest.name)
    except UnusableSnapshot:
        return False
    if manifests.bound(there) != manifests.bound(manifest):
        raise _another_snapshot(target, manifest.name)
    return True


def must_not_be_another(target: Tier, manifest: Manifest) -> None:
    """Refuse to copy over another snapshot of the same name, or of the name of a referenced one.

    Raises:
        SaveFailed: there is one: two starts continued the run, each with its own disk.
        TierUnavailable: the target refused.
    """
    if holds(target, manifest.name):
        _is_the_same(target, manifest)
    for older in sorted(catalog.reached_folders(manifest)):
        with contextlib.suppress(UnusableSnapshot):  # pruned there, with its files kept
            own = catalog.load_manifest(target, manifest.run, older).files
            there = {f"{older}/{file.name}": file for file in own}
            for file in manifest.reached:
                if (found := there.get(file.name)) and _tell(found) != _tell(file):
                    raise _another_snapshot(target, older)


def _tell(file: FileEntry) -> tuple[int, str]:
    """Return the length and header digest; only some manifests have a digest of the whole file."""
    return file.num_bytes, file.header_digest


def _another_snapshot(target: Readable, name: SnapshotName) -> SaveFailed:
    return SaveFailed(
        f"cannot copy {name}: {target.url} holds another snapshot of this name",
        hint="copy to another place, or move that one away: two copies of one run have trained",
    )


class _NotGood(Exception):
    """A source's file differs from the manifest. Passes through the target's `write`."""

    def __init__(self, why: UnusableSnapshot) -> None:
        super().__init__(why.message)
        self.why = why


def _blocks(
    source: Readable, key: str, file: StoredBytes, check: Callable[[int], None]
) -> Iterator[memoryview]:
    passing = check_of(file)
    memory = memoryview(bytearray(min(BLOCK_BYTES, file.num_bytes)))
    for at in range(0, file.num_bytes, BLOCK_BYTES):
        check(file.num_bytes - at)
        block = memory[: min(BLOCK_BYTES, file.num_bytes - at)]
        try:
            source.read_into(key, at, block)
        except UnusableSnapshot as error:
            raise _NotGood(error) from error
        passing.update(block)
        yield block
    if not passing.is_right:  # raised inside `write`, which then leaves nothing
        raise _NotGood(UnusableSnapshot(f"{key} in {source.url} does not match its digest"))
    check(0)


def found_there(run_tier: Readable, target: Tier, run: str, *, again: bool = False) -> None:
    """Record this run's id in the slower tier, if the tier has no run yet.

    Args:
        run_tier: The run directory.
        target, run: The tier, and the id of the run.
        again: The tier had the run before; without it now, its file system has vanished.

    Raises:
        ConfigurationError: the tier has another run.
        TierUnavailable: it refused, or has vanished.
    """
    there = attempt_history.run_id(target)
    if there is None and again:
        raise TierUnavailable(
            f"{target.url} is gone", hint="see whether its file system is mounted"
        )
    if there is None:
        target.create(names.RUN_RECORD, run_tier.read(names.RUN_RECORD, max_bytes=MAX_BYTES))
        there = attempt_history.run_id(target)
    if there != run:
        raise another_run(target, there)


def another_run(target: Readable, there: str | None) -> ConfigurationError:
    """Return the error for a tier that holds another run."""
    return ConfigurationError(
        f"the tier {target.name} at {target.url} holds another run ({str(there)[:40]})",
        hint="give each run a folder or prefix of its own; {run} in a tier's URL stands for the "
        "name of the run directory",
    )


def mirror_records(run_tier: Readable, target: Tier, sent: dict[str, bytes], live: int = 0) -> None:
    """Copy attempt records missing or outdated in the tier.

    Args:
        run_tier, target: The source and the destination.
        sent: Records known to be there, by name; updated.
        live: Records of earlier attempts than this one are read once.

    Raises:
        ConfigurationError: a record there is of another attempt with a commit: a copy of the run
            uses this tier too.
        TierUnavailable: either tier refused.
    """
    changed = {}
    for name in run_tier.list(names.ATTEMPTS):
        if (number := names.recorded_attempt(name)) is None:
            continue
        if number < live and name in sent:
            continue
        key = f"{names.ATTEMPTS}/{name}"
        data = _record(run_tier, key)
        if data is None:
            continue
        if sent.get(name) != data and target.size(key) is not None:
            with contextlib.suppress(UnusableSnapshot):
                sent[name] = target.read(key, max_bytes=MAX_BYTES)
            if name in sent and sent[name] != data:
                attempt_history.must_not_replace(run_tier, target, number, data, sent[name])
        if sent.get(name) != data:
            changed[name] = data
    for name, data in changed.items():
        target.replace(f"{names.ATTEMPTS}/{name}", data)
        sent[name] = data


def commit_copy(target: Tier, manifest: Manifest, data: bytes) -> None:
    """Commit once every file is there. On return the snapshot exists in this tier too.

    Args:
        target: The slower tier.
        manifest, data: The snapshot's manifest, and its bytes as in the run directory.

    Raises:
        SaveFailed: a file is missing or has another length, or another snapshot has this name.
    """
    for key, file in files_of(manifest):
        size = target.size(key)
        if size != file.num_bytes:
            raise SaveFailed(f"{key} has {size} bytes in {target.url}, not {file.num_bytes}")
    _commit(target, manifest, data)
    with contextlib.suppress(TrainckptError):  # a process still copying one finds it committed
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
            target.replace(key, data)  # the same snapshot with new recipients
            return
        raise _another_snapshot(target, manifest.name)
    target.replace(key, data)  # the manifest there was damaged


def bring_records(target: Tier, source: Readable) -> None:
    """Copy the attempt records missing in the run directory; existing ones stay as they are."""
    there = set(target.list(names.ATTEMPTS))
    for name in source.list(names.ATTEMPTS):
        if names.recorded_attempt(name) is not None and name not in there:
            key = f"{names.ATTEMPTS}/{name}"
            if (data := _record(source, key)) is not None:
                target.create(key, data)


def _record(tier: Readable, key: str) -> bytes | None:
    """Return the bytes of a record; None for what is no file. Its reader says so."""
    with contextlib.suppress(UnusableSnapshot):
        return tier.read(key, max_bytes=MAX_BYTES)
    return None


def adopt(target: Tier, source: Readable) -> None:
    """Make an empty or lost run directory that of the run in `source`.

    The run's record is written last: with it, the directory holds the run.
    """
    bring_records(target, source)
    target.create(names.RUN_RECORD, source.read(names.RUN_RECORD, max_bytes=MAX_BYTES))


def holds(tier: Tier, name: SnapshotName) -> bool:
    """Return True if the snapshot is committed in this tier."""
    return tier.size(f"{name.folder}/{names.MANIFEST}") is not None


def all_reached(manifest: Manifest, keys: Collection[str]) -> list[str]:
    """Return the `keys` that are older files the snapshot refers to, sorted."""
    older = {f"{SNAPSHOTS}/{file.name}" for file in manifest.reached}
    return sorted(older.intersection(keys))

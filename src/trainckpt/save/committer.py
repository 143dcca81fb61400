"""The committer: writes one rank's shard file on the saving thread, and commits with the others.

    write the file, fsync                every rank
    report its receipt and its tensors   every rank
    commit when all have reported        rank 0
    publish the verdict                  rank 0
    record it, and prune (`retention`)   rank 0, while the next save may begin

No collectives in here, only the store: training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import NoAgreement, SaveFailed, TierUnavailable, TrainckptError
from trainckpt.format import names
from trainckpt.format.digest import digest
from trainckpt.format.manifest import FileEntry
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.save.retention import PRUNE_WITHIN_S, RetentionWorker
from trainckpt.snapshot import prune
from trainckpt.snapshot.commit import (
    check_whole,
    commit,
    merge_tables,
    table_from_json,
    table_name,
    table_to_json,
)
from trainckpt.snapshot.encrypted_writer import stored_bytes
from trainckpt.snapshot.shard_writer import write_shard, write_stream
from trainckpt.snapshot.writer_client import WriterClient, WriterDied
from trainckpt.state import staging
from trainckpt.state.captured import VALUES
from trainckpt.state.staging import TensorsChanged
from trainckpt.storage.store_errors import is_full

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from trainckpt.attempt.record_writer import AttemptId, RecordWriter
    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.deduplication import IncrementalIndex
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.snapshot.encrypted_writer import SnapshotKey
    from trainckpt.state.adapters.tracked_file import TrackedFile
    from trainckpt.storage.arena import Arena
    from trainckpt.storage.base import Tier


# ---- store keys of one save
#
#     save/<sequence>/groups     reduced: which tensors are equal on their replicas
#     save/<sequence>/report/<r> rank r to rank 0: its receipt, or why there is none
#     save/<sequence>/verdict    rank 0 to all
#
# The store of torch.distributed holds a key in one process's memory until it is deleted, and a run
# saves for weeks. A rank's report has been read once the verdict exists. Rank 0's message has been
# read once all have reported on a later save: a rank finishes one save before it begins the next.


def groups_key(sequence: int) -> str:
    """Return the key of the reduction of one save."""
    return f"save/{sequence}/groups"


def report_key(sequence: int, rank: int) -> str:
    """Return the key of a rank's report to rank 0."""
    return f"save/{sequence}/report/{rank}"


def verdict_key(sequence: int) -> str:
    """Return the key of rank 0's verdict for all ranks."""
    return f"save/{sequence}/verdict"


class SaveKeys:
    """Deletes the keys of one rank, save by save. Used by one thread at a time."""

    def __init__(self, channel: RankStore) -> None:
        self._channel = channel
        self._own = self._common = 0  # the keys of saves up to these are deleted

    def delete_read(self, sequence: int) -> None:
        """Delete read keys: the verdict exists; on rank 0, all ranks have reported on this save."""
        rank, keys = self._channel.world.rank, list[str]()
        for number in range(self._own + 1, sequence + 1):
            keys += [f"{groups_key(number)}/{rank}", report_key(number, rank)]
        if rank == 0:
            for number in range(self._common + 1, sequence):
                keys += [verdict_key(number), *self._channel.fold_keys(groups_key(number))]
            self._common = sequence - 1
        self._own = sequence
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to delete
            self._channel.forget(keys)


# ---- errors of a save, as messages between ranks


def to_error_message(error: Exception, rank: int, place: str) -> dict[str, Any]:
    """Return the text of an error, and a hint what to do about it.

    Args:
        error: Raised on this rank.
        rank: This rank.
        place: Run directory, as a command takes it.
    """
    message = getattr(error, "message", "") or f"{type(error).__name__}: {error}"
    return {
        "error": f"rank {rank}: {message}",
        "hint": _hint(error, place),
        "changed": isinstance(error, TensorsChanged),
        "kind": kind_of(error),
    }


def kind_of(error: Exception) -> str:
    """Return the kind of a failed save's reason, one of `SaveFailed.KINDS`."""
    if is_full(error):
        return "full"
    if isinstance(error, TierUnavailable | OSError):
        return "storage"
    if isinstance(error, NoAgreement):
        return "ranks"
    if isinstance(error, TensorsChanged):
        return "state"
    return error.kind if isinstance(error, SaveFailed) else "other"


def combine_errors(failed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the reports of failed ranks: every error, and the first hint; most are alike."""
    return {
        "error": "; ".join(report["error"] for report in failed),
        "hint": next((report["hint"] for report in failed if report.get("hint")), ""),
        "changed": any(report.get("changed") for report in failed),
        "kind": next((report["kind"] for report in failed if report.get("kind")), ""),
    }


def error_from_message(verdict: Mapping[str, Any]) -> SaveFailed:
    """Return the exception that every rank raises, from the verdict of rank 0."""
    kind = TensorsChanged if verdict.get("changed") else SaveFailed
    hint, reason = str(verdict.get("hint", "")), str(verdict.get("kind", ""))
    return kind(str(verdict["error"]), hint=hint, kind=reason)


def _hint(error: Exception, place: str) -> str:
    own_hint = str(getattr(error, "hint", ""))
    if not is_full(error):
        return own_hint
    # A full tracked file's disk, or memory, may be elsewhere: no prune frees that.
    prune = f", e.g. by `trainckpt prune {place} --keep-last 1`"
    also = prune if isinstance(error, TierUnavailable) else ""
    return f"{own_hint or 'free space there'}{also}, then start again; older snapshots stand"


# ---- the committer


KEEP_TABLES = 4  # saves: a window's gradients come and go, and with them two tables take turns


@dataclass(frozen=True)
class ManifestDefaults:
    """Constants of every manifest of one attempt."""

    run: str
    number: AttemptId
    parent: str | None
    fingerprint: dict[str, Any]
    keep_last: int

    @property
    def attempt(self) -> int:
        """Current number of the attempt."""
        return self.number.value


class SnapshotCommitter:
    """Writes and commits the snapshots of one attempt, one at a time.

    Attributes:
        manifest: Rank 0: manifest of the last save with reports from all ranks.
        retention: Rank 0: the work after a commit.
        stored_s: When this rank's last file was on stable storage, by the monotonic clock.
    """

    manifest: Manifest | None = None
    stored_s = 0.0

    def __init__(
        self,
        *,
        tier: Tier,
        channel: RankStore,
        files: Sequence[TrackedFile],
        defaults: ManifestDefaults,
        record_writer: RecordWriter,
        references: IncrementalIndex,
        being_read: Callable[[], Collection[str]] = tuple,
        encryption: SnapshotEncryption | None = None,
        room: Callable[..., Arena | None] = lambda num_bytes, **_: None,
    ) -> None:
        """Open a connection of its own to the store.

        Args:
            tier, channel, files, defaults, record_writer, references: Of the attempt.
            being_read: Returns full names of snapshots that must not be pruned now.
            encryption: Encrypts every file; None: nothing is encrypted.
            room: Returns memory for an encrypted file to replicate (`ReplicationControl.reserve`).
        """
        self._encryption, self._room = encryption, room
        self._tier = tier
        self.retention = RetentionWorker(tier, defaults, record_writer, being_read)
        self._references = references
        self._rank, self._size = channel.world.rank, channel.world.size
        self._background = channel.connection()
        self._keys = SaveKeys(self._background)
        self._files = files
        self._client = WriterClient()
        self._tables: tuple[Any, str] = None, ""  # the table published last, and its name
        self._last_use: dict[str, int] = {}  # rank 0: tables in the store -> the last save with it
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Abandon the save in flight, unless all is written already."""
        self._abandoned.set()

    def begin(self) -> None:
        """Clear `abandon` before another save; none is in flight."""
        self._abandoned.clear()

    def write(
        self,
        manifest: Manifest,
        shard: staging.Shard | staging.StreamedShard,
        entries: dict[str, TensorEntry],
        finish: Callable[[], Iterator[int]],
        *,
        in_memory: bool = False,
    ) -> FileEntry:
        """Write this rank's file, and return its entry once the snapshot is committed.

        Args:
            manifest: The manifest, as far as one rank knows it.
            shard: The file, complete once `finish` has ended.
            entries: Every tensor of this rank.
            finish: Completes the shard; yields addresses below which it is complete.
            in_memory: Write and commit nothing; only report.

        Raises:
            SaveFailed: on all ranks, if any rank failed.
        """
        rank, sequence = self._rank, manifest.name.sequence
        report: dict[str, Any] = {}
        try:
            for tracked in self._files:  # the lengths recorded must really be there
                tracked.sync()
            reached = self._references.referenced_files(shard.header)
            snapshot_key = self._encryption.begin(manifest.name) if self._encryption else None
            file = self._store(manifest.name, shard, finish(), snapshot_key, in_memory=in_memory)
            self.stored_s = time.monotonic()
            self._check_not_abandoned()
            older = [referenced.to_json() for referenced in reached]
            report["receipt"] = {"file": file.to_json(), "reached": older}
            report["table"] = self._publish(entries)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            report.update(to_error_message(error, rank, self._tier.url))
        finally:  # training waits for `is_read`, also after an error
            if isinstance(shard, staging.StreamedShard):
                shard.is_read.set()
        if rank != 0:
            self.send(sequence, report)
            verdict = self._background.get(verdict_key(sequence), RANKS_TIMEOUT_S)
        else:
            verdict = self._commit(manifest, report, entries, in_memory=in_memory)
            self.send(sequence, verdict)
        if self._encryption is not None:
            self._encryption.end(manifest.name)
        if "error" in verdict:
            raise error_from_message(verdict)
        if in_memory:
            self._keys.delete_read(sequence)
        return file

    def _store(
        self,
        name: SnapshotName,
        shard: staging.Shard | staging.StreamedShard,
        copied: Iterator[int],
        snapshot_key: SnapshotKey | None,
        *,
        in_memory: bool,
    ) -> FileEntry:
        """Write this rank's file to stable storage, or keep it in memory alone, encrypted or plain.

        `shard.header` has digests afterwards.
        """
        if isinstance(shard, staging.StreamedShard):
            if in_memory:
                hint = "raise the option memory_budget"
                raise SaveFailed("no memory is free for the final save", hint=hint)
            written = write_stream(
                self._tier,
                name,
                self._rank,
                head=shard.head,
                num_bytes=shard.header.header_bytes + shard.header.data_bytes,
                blocks=shard.blocks(),
                snapshot_key=snapshot_key,
            )
            shard.is_read.set()
            return written
        if in_memory and snapshot_key is None:
            for _ in copied:  # it is read only once it is complete
                pass
            file_name = names.shard_file_name(self._rank)
            return FileEntry(file_name, len(shard.memory), "", digest(shard.head))
        arena = (
            self._room(stored_bytes(shard), in_memory=in_memory)
            if snapshot_key is not None
            else None
        )
        tier = None if in_memory else self._tier
        if tier is None and arena is None:
            raise SaveFailed("too little shared memory is free for the encrypted final save")
        entry = self._store_by_client(
            tier, name, shard, copied=copied, snapshot_key=snapshot_key, arena=arena
        )
        if entry is not None:
            return entry
        into = arena.memory if arena is not None else None
        return write_shard(
            tier, name, self._rank, shard, copied=copied, snapshot_key=snapshot_key, into=into
        )

    def _store_by_client(
        self,
        tier: Tier | None,
        name: SnapshotName,
        shard: staging.Shard,
        *,
        copied: Iterator[int],
        snapshot_key: SnapshotKey | None,
        arena: Arena | None,
    ) -> FileEntry | None:
        """Have the writer process store the file; None if it takes no such file, or has died."""
        file = shard.descriptor
        if file is None or not self._client.takes(tier, len(shard.memory)):
            return None
        into = (arena.descriptor, len(arena.memory)) if arena is not None else None
        try:
            entry, shard.header = self._client.write(
                tier,
                name,
                self._rank,
                shard,
                descriptor=file,
                copied=copied,
                snapshot_key=snapshot_key,
                into=into,
            )
        except WriterDied:
            if tier is not None:
                tier.remove(f"{name.folder}/{names.shard_file_name(self._rank)}")
            return None
        return entry

    def prepare(self, num_bytes: int) -> None:
        """Start the writer process if it takes files of about this size."""
        if self._client.takes(self._tier, num_bytes):
            threading.Thread(
                target=self._client.start, name="trainckpt-beside", daemon=True
            ).start()

    def stop_client(self) -> None:
        """End the writer process: nothing is written for a while."""
        self._client.rest()

    def on_commit(self, event: CommitEvent) -> None:
        """Record the commit and prune, while the next save may begin."""
        self._keys.delete_read(event.manifest.name.sequence)
        if event.whole is not None:
            self.retention.schedule(event.whole)

    def close(self, *, keep: bool) -> None:
        """End the attempt; `keep`: wait for pruning no longer than its limit."""
        self._client.close()
        self.retention.wait(PRUNE_WITHIN_S if keep else None)

    def _check_not_abandoned(self) -> None:
        if self._abandoned.is_set():  # the live tensors may have changed while they were streamed
            raise SaveFailed("the save was abandoned at its deadline", kind="deadline")

    def _commit(
        self,
        manifest: Manifest,
        own: dict[str, Any],
        entries: dict[str, TensorEntry],
        *,
        in_memory: bool,
    ) -> dict[str, Any]:
        """Rank 0: collect every report, then commit; return the verdict for all ranks."""
        sequence = manifest.name.sequence
        try:
            reports = [own]
            for r in range(1, self._size):
                key = report_key(sequence, r)
                reports.append(self._background.get(key, RANKS_TIMEOUT_S))
            failed = [report for report in reports if "error" in report]
            self._delete_tables(sequence, reports)
            if not failed:
                try:
                    tensors = self._all_tensors(reports, entries)
                except SaveFailed as error:
                    failed = [{"error": error.message, "hint": error.hint}]
            if failed:
                self._discard(manifest.name)
                return combine_errors(failed)
            receipts = [report["receipt"] for report in reports]
            files = tuple(FileEntry.from_json(receipt["file"]) for receipt in receipts)
            referenced = [
                FileEntry.from_json(f) for receipt in receipts for f in receipt["reached"]
            ]
            older = {file.name: file for file in referenced}
            reached = tuple(older[name] for name in sorted(older))
            self.manifest = replace(manifest, files=files, tensors=tensors, reached=reached)
            if self._encryption is not None:
                self.manifest = self._encryption.encrypt_manifest(self.manifest)
            if not in_memory:
                commit(self._tier, self.manifest)
                if self._encryption is not None:
                    self._encryption.allow_references(self.manifest)
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for a verdict
            return to_error_message(error, 0, self._tier.url)
        return {"ok": True}

    def _publish(self, entries: dict[str, TensorEntry]) -> str:
        """Send this rank's table of tensors to rank 0; return its name. An equal table is sent
        once.

        Values are left out: their length differs from save to save, and rank 0 has its own.
        """
        if entries is self._tables[0]:
            return self._tables[1]
        table_entries = {name: entry for name, entry in entries.items() if name != VALUES}
        name = table_name(table_entries)
        key = f"tensors/{name}"
        if self._rank and self._background.peek(f"{key}/here") is None:
            self._background.put_all({key: table_to_json(table_entries), f"{key}/here": True})
        self._tables = entries, name
        return name

    def _all_tensors(
        self, reports: Sequence[dict[str, Any]], own: dict[str, TensorEntry]
    ) -> dict[str, TensorEntry]:
        """Rank 0: merge the tensors of all ranks. Most tables are equal, and are read once."""
        tables, ranks_by_table = {reports[0]["table"]: own}, dict[str, list[int]]()
        for rank, report in enumerate(reports):
            if report["table"] not in tables:
                table = self._background.get(f"tensors/{report['table']}", RANKS_TIMEOUT_S)
                tables[report["table"]] = table_from_json(table, len(reports))
            ranks_by_table.setdefault(report["table"], []).append(rank)
        merged = merge_tables(list(tables.values()))
        check_whole(merged, [(tables[name], ranks) for name, ranks in ranks_by_table.items()])
        return merged

    def _delete_tables(self, sequence: int, reports: Sequence[dict[str, Any]]) -> None:
        """Rank 0: delete tables not used for some saves.

        All ranks have published their tables of this save and wait for the verdict. None is looking
        up an older table, and each counts only its table of this save as published.
        """
        self._last_use.update(
            {report["table"]: sequence for report in reports if "table" in report}
        )
        if any("error" in report for report in reports):
            return
        old = [name for name, last in self._last_use.items() if last < sequence - KEEP_TABLES]
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to delete
            for name in old:
                del self._last_use[name]
                self._background.forget([f"tensors/{name}", f"tensors/{name}/here"])

    def _discard(self, name: SnapshotName) -> None:
        """Remove an uncommitted snapshot, once every rank has written or failed."""
        try:
            prune.prune(self._tier, [name], ())
        except TrainckptError as error:
            logger.warning("could not remove the uncommitted files of %s: %s", name, error.message)

    def send(self, sequence: int, message: dict[str, Any]) -> None:
        """Publish the verdict on rank 0; send the report to rank 0 on other ranks."""
        rank = self._rank
        key = report_key(sequence, rank) if rank else verdict_key(sequence)
        self._background.put(key, message)

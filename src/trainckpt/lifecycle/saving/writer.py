"""The writer: what the saving thread does with one rank's shard file, until all ranks know.

    write the file, fsync                every rank
    report its receipt and its tensors   every rank
    commit when all have reported        rank 0
    tell all: "durable"                  rank 0
    record it, and prune (`tidying`)     rank 0, while the next save may begin

No collectives in here, only the store: training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.errors import NoAgreement, SaveFailed, TrainckptError
from trainckpt.format import names
from trainckpt.format.digest import digest
from trainckpt.format.files import Files
from trainckpt.format.strict import canonical
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.saving import failures, save_keys
from trainckpt.lifecycle.saving.haste import Haste
from trainckpt.lifecycle.saving.tidying import Tidying
from trainckpt.snapshot import prune
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.save import (
    Receipt,
    only_digested,
    only_sealed,
    write_shard,
    write_stream,
)
from trainckpt.snapshot.save_sealed import stored_bytes
from trainckpt.snapshot.tables import check_whole, merge_tables, table_from_json, table_to_json
from trainckpt.snapshot.write_beside import File, Lost, WriteBeside
from trainckpt.state import stage
from trainckpt.state.captured import VALUES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from trainckpt.format.manifest import Manifest, TensorEntry
    from trainckpt.format.names import SnapshotName
    from trainckpt.lifecycle.run.attempt_log import AttemptLog
    from trainckpt.lifecycle.run.attempt_number import AttemptNumber
    from trainckpt.lifecycle.saving.references import References
    from trainckpt.lifecycle.saving.sealing import Sealing
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.save_sealed import Seal
    from trainckpt.state.kinds.tracked_file import TrackedFile
    from trainckpt.tiers.arena import Arena
    from trainckpt.tiers.base import Tier

RANKS_TIMEOUT_S = 600.0
TABLES_STAY = 4  # saves: a window's gradients come and go, and with them two tables take turns
TIDY_WITHIN_S = 5.0  # whoever stops waits so long for old snapshots to be pruned


@dataclass(frozen=True)
class Facts:
    """What every manifest of this attempt says alike."""

    run: str
    number: AttemptNumber
    parent: str | None
    fingerprint: dict[str, Any]
    keep_last: int

    @property
    def attempt(self) -> int:
        """Its number now."""
        return self.number.value


class Writer:
    """Writes and commits the snapshots of one attempt, one at a time.

    Attributes:
        whole: Rank 0: the manifest of the last save on which all have reported.
        tidying: What follows a commit, on rank 0.
        haste: Whether some rank waits for the save in flight.
    """

    whole: Manifest | None = None

    def __init__(
        self,
        tier: Tier,
        channel: Channel,
        files: Sequence[TrackedFile],
        facts: Facts,
        log: AttemptLog,
        references: References,
        being_read: Callable[[], Collection[str]] = tuple,
        sealing: Sealing | None = None,
        room: Callable[..., Arena | None] = lambda num_bytes, **_: None,
    ) -> None:
        """Of one rank.

        Args:
            tier, channel, files, facts, log, references: Of the attempt.
            being_read: Full names of snapshots that must not be pruned now.
            sealing: Everything is encrypted.
            room: Memory for an encrypted file that others are to keep (`Protecting.room`).
        """
        self._sealing, self._room = sealing, room
        self._tier = tier
        self.tidying = Tidying(tier, facts, log, being_read)
        self._references = references
        self._rank, self._size = channel.world.rank, channel.world.size
        self._background = channel.connection()
        self._keys = save_keys.SaveKeys(self._background)
        self.haste = Haste(channel, self._background)
        self._files = files
        self._facts = facts
        self._beside = WriteBeside()
        self._tables: tuple[Any, str] = None, ""  # what was published last, and its name
        self._told: dict[str, int] = {}  # rank 0: tables in the store -> the last save with it
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """The save in flight must not be committed any more, unless all is written already."""
        self._given_up.set()

    def begin(self) -> None:
        """Another save begins, and none is in flight: it was not this one that was given up."""
        self._given_up.clear()

    def write(
        self,
        manifest: Manifest,
        shard: stage.Shard | stage.Stream,
        entries: dict[str, TensorEntry],
        finish: Callable[[Callable[[], bool]], Iterator[int]],
        *,
        in_memory: bool = False,
    ) -> None:
        """Write this rank's file; returns once the snapshot is committed.

        Args:
            manifest: As far as one rank knows it.
            shard: The file, once `finish` has ended.
            entries: Every tensor of this rank.
            finish: Completes the shard; gives addresses below which it is complete. It may ask
                whether training waits for the save.
            in_memory: Nothing is written nor committed: all only report on what they have.

        Raises:
            SaveFailed: it is not, on any rank.
        """
        rank, sequence = self._rank, manifest.name.sequence
        report: dict[str, Any] = {}
        try:
            for file in self._files:  # the lengths recorded must really be there
                file.sync()
            reached = self._references.reached(shard.header)
            seal = self._sealing.begin(manifest.name) if self._sealing else None
            copied = finish(partial(self.haste.is_asked, sequence))
            if in_memory:
                receipt = self._in_memory(manifest.name, shard, copied, seal)
            else:
                receipt = self._write_file(manifest.name, shard, copied, seal)
            receipt = replace(receipt, reached=reached)
            self._must_be_wanted()
            report["receipt"] = receipt.to_json()
            report["table"] = self._publish(entries)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            report.update(failures.told(error, rank, self._tier.url))
        finally:  # training waits for it, whatever happened
            if isinstance(shard, stage.Stream):
                shard.is_read.set()
        if rank != 0:
            self.tell(sequence, report)
            verdict = self._background.get(save_keys.verdict(sequence), RANKS_TIMEOUT_S)
        else:
            verdict = self._commit(manifest, report, entries, in_memory=in_memory)
            self.tell(sequence, verdict)
        if self._sealing is not None:
            self._sealing.end(manifest.name)
        if "error" in verdict:
            raise failures.raised(verdict)
        if in_memory:
            self._keys.read(sequence)
            return
        self._references.committed(manifest.name, receipt.file, shard.header)

    def _write_file(
        self,
        name: SnapshotName,
        shard: stage.Shard | stage.Stream,
        copied: Iterator[int],
        seal: Seal | None,
    ) -> Receipt:
        """This rank's file is on stable storage when it returns, and `shard.header` has digests."""
        if isinstance(shard, stage.Stream):
            size = shard.header.header_bytes + shard.header.data_bytes
            stream = shard.head, size, shard.blocks
            written = write_stream(self._tier, name, self._rank, *stream, seal)
            shard.is_read.set()
            return written
        arena = self._room(stored_bytes(shard), in_memory=False) if seal is not None else None
        try:
            receipt = self._beside_us(self._tier, name, shard, copied, seal, arena)
        except Lost:
            receipt = None
            self._tier.remove(f"{name.folder}/{names.shard_file_name(self._rank)}")
        if receipt is not None:
            return receipt
        into = arena.memory if arena is not None else None
        return write_shard(self._tier, name, self._rank, shard, copied, seal, into)

    def _in_memory(
        self,
        name: SnapshotName,
        shard: stage.Shard | stage.Stream,
        copied: Iterator[int],
        seal: Seal | None,
    ) -> Receipt:
        """As `_write_file`, but it stays in memory: encrypted, or as it is."""
        if isinstance(shard, stage.Stream):
            raise SaveFailed(
                "there is no memory in which it could stay", hint="raise the option memory_budget"
            )
        if seal is None:
            for _ in copied:  # nobody reads it before it is complete
                pass
            return only_digested(self._rank, shard)
        arena = self._room(stored_bytes(shard), in_memory=True)
        if arena is None:
            raise SaveFailed(
                "there is no shared memory in which it could stay encrypted, or too little is left"
            )
        receipt = None
        with contextlib.suppress(Lost):
            receipt = self._beside_us(None, name, shard, copied, seal, arena)
        return receipt or only_sealed(name, self._rank, shard, copied, seal, arena.memory)

    def _beside_us(
        self,
        tier: Tier | None,
        name: SnapshotName,
        shard: stage.Shard,
        copied: Iterator[int],
        seal: Seal | None,
        arena: Arena | None,
    ) -> Receipt | None:
        """Have it written by the process beside us; None: it is not there for such a file.

        Raises:
            Lost: it is not there any more.
        """
        file = shard.descriptor
        if file is None or not self._beside.takes(tier, len(shard.memory)):
            return None
        into = (arena.descriptor, len(arena.memory)) if arena is not None else None
        written = self._beside.write(File(tier, name, self._rank, shard, file, seal, into), copied)
        shard.header = written.header
        return written.receipt

    def prepare(self, num_bytes: int) -> None:
        """Files of about this size will be written: have the process that does it beside us."""
        if self._beside.takes(self._tier, num_bytes):
            threading.Thread(
                target=self._beside.start, name="trainckpt-beside", daemon=True
            ).start()

    def rest(self) -> None:
        """Nothing is written for a while: nobody need be beside us."""
        self._beside.rest()

    def tidy(self, name: SnapshotName) -> None:
        """After the commit of `name`: record it and prune, while the next save may begin."""
        self._keys.read(name.sequence)
        if self._rank == 0:
            self.tidying.after(name)

    def close(self, *, keep: bool) -> None:
        """The attempt is over; unless `keep`, the run too: no file will be written over."""
        self._beside.close()
        self.tidying.wait(TIDY_WITHIN_S if keep else None)
        if self._rank == 0 and not keep:
            with contextlib.suppress(TrainckptError):
                self._tier.clear_spares()

    def _must_be_wanted(self) -> None:
        """What was streamed from live tensors after `give_up` may be anything."""
        if self._given_up.is_set():
            raise SaveFailed("given up: the time was over")

    def _commit(
        self,
        manifest: Manifest,
        own: dict[str, Any],
        entries: dict[str, TensorEntry],
        *,
        in_memory: bool,
    ) -> dict[str, Any]:
        """Rank 0: collect every report, then commit; returns what all ranks are told."""
        sequence = manifest.name.sequence
        try:
            reports = [own]
            for r in range(1, self._size):
                key = save_keys.report(sequence, r)
                reports.append(self._background.get(key, RANKS_TIMEOUT_S))
            failed = [report for report in reports if "error" in report]
            self._forget_tables(sequence, reports)
            if not failed:
                try:
                    tensors = self._all_tensors(reports, entries)
                except SaveFailed as error:
                    failed = [{"error": error.message, "hint": error.hint}]
            if failed:
                self._discard(manifest.name)
                return failures.together(failed)
            receipts = [Receipt.from_json(report["receipt"]) for report in reports]
            files = Files.of([receipt.file for receipt in receipts])
            older = {file.name: file for receipt in receipts for file in receipt.reached}
            reached = tuple(older[name] for name in sorted(older))
            self.whole = replace(manifest, files=files, tensors=tensors, reached=reached)
            if self._sealing is not None:
                self.whole = self._sealing.manifest(self.whole)
            if not in_memory:
                commit(self._tier, self.whole)
                if self._sealing is not None:
                    self._sealing.committed(self.whole)
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for a verdict
            return failures.told(error, 0, self._tier.url)
        return {"ok": True}

    def _publish(self, entries: dict[str, TensorEntry]) -> str:
        """Let rank 0 see which tensors this rank has; the same table is told once while it is used.

        Without the values, whose length differs from save to save: rank 0 has its own.
        """
        if entries is self._tables[0]:
            return self._tables[1]
        told = {name: entry for name, entry in entries.items() if name != VALUES}
        table = table_to_json(told)
        name = digest(canonical(table))
        key = f"tensors/{name}"
        if self._rank and self._background.peek(f"{key}/here") is None:
            self._background.put_all({key: table, f"{key}/here": True})
        self._tables = entries, name
        return name

    def _all_tensors(
        self, reports: Sequence[dict[str, Any]], own: dict[str, TensorEntry]
    ) -> dict[str, TensorEntry]:
        """Rank 0: the tensors of all ranks. Most tables are alike, and are read once."""
        tables, told_by = {reports[0]["table"]: own}, dict[str, list[int]]()
        for rank, report in enumerate(reports):
            if report["table"] not in tables:
                told = self._background.get(f"tensors/{report['table']}", RANKS_TIMEOUT_S)
                tables[report["table"]] = table_from_json(told, len(reports))
            told_by.setdefault(report["table"], []).append(rank)
        merged = merge_tables(list(tables.values()))
        check_whole(merged, [(tables[name], ranks) for name, ranks in told_by.items()])
        return merged

    def _forget_tables(self, sequence: int, reports: Sequence[dict[str, Any]]) -> None:
        """Rank 0, once all ranks have told their tables of this save and wait for the verdict: none
        just looks for an older one, and each takes only that of this save for told.
        """
        self._told.update({report["table"]: sequence for report in reports if "table" in report})
        if any("error" in report for report in reports):
            return
        old = [name for name, last in self._told.items() if last < sequence - TABLES_STAY]
        with contextlib.suppress(NoAgreement):  # without the store there is nothing to forget
            for name in old:
                del self._told[name]
                self._background.forget([f"tensors/{name}", f"tensors/{name}/here"])

    def _discard(self, name: SnapshotName) -> None:
        """Every rank has written or failed, and nothing is committed: make room for the next."""
        try:
            prune.prune(self._tier, [name], ())
        except TrainckptError as error:
            logger.warning("what is left of %s could not be removed: %s", name, error.message)

    def tell(self, sequence: int, message: dict[str, Any]) -> None:
        """Rank 0 tells all ranks the verdict; any other tells rank 0 its report."""
        rank = self._rank
        key = save_keys.report(sequence, rank) if rank else save_keys.verdict(sequence)
        self._background.put(key, message)

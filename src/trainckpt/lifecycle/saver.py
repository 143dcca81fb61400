"""The saver: takes one snapshot at a time, on all ranks together.

    training thread, at a boundary               saving thread, training goes on
    1  wait for the save in flight, if any        5  write the shard file, fsync        (every rank)
    2  capture; agree which groups are shared     6  report its receipt                 (every rank)
    3  plan what this rank stores                 7  commit when all have reported      (rank 0)
    4  copy it into one shard: "staged"           8  tell all: "durable"; prune         (rank 0)

All ranks take the same saves in the same order, since each is asked for at a boundary that all
agreed on. A rank that fails says so in 2 or 6, and then nobody commits: training goes on, the
failure is logged, older snapshots stand.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format.digest import digest
from trainckpt.format.manifest import RANK, SPLIT, Files, Manifest, TensorEntry
from trainckpt.format.names import SnapshotName
from trainckpt.format.strict import canonical
from trainckpt.format.versions import VERSION
from trainckpt.lifecycle.log import logger
from trainckpt.lifecycle.pending import COMMITTED, STAGED, PendingSave
from trainckpt.snapshot import catalog, prune
from trainckpt.snapshot.attempts import newest, read_attempts
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.save import Receipt, write_shard
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.snapshot.tables import (
    check_whole,
    merge_tables,
    table_from_json,
    table_to_json,
)
from trainckpt.state import stage
from trainckpt.state.capture import capture
from trainckpt.state.captured import VALUES
from trainckpt.state.weight import weigh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.shard_file import Region
    from trainckpt.lifecycle.attempt_log import AttemptLog
    from trainckpt.lifecycle.pace import Pace
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier

RANKS_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Facts:
    """What every manifest of this attempt says alike."""

    run: str
    attempt: int
    parent: str | None
    fingerprint: dict[str, Any]
    keep_last: int


class Saver:
    """Takes the snapshots of one attempt.

    Attributes:
        committed: Full name and cursor of the newest snapshot this attempt committed.
        in_flight: The save that is being written, or the last one.
        attempt: Its number.
    """

    def __init__(
        self,
        tier: Tier,
        channel: Channel,
        registry: Registry,
        facts: Facts,
        log: AttemptLog,
        pace: Pace,
        window_start: Callable[[], Cursor],
    ) -> None:
        self.attempt = facts.attempt
        self.committed: tuple[str, Cursor] | None = None
        self.in_flight: PendingSave | None = None
        self._tier = tier
        self._channel = channel
        self._background = channel.connection()
        self._registry = registry
        self._facts = facts
        self._log = log
        self._pace = pace
        self._window_start = window_start
        self._sequence = 0
        self._superseded = False
        self._memory: torch.Tensor | None = None
        self._thread: threading.Thread | None = None
        self._given_up = threading.Event()
        self._begun = (0.0, 0)  # when the save in flight was begun, and its bytes

    def save(
        self,
        cursor: Cursor,
        reason: str,
        tags: tuple[str, ...],
        pending: PendingSave,
        *,
        last: bool = False,
    ) -> PendingSave:
        """Take a snapshot now. Every rank calls it at the same boundary.

        Returns when the state is staged, or the save has failed; never raises for a failed save.

        Args:
            cursor, reason, tags: For the manifest.
            pending: Is moved on.
            last: Nothing is copied: the caller changes nothing before `wait` or `give_up`.
        """
        self.wait()
        begun_s = time.monotonic()
        self._sequence += 1
        name = SnapshotName(self._facts.attempt, self._sequence, cursor.step, cursor.micro)
        self.in_flight = pending
        try:
            shard, shared = self._stage(cursor, last=last)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._tell(name.sequence, {"error": f"rank {self._channel.world.rank}: {error}"})
            self._failed(pending, name, SaveFailed(f"nothing was captured: {error}"))
            return pending
        pending.reach(STAGED, str(name))
        self._begun = begun_s, weigh(self._registry, gradients=True).now
        manifest = Manifest(
            self._facts.run, name, self._facts.parent, cursor, self._channel.world.size, (), {},
            time.time(), tags=tags, reason=reason, fingerprint=self._facts.fingerprint,
            writer=f"trainckpt {VERSION}", window=self._window_start(),
        )  # fmt: skip
        self._thread = threading.Thread(
            target=self._write,
            args=(manifest, shard, shared, pending),
            name="trainckpt-save",
            daemon=True,
        )
        self._thread.start()
        return pending

    def wait(self, limit_s: float | None = None) -> None:
        """Return when no save is in flight, or after `limit_s` seconds."""
        if self._thread is not None:
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._thread = None

    def give_up(self) -> None:
        """The save in flight must not be committed any more, unless all is written already."""
        self._given_up.set()

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._thread is not None and self._thread.is_alive()

    def _stage(
        self, cursor: Cursor, *, last: bool
    ) -> tuple[stage.Shard | stage.Stream, dict[str, TensorEntry]]:
        """Steps 2 to 4. Returns the shard, and an entry for every tensor of this rank."""
        world = self._channel.world
        answer: dict[str, Any] = {"place": cursor.place(), "groups": {}}
        try:
            captured = capture(self._registry)
            if world.size > 1:
                answer["groups"] = stage.group_digests(captured, world.rank, world.size)
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for an answer
            answer["error"] = f"rank {world.rank}: {getattr(error, 'message', repr(error))}"
        key = f"save/{self._sequence}/groups"
        verdict = self._channel.fold(key, answer, _compare, RANKS_TIMEOUT_S)
        if verdict["error"]:
            raise SaveFailed(verdict["error"])
        layouts = stage.split_layouts(captured, set(verdict["equal"]), world.size)
        regions = stage.describe(captured, layouts)
        planned = plan_save(regions, layouts, rank=world.rank)
        shard = self._shard(captured, planned, last=last)
        entries = {
            r.tensor: TensorEntry(
                r.dtype, r.of, SPLIT if r.tensor in layouts else RANK, layouts.get(r.tensor)
            )
            for r in regions
        }
        return shard, entries

    def _shard(
        self, captured: Captured, planned: Sequence[Region], *, last: bool
    ) -> stage.Shard | stage.Stream:
        world = self._channel.world
        if last:
            return stage.stream(captured, planned, rank=world.rank, world=world.size)
        shard = stage.stage(
            captured, planned, rank=world.rank, world=world.size, memory=self._memory
        )
        self._memory = shard.memory
        return shard

    def _write(
        self,
        manifest: Manifest,
        shard: stage.Shard | stage.Stream,
        entries: dict[str, TensorEntry],
        pending: PendingSave,
    ) -> None:
        # background thread: no collectives here, only the store
        try:
            self._write_and_commit(manifest, shard, entries)
        except SaveFailed as error:
            self._failed(pending, manifest.name, error)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, training goes on
            self._failed(pending, manifest.name, SaveFailed(str(error) or repr(error)))
        else:
            self.committed = (str(manifest.name), manifest.cursor)
            if self._channel.world.rank == 0:
                logger.info("saved %s (%s)", manifest.name, manifest.reason)
            begun_s, num_bytes = self._begun
            self._pace.saved(num_bytes, time.monotonic() - begun_s)
            pending.reach(COMMITTED)

    def _write_and_commit(
        self, manifest: Manifest, shard: stage.Shard | stage.Stream, entries: dict[str, TensorEntry]
    ) -> None:
        rank, prefix = self._channel.world.rank, f"save/{manifest.name.sequence}"
        report: dict[str, Any] = {}
        try:
            for file in self._registry.files:  # the lengths recorded must really be there
                file.sync()
            receipt = write_shard(self._tier, manifest.name, rank, shard.head, shard.blocks)
            self._must_be_wanted()
            report["receipt"] = receipt.to_json()
            report["table"] = self._publish(entries)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
            report["error"] = f"rank {rank}: {getattr(error, 'message', error)}"
            report["changed"] = isinstance(error, stage.TensorsChanged)
        if rank != 0:
            self._tell(manifest.name.sequence, report)
            verdict = self._background.get(f"{prefix}/verdict", RANKS_TIMEOUT_S)
        else:
            verdict = self._commit(manifest, report, entries)
            self._tell(manifest.name.sequence, verdict)
        if "error" in verdict:
            kind = stage.TensorsChanged if verdict.get("changed") else SaveFailed
            raise kind(str(verdict["error"]))
        if rank == 0:
            self._log.change(newest_commit=str(manifest.name))
            self._prune()

    def _must_be_wanted(self) -> None:
        """What was streamed from live tensors after `give_up` may be anything."""
        if self._given_up.is_set():
            raise SaveFailed("given up: the time was over")

    def _commit(
        self, manifest: Manifest, own: dict[str, Any], entries: dict[str, TensorEntry]
    ) -> dict[str, Any]:
        """Rank 0: collect every report, then commit; returns what all ranks are told."""
        prefix, world = f"save/{manifest.name.sequence}/report", self._channel.world.size
        try:
            others = [
                self._background.get(f"{prefix}/{r}", RANKS_TIMEOUT_S) for r in range(1, world)
            ]
            reports = [own, *others]
            errors = [report["error"] for report in reports if "error" in report]
            if not errors:
                try:
                    tensors = self._all_tensors(reports, entries)
                except SaveFailed as error:
                    errors = [error.message]
            if errors:
                self._discard(manifest.name)
                changed = any(report.get("changed") for report in reports)
                return {"error": "; ".join(errors), "changed": changed}
            files = Files.of([Receipt.from_json(report["receipt"]).file for report in reports])
            commit(self._tier, replace(manifest, files=files, tensors=tensors))
        except Exception as error:  # noqa: BLE001 - the other ranks are waiting for a verdict
            return {"error": f"rank 0: {getattr(error, 'message', repr(error))}"}
        return {"ok": True}

    def _publish(self, entries: dict[str, TensorEntry]) -> str:
        """Let rank 0 see which tensors this rank has; the same table is told once an attempt.

        Without the values, whose length differs from save to save: rank 0 has its own.
        """
        told = {name: entry for name, entry in entries.items() if name != VALUES}
        table = table_to_json(told)
        name = digest(canonical(table))
        key = f"tensors/{name}"
        if self._channel.world.rank and self._background.peek(f"{key}/here") is None:
            self._background.put_all({key: table, f"{key}/here": True})
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

    def _discard(self, name: SnapshotName) -> None:
        """Every rank has written or failed, and nothing is committed: make room for the next."""
        try:
            prune.prune(self._tier, [name])
        except TrainckptError as error:
            logger.warning("what is left of %s could not be removed: %s", name, error.message)

    def _tell(self, sequence: int, message: dict[str, Any]) -> None:
        """Rank 0 tells all ranks the verdict; any other tells rank 0 its report."""
        rank = self._channel.world.rank
        key = f"report/{rank}" if rank else "verdict"
        self._background.put(f"save/{sequence}/{key}", message)

    def _prune(self) -> None:
        try:
            if self._is_superseded():
                return  # a newer attempt decides what is kept
            attempts = read_attempts(self._tier)
            candidates = catalog.read_catalog(self._tier, self._facts.run, attempts)
            doomed = prune.plan_prune(
                candidates, keep_last=self._facts.keep_last, attempt=self._facts.attempt
            )
            prune.prune(self._tier, doomed, unless=self._is_superseded)
        except TrainckptError as error:
            logger.warning("old snapshots could not be pruned: %s", error.message)

    def _is_superseded(self) -> bool:
        """Whether a newer attempt of the run has begun; said once."""
        newer = newest(self._tier)
        if newer <= self._facts.attempt:
            return False
        if not self._superseded:
            self._superseded = True
            logger.warning(
                "attempt %d of this run has begun: what this one, attempt %d, saves from now on "
                "is a branch that no resume takes unasked", newer, self._facts.attempt,
            )  # fmt: skip
        return True

    def _failed(self, pending: PendingSave, name: SnapshotName, error: SaveFailed) -> None:
        logger.warning("save %s failed, training goes on: %s", name, error.message)
        pending.fail(error)


def _compare(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Which groups of tensors are equal on their replicas, or why nothing can be saved."""
    errors = [answer["error"] for answer in answers if "error" in answer]
    places = [answer["place"] for answer in answers]
    if any(place != places[0] for place in places):
        errors.append(f"the ranks are not at one boundary: {places[:16]}")
    equal = [] if errors else equal_groups([answer["groups"] for answer in answers])
    return {"error": "; ".join(errors), "equal": equal}

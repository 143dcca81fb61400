"""Survivor save: when ranks have died, the others save the newest step they hold whole.

    1  the training thread stands still: it hangs in a collective, or has left it by an error
    2  each rank reports its states, in a file in the run directory: the ranks' store may have died
       with the rank that served it
    3  a rank that sees enough reports proposes what to save; the first proposal stands
       (`snapshot.survivor_plan`). If there are never enough: after a while, a save not bitwise
    4  each rank writes its own file, and those of the ranks it holds the small state of
    5  the first of the writers commits; all leave

    survivors/<attempt>/<rank>.json        2
    survivors/<attempt>/decision.json      3
    survivors/<attempt>/wrote-<rank>.json  4

No collective, and nothing of the store. Once an attempt, by the first thread that comes. A rank
that was taken for dead and wakes later follows the others' decision; once a newer attempt has begun
it does nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import SaveFailed
from trainckpt.format import json_io, names
from trainckpt.format.manifest import FileEntry, Manifest
from trainckpt.format.names import VERSION, SnapshotName
from trainckpt.snapshot.attempt_history import newest
from trainckpt.snapshot.commit import commit, merge_tables, table_from_json, table_to_json
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.snapshot.survivor_plan import SurvivorDecision, SurvivorHoldings, decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import TensorEntry
    from trainckpt.save.committer import ManifestDefaults
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.state.step_state import StepState
    from trainckpt.storage.base import Tier
    from trainckpt.survivors.step_history import StepHistory

POLL_S = 0.1
SETTLE_S = 2.0  # others may have something newer to report
PATIENCE_S = 15.0  # others may notice later
STEP_ENDS_S = 5.0  # a step that was begun comes to its end within that
WRITTEN_WITHIN_S = 300.0
WITHIN_S = STEP_ENDS_S + PATIENCE_S + 2 * WRITTEN_WITHIN_S  # all of it: written, and committed
MAX_BYTES = 1 << 28
DECISION = "decision.json"


@dataclass(frozen=True)
class SurvivorSnapshot:
    """Result of a survivor save.

    Attributes:
        name: Full name of the snapshot.
        cursor: Where a resume continues.
        bitwise: With every rank's own state.
    """

    name: str
    cursor: Cursor
    bitwise: bool


class SurvivorSave:
    """One rank's part in a survivor save."""

    def __init__(
        self,
        *,
        tier: Tier,
        rank: int,
        world: int,
        facts: ManifestDefaults,
        moments: StepHistory,
        sequence: Callable[[], int],
        encryption: SnapshotEncryption | None = None,
        waits_for_own: bool,
    ) -> None:
        """Prepare; no file is written before `save`.

        Args:
            tier: The run directory.
            rank, world: Of this process.
            facts: Constants of every manifest of this attempt.
            moments: The step history.
            sequence: Returns the number of the last save that was begun.
            encryption: Encrypts the snapshot; None: it is not encrypted.
            waits_for_own: There are no copies: a step that was begun must end first.
        """
        self.moments = moments
        self._tier, self._rank, self._world, self._facts = tier, rank, world, facts
        self._sequence, self._waits, self._encryption = sequence, waits_for_own, encryption
        self._folder = f"{names.SURVIVORS}/{facts.attempt}"
        self._once = threading.Lock()
        self._done = False
        self._saved: SurvivorSnapshot | None = None

    def save(self, reason: str) -> SurvivorSnapshot | None:
        """Save the newest whole step. Never raises; None: there is none, or the save failed.

        Any thread; a second caller waits for the first, and gets the same result.
        """
        with self._once:
            if not self._done:
                self._done = True
                try:
                    with self.moments.on_own_stream():
                        self._saved = self._save(reason)
                except Exception as error:  # noqa: BLE001 - the process leaves anyway
                    logger.error(
                        "the surviving ranks could not save: %s",
                        getattr(error, "message", repr(error)),
                    )
            return self._saved

    def _save(self, reason: str) -> SurvivorSnapshot | None:
        if self.moments.why_off:
            return None
        logger.warning("%s: the surviving ranks save their newest step", reason)
        until_s = time.monotonic() + STEP_ENDS_S
        while self._waits and time.monotonic() < until_s and not self.moments.is_live:
            time.sleep(POLL_S / 10)
        self.moments.freeze()
        self._check_newest()
        moments: dict[Any, StepState] = {}
        holdings, alike = [], self.moments.replicated
        for moment in self.moments.states():
            assert alike is not None
            if moment.entries is alike.entries:  # else the first step has made tensors
                place = tuple(moment.cursor.place())
                files = [
                    o for o in (self._rank, *sorted(moment.kept)) if moment.has(alike.share(o))
                ]
                has = SurvivorHoldings(place, tuple(files), moment.is_whole, moment.is_carried)
                moments[place] = moment
                holdings.append(has.to_json())
        self._publish(f"{self._rank}.json", {"sequence": self._sequence(), "has": holdings})
        proposal = self._decide()
        if proposal is None:
            logger.error("no step is complete on the surviving ranks: nothing is saved")
            return None
        decision = SurvivorDecision.from_json(proposal["decision"])
        own, first = moments.get(decision.place), min(decision.writers)
        name = SnapshotName(self._facts.attempt, proposal["sequence"], *decision.place[1:3])
        if self._rank in decision.writers:
            assert own is not None
            self._write(name, decision, own)
            if self._rank == first:
                self._commit(name, decision, own.cursor, proposal["present"])
        manifest = f"{name.folder}/{names.MANIFEST}"
        if not self._await(lambda: self._tier.size(manifest), WRITTEN_WITHIN_S):
            raise SaveFailed(f"rank {first} did not commit {name}")
        if own is None:
            return None
        return SurvivorSnapshot(str(name), own.cursor, not (decision.lost or decision.carried))

    def _check_newest(self) -> None:
        # After a newer attempt has begun no resume would take the save, and names may collide.
        newer = newest(self._tier)
        if newer > self._facts.attempt:
            raise SaveFailed(f"attempt {newer} of this run has already begun")

    def _decide(self) -> Any:
        """Return the first proposal: decision, sequence number, ranks that have reported."""
        begun_s = time.monotonic()
        while (proposal := self._read(DECISION)) is None:
            waited_s = time.monotonic() - begun_s
            statuses = self._reports()
            reports = {
                r: [SurvivorHoldings.from_json(each) for each in t["has"]]
                for r, t in statuses.items()
            }
            is_all = waited_s > PATIENCE_S or len(reports) == self._world
            settled = is_all or len(reports) >= self._world - 1 or waited_s > SETTLE_S
            decision = decide(reports, self._world, is_all=is_all) if settled else None
            if decision is not None:
                proposal = {
                    "decision": decision.to_json(),
                    "sequence": 1 + max(int(t["sequence"]) for t in statuses.values()),
                    "present": sorted(statuses),
                }
                self._tier.create(f"{self._folder}/{DECISION}", json_io.canonical(proposal))
            elif is_all and waited_s > PATIENCE_S:
                return None
            else:
                time.sleep(POLL_S)
        return proposal

    def _write(self, name: SnapshotName, decision: SurvivorDecision, moment: StepState) -> None:
        alike, wrote = self.moments.replicated, {}
        assert alike is not None
        snapshot_key = self._encryption.begin(name) if self._encryption else None
        for owner, writer in enumerate(decision.writers):
            if writer != self._rank:
                continue
            small = moment.kept.get(owner)
            if owner == self._rank or owner in decision.lost or small is None:
                _ = moment.small.head
                small = moment.small.memory
            shard, entries = moment.file_of(owner, self._world, alike.share(owner), small)
            found: Any = write_shard(
                self._tier, name, owner, shard, snapshot_key=snapshot_key
            ).to_json()
            if self._encryption is not None:  # it has a digest of the content
                found = self._encryption.encrypt_message(name, found)
            wrote[str(owner)] = {"receipt": found, "table": table_to_json(entries)}
        self._publish(f"wrote-{self._rank}.json", wrote)

    def _commit(
        self, name: SnapshotName, decision: SurvivorDecision, cursor: Cursor, present: list[int]
    ) -> None:
        files: dict[int, FileEntry] = {}
        tables: dict[int, dict[str, TensorEntry]] = {}
        for writer in sorted(set(decision.writers)):
            wrote = self._await(partial(self._read, f"wrote-{writer}.json"), WRITTEN_WITHIN_S)
            if not wrote:
                raise SaveFailed(f"rank {writer} did not write its files")
            for owner, each in wrote.items():
                found = each["receipt"]
                if self._encryption is not None:
                    found = self._encryption.decrypt_message(name, found)
                files[int(owner)] = FileEntry.from_json(found)
                tables[int(owner)] = table_from_json(each["table"], self._world)
        ranks = range(self._world)
        gone = [rank for rank in ranks if rank not in present]
        whose = f"rank {', '.join(map(str, gone[:20]))}" if gone else "nobody"
        manifest = Manifest(
            run=self._facts.run,
            name=name,
            parent=self._facts.parent,
            cursor=cursor,
            world=self._world,
            files=tuple(files[rank] for rank in ranks),
            tensors=merge_tables([tables[rank] for rank in ranks]),
            created=time.time(),
            reason=f"survivors of {whose}",
            fingerprint=self._facts.fingerprint,
            writer=f"trainckpt {VERSION}",
            window=cursor,
            lost=decision.lost,
            carried=decision.carried,
        )
        self._check_newest()
        if self._encryption is not None:
            manifest = self._encryption.encrypt_manifest(manifest)
        commit(self._tier, manifest)
        how = "" if not (decision.lost or decision.carried) else ", same data, not bitwise"
        logger.warning("saved %s (%s)%s", name, manifest.reason, how)

    def _reports(self) -> dict[int, dict[str, Any]]:
        reports = {}
        for file in self._tier.list(self._folder):
            number = file.removesuffix(".json")
            if number.isdecimal() and int(number) < self._world:
                report = self._read(file)
                if report is not None:
                    reports[int(number)] = report
        return reports

    def _publish(self, file: str, value: Any) -> None:
        self._tier.replace(f"{self._folder}/{file}", json_io.canonical(value))

    def _read(self, file: str) -> Any:
        key = f"{self._folder}/{file}"
        if self._tier.size(key) is None:
            return None
        return json_io.parse(self._tier.read(key, max_bytes=MAX_BYTES), key, max_bytes=MAX_BYTES)

    def _await(self, poll: Callable[[], Any], limit_s: float) -> Any:
        until_s = time.monotonic() + limit_s
        while not (result := poll()) and time.monotonic() < until_s:
            time.sleep(POLL_S)
        return result

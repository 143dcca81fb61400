"""Survivor save: when ranks have died, the others save the newest step they hold whole.

    1  the training thread stands still: it hangs in a collective, or has left it by an error
    2  each rank reports its states, in a file in the run directory: the ranks' store may have died
       with the rank that served it
    3  a rank that sees enough reports proposes what to save; the first proposal stands
       (`snapshot.survivor_plan`). If there are never enough: after a while, a save not bitwise
    4  each rank writes its own file, and those of the ranks it holds the small state of
    5  the first of the writers commits; all leave
    6  if a writer dies meanwhile, and the others can write all files exactly without it, one of
       them proposes that: the next round of 4 and 5, under a name of its own

    survivors/<attempt>/<rank>.json                2
    survivors/<attempt>/beat-<rank>.json           counts on, as long as the rank saves
    survivors/<attempt>/decision-<round>.json      3, 6
    survivors/<attempt>/wrote-<round>-<rank>.json  4

No collective, and nothing of the store. Once an attempt, by the first thread that comes. A rank
that was taken for dead and wakes later follows the others' decision; once a newer attempt has begun
it does nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import SaveFailed, TrainckptError
from trainckpt.format import json_io, names
from trainckpt.format.manifest import FileEntry, Manifest
from trainckpt.format.names import VERSION, SnapshotName
from trainckpt.ranks import threads
from trainckpt.snapshot.attempt_history import newest
from trainckpt.snapshot.commit import commit, merge_tables, table_from_json, table_to_json
from trainckpt.snapshot.shard_writer import write_shard
from trainckpt.snapshot.survivor_plan import SurvivorDecision, SurvivorHoldings, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
BEAT_S = 1.0
SILENT_BEATS = 20  # of this rank, without one of another: that has died


class _Superseded(Exception):
    """There is another decision: a writer of this one has died."""


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
        self._ended = threading.Event()
        self._beats = 0
        self._heard: dict[int, tuple[Any, int]] = {}  # rank -> its count, when ours was so far
        self._gone: set[int] = set()  # ranks that fell silent after they had reported
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
                finally:
                    self._ended.set()
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
        holdings = []
        for moment in self.moments.states():
            if (share_of := moment.share_of) is None:
                continue
            place = tuple(moment.cursor.place())
            files = [o for o in (self._rank, *sorted(moment.kept)) if moment.has(share_of(o))]
            samples = {moment.sample, *moment.samples_of.values()}
            has = SurvivorHoldings(
                place,
                tuple(files),
                moment.is_whole,
                moment.is_carried,
                tuple(sorted(samples)),
            )
            moments[place] = moment
            holdings.append(has.to_json())
        self._publish(f"{self._rank}.json", {"sequence": self._sequence(), "has": holdings})
        threads.thread(self._beat, "trainckpt-survivor-beat").start()
        proposal = self._decide()
        if proposal is None:
            logger.error("no step is complete on the surviving ranks: nothing is saved")
            return None
        tries = [proposal]
        while True:
            try:
                return self._carry_out(tries, moments)
            except _Superseded:
                tries.append(self._read(_decision_file(len(tries))))

    def _carry_out(
        self, tries: Sequence[Any], moments: Mapping[Any, StepState]
    ) -> SurvivorSnapshot | None:
        """Do this rank's part of the last of these proposals; return what was committed of any."""
        proposal, number = tries[-1], len(tries) - 1
        decision = SurvivorDecision.from_json(proposal["decision"])
        own, first = moments.get(decision.place), min(decision.writers)
        name = self._name_of(proposal)
        if self._rank in decision.writers:
            assert own is not None
            self._write(name, number, decision, own)
            if self._rank == first:
                self._commit(name, number, decision, own.cursor, proposal["present"])

        def committed() -> Any:
            return next((each for each in tries if self._is_committed(each)), None)

        found = self._await(committed, WRITTEN_WITHIN_S, first, number)
        if not found:
            raise SaveFailed(f"rank {first} did not commit {name}")
        decision = SurvivorDecision.from_json(found["decision"])
        if (own := moments.get(decision.place)) is None:
            return None
        is_bitwise = not (decision.lost or decision.carried)
        return SurvivorSnapshot(str(self._name_of(found)), own.cursor, is_bitwise)

    def _name_of(self, proposal: Any) -> SnapshotName:
        place = proposal["decision"]["place"]
        return SnapshotName(self._facts.attempt, proposal["sequence"], *place[1:3])

    def _is_committed(self, proposal: Any) -> bool:
        manifest = f"{self._name_of(proposal).folder}/{names.MANIFEST}"
        return self._tier.size(manifest) is not None

    def _check_newest(self) -> None:
        # After a newer attempt has begun no resume would take the save, and names may collide.
        newer = newest(self._tier)
        if newer > self._facts.attempt:
            raise SaveFailed(f"attempt {newer} of this run has already begun")

    def _decide(self) -> Any:
        """Return the first proposal: decision, sequence number, ranks that have reported."""
        begun_s = time.monotonic()
        while (proposal := self._read(_decision_file(0))) is None:
            waited_s = time.monotonic() - begun_s
            statuses = self._reports()
            is_all = waited_s > PATIENCE_S or len(statuses) == self._world
            settled = is_all or len(statuses) >= self._world - 1 or waited_s > SETTLE_S
            if settled and self._propose(0, statuses, is_all=is_all):
                continue
            if is_all and waited_s > PATIENCE_S:
                return None
            time.sleep(POLL_S)
        return proposal

    def _propose(
        self, number: int, statuses: Mapping[int, dict[str, Any]], *, is_all: bool
    ) -> bool:
        """Create the decision of this round, unless it is there; return False if there is none."""
        reports = {
            rank: [SurvivorHoldings.from_json(each) for each in status["has"]]
            for rank, status in statuses.items()
        }
        decision = decide(reports, self._world, is_all=is_all)
        if decision is None:
            return False
        proposal = {
            "decision": decision.to_json(),
            "sequence": 1 + number + max(int(status["sequence"]) for status in statuses.values()),
            "present": sorted(statuses),
        }
        file = f"{self._folder}/{_decision_file(number)}"
        self._tier.create(file, json_io.canonical(proposal))
        return True

    def _write(
        self, name: SnapshotName, number: int, decision: SurvivorDecision, moment: StepState
    ) -> None:
        wrote, share_of = {}, moment.share_of
        assert share_of is not None
        snapshot_key = self._encryption.begin(name) if self._encryption else None
        for owner, writer in enumerate(decision.writers):
            if writer != self._rank:
                continue
            small = moment.kept.get(owner)
            if owner == self._rank or owner in decision.lost or small is None:
                _ = moment.small.head
                small = moment.small.memory
            shard, entries = moment.file_of(owner, self._world, share_of(owner), small)
            found: Any = write_shard(
                self._tier, name, owner, shard, snapshot_key=snapshot_key
            ).to_json()
            if self._encryption is not None:  # it has a digest of the content
                found = self._encryption.encrypt_message(name, found)
            wrote[str(owner)] = {"receipt": found, "table": table_to_json(entries)}
        self._publish(_receipts_file(number, self._rank), wrote)

    def _commit(
        self,
        name: SnapshotName,
        number: int,
        decision: SurvivorDecision,
        cursor: Cursor,
        present: list[int],
    ) -> None:
        files: dict[int, FileEntry] = {}
        tables: dict[int, dict[str, TensorEntry]] = {}
        for writer in sorted(set(decision.writers)):
            file = _receipts_file(number, writer)
            wrote = self._await(partial(self._read, file), WRITTEN_WITHIN_S, writer, number)
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

    def _await(self, poll: Callable[[], Any], limit_s: float, rank: int, number: int) -> Any:
        """Return what `poll` returns, or the last of it after `limit_s`.

        Raises:
            _Superseded: `rank`, which this waits for, has died, and the others save without it.
        """
        until_s = time.monotonic() + limit_s
        looked = self._beats
        while not (result := poll()) and time.monotonic() < until_s:
            if self._beats > looked:  # once a beat
                looked = self._beats
                if self._is_silent(rank):
                    self._go_without(rank, number)
                if self._tier.size(f"{self._folder}/{_decision_file(number + 1)}") is not None:
                    raise _Superseded
            time.sleep(POLL_S)
        return result

    def _beat(self) -> None:
        # background thread; while the storage hangs, no beat is counted
        while not self._ended.is_set():
            with contextlib.suppress(TrainckptError, OSError):
                self._publish(f"beat-{self._rank}.json", self._beats)
                self._beats += 1
            self._ended.wait(BEAT_S)

    def _is_silent(self, rank: int) -> bool:
        """Return True if a rank's count stood still during many beats of this rank."""
        count, (before, since) = self._read(f"beat-{rank}.json"), self._heard.get(rank, (None, -1))
        if since < 0 or count != before:
            self._heard[rank] = count, self._beats
            return False
        return rank != self._rank and self._beats - since > SILENT_BEATS

    def _go_without(self, rank: int, number: int) -> None:
        """Propose the next round without a rank that has died, if that loses nothing of it."""
        if rank not in self._gone:
            self._gone.add(rank)
            logger.warning("rank %d has died while the surviving ranks save", rank)
        statuses = {r: report for r, report in self._reports().items() if r not in self._gone}
        if statuses:
            self._propose(number + 1, statuses, is_all=False)


def _decision_file(number: int) -> str:
    return f"decision-{number}.json"


def _receipts_file(number: int, rank: int) -> str:
    return f"wrote-{number}-{rank}.json"

"""Survivors: when ranks have died, those that are left save the newest step they hold whole.

    1  the training thread stands still: it hangs in a collective, or has left it by an error
    2  each says what it has, in a file in the run's place: the ranks' store may have died with the
       rank that held it
    3  whoever sees that the files so far are enough proposes what to save; the first proposal
       stands (`snapshot.survive`). If they never are: after a while, what is not bitwise
    4  each writes its own file, and those of ranks whose small state it keeps
    5  the first of the writers commits; all leave

    survivors/<attempt>/<rank>.json        2
    survivors/<attempt>/decision.json      3
    survivors/<attempt>/wrote-<rank>.json  4

No collective, and nothing of the store. Once an attempt, by whichever thread comes first. A rank
that was taken for dead and wakes later does what the others have decided; once a newer attempt has
begun it does nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trainckpt.errors import SaveFailed
from trainckpt.format import names, strict
from trainckpt.format.files import Files
from trainckpt.format.manifest import Manifest
from trainckpt.format.names import SnapshotName
from trainckpt.format.versions import VERSION
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.attempts import newest
from trainckpt.snapshot.commit import commit
from trainckpt.snapshot.save import Receipt, write_shard
from trainckpt.snapshot.survive import Decision, Has, decide
from trainckpt.snapshot.tables import merge_tables, table_from_json, table_to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.manifest import TensorEntry
    from trainckpt.lifecycle.saving.sealing import Sealing
    from trainckpt.lifecycle.saving.writer import Facts
    from trainckpt.lifecycle.surviving.moments import Moments
    from trainckpt.state.moment import Moment
    from trainckpt.tiers.base import Tier

LOOK_AGAIN_S = 0.1
SETTLE_S = 2.0  # others may have something newer to report
PATIENCE_S = 15.0  # others may notice later
STEP_ENDS_S = 5.0  # a step that was begun comes to its end within that
WRITTEN_WITHIN_S = 300.0
WITHIN_S = STEP_ENDS_S + PATIENCE_S + 2 * WRITTEN_WITHIN_S  # all of it: written, and committed
MAX_BYTES = 1 << 28
DECISION = "decision.json"


@dataclass(frozen=True)
class Saved:
    """What was saved.

    Attributes:
        name: Full name of the snapshot.
        cursor: Where it goes on.
        bitwise: With every rank's own state.
    """

    name: str
    cursor: Cursor
    bitwise: bool


class Survivors:
    """One rank's part in it."""

    def __init__(
        self,
        tier: Tier,
        rank: int,
        world: int,
        facts: Facts,
        moments: Moments,
        sequence: Callable[[], int],
        seals: Sealing | None = None,
        *,
        waits_for_own: bool,
    ) -> None:
        """Of one rank.

        Args:
            tier: The run's place.
            rank, world: Of this process.
            facts: What every manifest of this attempt says.
            moments: What is kept.
            sequence: Number of the last save that was begun.
            seals: What is saved is encrypted.
            waits_for_own: There are no copies: a step that was begun must end first.
        """
        self.moments = moments
        self._tier, self._rank, self._world, self._facts = tier, rank, world, facts
        self._sequence, self._waits, self._seals = sequence, waits_for_own, seals
        self._folder = f"{names.SURVIVORS}/{facts.attempt}"
        self._once = threading.Lock()
        self._done = False
        self._saved: Saved | None = None

    def save(self, why: str) -> Saved | None:
        """Save what there is. Never raises; None: there is nothing, or it failed.

        Any thread; a second one waits for the first, and gets what that got.
        """
        with self._once:
            if not self._done:
                self._done = True
                try:
                    with self.moments.apart():
                        self._saved = self._save(why)
                except Exception as error:  # noqa: BLE001 - the process leaves anyway
                    logger.error("the survivors could save nothing: %s",
                                 getattr(error, "message", repr(error)))  # fmt: skip
            return self._saved

    def _save(self, why: str) -> Saved | None:
        if self.moments.off:
            return None
        logger.warning("%s: the ranks that are left save what they hold", why)
        if self._waits:
            self._wait_for_step()
        self.moments.freeze()
        self._must_be_newest()
        held = {has.place: (moment, has) for moment, has in self._look()}
        told = {"sequence": self._sequence(), "has": [has.to_json() for _, has in held.values()]}
        self._tell(f"{self._rank}.json", told)
        decision, sequence, present = self._decide()
        if decision is None:
            logger.error("no step is whole on the ranks that are left: nothing is saved")
            return None
        cursor = held[decision.place][0].cursor if decision.place in held else None
        name = SnapshotName(self._facts.attempt, sequence, decision.place[1], decision.place[2])
        if self._rank in decision.writers:
            assert cursor is not None
            self._write(name, decision, held[decision.place][0])
        if self._rank == min(decision.writers):
            assert cursor is not None
            self._commit(name, decision, cursor, present)
        if not self._await(lambda: self._tier.size(f"{name.folder}/{names.MANIFEST}") or None,
                           WRITTEN_WITHIN_S):  # fmt: skip
            raise SaveFailed(f"{name} was not committed by rank {min(decision.writers)}")
        if cursor is None:
            return None
        return Saved(str(name), cursor, not (decision.lost or decision.carried))

    def _must_be_newest(self) -> None:
        """What is saved later no resume would take, and its name may be that of what was saved."""
        newer = newest(self._tier)
        if newer > self._facts.attempt:
            raise SaveFailed(f"attempt {newer} of this run has begun already")

    def _wait_for_step(self) -> None:
        until_s = time.monotonic() + STEP_ENDS_S
        while time.monotonic() < until_s and not self.moments.is_live:
            time.sleep(LOOK_AGAIN_S / 10)

    def _look(self) -> list[tuple[Moment, Has]]:
        """What this rank has of its moments."""
        found, alike = [], self.moments.alike
        for moment in self.moments.held():
            assert alike is not None
            if moment.entries is not alike.entries:
                continue  # other tensors than now: the first step has made some
            files = [o for o in (self._rank, *sorted(moment.kept)) if moment.has(alike.share(o))]
            has = Has(
                tuple(moment.cursor.place()), tuple(files), moment.is_whole, moment.is_carried
            )
            found.append((moment, has))
        return found

    def _decide(self) -> tuple[Decision | None, int, list[int]]:
        """What to save, under which sequence number; and who has reported."""
        begun_s = time.monotonic()
        while True:
            text = self._read(DECISION)
            if text is not None:
                return Decision.from_json(text["decision"]), text["sequence"], text["present"]
            waited_s = time.monotonic() - begun_s
            told = self._reports()
            reports = {r: [Has.from_json(each) for each in t["has"]] for r, t in told.items()}
            is_all = waited_s > PATIENCE_S or len(reports) == self._world
            settled = is_all or len(reports) >= self._world - 1 or waited_s > SETTLE_S
            decision = decide(reports, self._world, is_all=is_all) if settled else None
            if decision is not None:
                sequence = 1 + max(int(t["sequence"]) for t in told.values())
                found = {"decision": decision.to_json(), "sequence": sequence,
                         "present": sorted(told)}  # fmt: skip
                self._tier.create(f"{self._folder}/{DECISION}", strict.canonical(found))
            elif is_all and waited_s > PATIENCE_S:
                return None, 0, []
            else:
                time.sleep(LOOK_AGAIN_S)

    def _write(self, name: SnapshotName, decision: Decision, moment: Moment) -> None:
        alike, wrote = self.moments.alike, {}
        assert alike is not None
        seal = self._seals.begin(name) if self._seals else None
        for owner, writer in enumerate(decision.writers):
            if writer != self._rank:
                continue
            small = moment.kept.get(owner)
            if owner == self._rank or owner in decision.lost or small is None:
                _ = moment.small.head
                small = moment.small.memory
            shard, entries = moment.file_of(owner, self._world, alike.share(owner), small)
            receipt = write_shard(self._tier, name, owner, shard, (), seal)
            wrote[str(owner)] = {
                "receipt": self._hidden(name, receipt),
                "table": table_to_json(entries),
            }
        self._tell(f"wrote-{self._rank}.json", wrote)

    def _commit(
        self, name: SnapshotName, decision: Decision, cursor: Cursor, present: list[int]
    ) -> None:
        """The first writer, when all have written."""
        receipts: dict[int, Receipt] = {}
        tables: dict[int, dict[str, TensorEntry]] = {}
        for writer in sorted(set(decision.writers)):
            wrote = self._await(partial(self._read, f"wrote-{writer}.json"), WRITTEN_WITHIN_S)
            if not wrote:
                raise SaveFailed(f"rank {writer} did not write what it holds")
            for owner, each in wrote.items():
                receipts[int(owner)] = self._shown(name, each["receipt"])
                tables[int(owner)] = table_from_json(each["table"], self._world)
        ranks = range(self._world)
        gone = [rank for rank in ranks if rank not in present]
        whose = f"rank {', '.join(map(str, gone[:20]))}" if gone else "nobody"
        manifest = Manifest(
            self._facts.run, name, self._facts.parent, cursor, self._world,
            Files.of([receipts[rank].file for rank in ranks]),
            merge_tables([tables[rank] for rank in ranks]), time.time(),
            reason=f"survivors of {whose}", fingerprint=self._facts.fingerprint,
            writer=f"trainckpt {VERSION}", window=cursor, lost=decision.lost,
            carried=decision.carried,
        )  # fmt: skip
        self._must_be_newest()
        commit(self._tier, manifest if self._seals is None else self._seals.manifest(manifest))
        how = "" if not (decision.lost or decision.carried) else ", same data, not bitwise"
        logger.warning("saved %s (%s)%s", name, manifest.reason, how)

    # The files by which ranks tell each other.

    def _hidden(self, name: SnapshotName, receipt: Receipt) -> Any:
        """Not to be read by others, if the file is not: it has a digest of what that was."""
        return self._seals.hide(name, receipt.to_json()) if self._seals else receipt.to_json()

    def _shown(self, name: SnapshotName, told: Any) -> Receipt:
        return Receipt.from_json(self._seals.shown(name, told) if self._seals else told)

    def _reports(self) -> dict[int, dict[str, Any]]:
        found = {}
        for file in self._tier.list(self._folder):
            number = file.removesuffix(".json")
            if number.isdecimal() and int(number) < self._world:
                told = self._read(file)
                if told is not None:
                    found[int(number)] = told
        return found

    def _tell(self, file: str, value: Any) -> None:
        self._tier.replace(f"{self._folder}/{file}", strict.canonical(value))

    def _read(self, file: str) -> Any:
        """None if it is not there yet."""
        key = f"{self._folder}/{file}"
        if self._tier.size(key) is None:
            return None
        return strict.parse(self._tier.read(key, max_bytes=MAX_BYTES), key, max_bytes=MAX_BYTES)

    def _await(self, look: Callable[[], Any], limit_s: float) -> Any:
        until_s = time.monotonic() + limit_s
        while not (found := look()) and time.monotonic() < until_s:
            time.sleep(LOOK_AGAIN_S)
        return found

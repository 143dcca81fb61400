"""Follow a run's attempts and snapshots in one tier, from commit to commit.

After each commit the live attempt looks at the run, to delete older snapshots. A run may keep
thousands of snapshots and have hundreds of attempts. So each look costs the same: what was read
once stays known.

    records of earlier attempts   read once. Only an attempt with commits has descendants, and it
                                  has decided its parent before the first one. So the ancestry of
                                  the live attempt is settled
    manifests                     read once, apart from the ones below: no commit replaces another
    read again at each look       the newest `NEWEST`, and of the others `IN_TURN`, in turn
    read again before a deletion  those to be deleted (`confirm`)

The last two lines are for files that vanish or are damaged later: deletions of older snapshots
depend on newer ones. As many as the default of `keep_last` are read each time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from trainckpt.format import names
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot import attempt_history, catalog
from trainckpt.snapshot.catalog import ABANDONED, Candidate
from trainckpt.snapshot.verify import files_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.format.manifest import Manifest
    from trainckpt.storage.base import Tier

NEWEST, IN_TURN = 3, 2
_ORDER = attrgetter("attempt", "sequence", "step", "micro")  # faster than the names' own


class FollowedRun:
    """The attempts and snapshots of a run, as one attempt knows them. One thread at a time uses it.

    Attributes:
        tier: The tier of the snapshots.
    """

    def __init__(self, tier: Tier, run_tier: Tier, run: str) -> None:
        """Read nothing yet.

        Args:
            tier: The tier of the snapshots.
            run_tier: The run directory, with the records of the attempts.
            run: Id of the run.
        """
        self.tier = tier
        self._run_tier, self._run = run_tier, run
        self._parse = catalog.ManifestCache()
        self._records: dict[int, AttemptRecord] = {}
        self._names: dict[str, SnapshotName | None] = {}  # of the folders
        self._known: dict[SnapshotName, Candidate] = {}  # whole when they were last looked at
        self._listed: dict[SnapshotName, Candidate] = {}  # by the last look, newest first
        self._looked: set[SnapshotName] = set()  # read in the last look
        self._reach: Mapping[int, float] = {}
        self._turn: SnapshotName | None = None  # the last one that was read in turn

    def add(self, manifest: Manifest) -> None:
        """Keep a manifest that this attempt has just committed, so that it need not be parsed.

        Any thread.
        """
        self._parse.add(manifest)

    def knows(self, name: SnapshotName) -> bool:
        """Return True if the last look found this snapshot whole."""
        return name in self._known

    def attempts(self, live: int) -> dict[int, AttemptRecord]:
        """Return every attempt's record by number; reads new ones, and those from `live` on."""
        found = {}
        for number in attempt_history.numbers(self._run_tier):
            record = self._records.get(number) if number < live else None
            if record is None:
                record = attempt_history.read_listed(self._run_tier, number)
                if number < live and "damaged" not in record.facts:
                    self._records[number] = record
            found[number] = record
        return found

    def candidates(self, attempts: Mapping[int, AttemptRecord]) -> tuple[Candidate, ...]:
        """Return all snapshots of the tier, newest first, as `read_catalog`; see above.

        Raises:
            TierUnavailable: the tier refused.
        """
        self._names = {
            text: self._names[text] if text in self._names else SnapshotName.parse(text)
            for text in self.tier.list(names.SNAPSHOTS)
        }
        listed = (name for name in self._names.values() if name is not None)
        found = sorted(listed, key=_ORDER, reverse=True)
        self._reach = catalog.ancestry(attempts, found)
        self._known = {name: self._known[name] for name in found if name in self._known}
        whole = [name for name in found if name in self._known]  # not a save that is under way
        due = {*whole[:NEWEST], *self._next_in_turn(whole[NEWEST:])}
        self._looked = {name for name in found if name in due or name not in self._known}
        size_of = cache(self.tier.size)
        self._listed = {
            name: self._look(name, size_of)
            if name in self._looked
            else self._as_known(self._known[name])
            for name in found
        }
        return catalog.without_remains(self._listed.values())

    def confirm(self, doomed: Iterable[SnapshotName]) -> tuple[Candidate, ...]:
        """Return the candidates once more, after reading these if the last look did not."""
        size_of = cache(self.tier.size)
        for name in doomed:
            if name not in self._looked:
                self._looked.add(name)
                self._listed[name] = self._look(name, size_of)
        return catalog.without_remains(self._listed.values())

    def files(self) -> set[str]:
        """Return the keys of files in known snapshots, referenced ones included."""
        known = (candidate.manifest for candidate in self._known.values())
        return {key for manifest in known if manifest for key, _ in files_of(manifest)}

    def forget(self, gone: Iterable[SnapshotName]) -> None:
        """Forget deleted snapshots: the folder of one may stay, with files of others."""
        for name in gone:
            self._known.pop(name, None)

    def _next_in_turn(self, older: list[SnapshotName]) -> list[SnapshotName]:
        turn = self._turn
        due = [*(name for name in older if turn is not None and name < turn), *older][:IN_TURN]
        self._turn = due[-1] if due else None
        return due

    def _look(self, name: SnapshotName, size_of: Callable[[str], int | None]) -> Candidate:
        found = catalog.look(
            self.tier, self._run, name, reach=self._reach, size_of=size_of, parse=self._parse
        )
        self._known.pop(name, None)
        if found.reason not in ("", ABANDONED):
            return found
        self._known[name] = found = replace(found, tiers=(self.tier.name,))
        return found

    def _as_known(self, known: Candidate) -> Candidate:
        is_usable = not catalog.is_abandoned(known.name, self._reach)
        if is_usable == known.usable:
            return known
        return replace(known, usable=is_usable, reason="" if is_usable else ABANDONED)

"""Reach: which tiers of a run answer now, and what follows where one does not.

Rank 0 looks; the others open those it names. A slower tier that does not answer is no error by
itself: it is one if it is known to hold a newer snapshot than all that do, or if nobody can know
whether it holds the run, unless an older one is accepted.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError, TierUnavailable, TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.lifecycle.places import place as places
from trainckpt.lifecycle.places.slower import WHERE, Slower, newest_commits, recorded, where
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot import attempts as attempt_records
from trainckpt.snapshot import catalog, flush
from trainckpt.snapshot.opened import Opener
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.patience import answer_within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.base import Tier
    from trainckpt.tiers.places import Place

ACCEPT = "wait for it; or accept_older=True, `trainckpt resume --accept-older`, goes on without it"


@dataclass
class Reach:
    """The tiers of one run.

    Attributes:
        place: The run's.
        slower: As the options name them.
        accept_older: The option.
        opener: Who reads what is encrypted.
        encrypts: So does this attempt.
        answering: Slower tiers that hold the run, nearest first.
        empty: Slower tiers that answer and hold no run yet.
        silent: Name of a tier that did not answer -> why.
    """

    place: Place
    slower: Slower = field(default_factory=Slower)
    accept_older: bool = False
    opener: Opener = field(default_factory=Opener)
    encrypts: bool = False
    answering: list[Tier] = field(default_factory=list)
    empty: list[Tier] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)

    def find_run(self, *, must: bool = True) -> str | None:
        """Of a place that holds no run: the id of the one that slower tiers hold.

        Args:
            must: A tier that does not answer may hold it.

        Raises:
            ConfigurationError: they hold several.
            TierUnavailable: none holds one, and some did not answer.
        """
        ids = {tier.name: self._look(tier) for tier in self.slower.tiers}
        runs = {run for run in ids.values() if run is not None}
        if len(runs) > 1:
            raise ConfigurationError(
                f"the tiers hold several runs: {ids}", hint="name those of one run"
            )
        if not runs and self.silent and must and not self.accept_older:
            why = "; ".join(self.silent.values())
            raise TierUnavailable(
                f"{self.place.url} holds no run, and whether a slower tier does is not known: "
                f"{why}",
                hint=ACCEPT,
            )
        return runs.pop() if runs else None

    def must_be_ours(self, run: str) -> None:
        """Refuse the run that slower tiers hold if its place was another than this one.

        Raises:
            ConfigurationError: it was: somebody's tiers were copied to another run, or mistyped.
        """
        for tier in self.slower.tiers:
            if self._look(tier) != run:
                continue
            records = attempt_records.read_attempts(tier)
            told = [r.facts[WHERE] for _, r in sorted(records.items()) if WHERE in r.facts]
            if told and told[-1] != where(self.place):
                raise ConfigurationError(
                    f"{self.place.url} holds no run, and the tier {tier.name} holds that of "
                    f"{str(told[-1])[:200]}",
                    hint="name other tiers for a new run ({run} in a URL stands for the name of "
                    "its place); or, to go on with that run from here, resume='required'",
                )

    def adopt(self, run: str) -> None:
        """Let the place be that of the run that slower tiers hold, with all they know of it."""
        holders = [tier for tier in self.slower.tiers if self._look(tier) == run]
        holders.sort(key=attempt_records.newest, reverse=True)
        for tier in holders:
            flush.adopt(self.place, tier)
        names = ", ".join(tier.name for tier in holders)
        logger.warning("%s holds no run: it goes on from what is in %s", self.place.url, names)

    def look(self, run: str, records: Mapping[int, AttemptRecord]) -> list[list[str]]:
        """Which tiers answer and hold the run, those that attempts have recorded too.

        Returns:
            Name and URL of each; the URL is "" if the options name it.

        Raises:
            ConfigurationError: one that the options name is the run's place, by a link or a mount.
        """
        self.answering, self.empty, told = [], [], []
        also, unknown = recorded(records, self.place, self.slower.tiers)
        for name in unknown:
            self.silent[name] = f"the URL of the tier {name} holds a secret that was not stored"
        for tier in (*self.slower.tiers, *also):
            there = self._look(tier)
            if there == run and self._is_the_place(tier):
                continue
            if there == run:
                self.answering.append(tier)
                told.append([tier.name, "" if tier in self.slower.tiers else tier.url])
            elif there is not None:
                logger.warning("%s", flush.another_run(tier, there).message)
            elif tier.name not in self.silent:
                self.empty.append(tier)
        return told

    def leave(self, tier: Tier, why: str = "") -> None:
        """Ask nothing more of it; `why` it does not answer."""
        self.answering.remove(tier)
        if why:
            self.silent[tier.name] = why

    def open(self, told: Sequence[Sequence[str]]) -> tuple[Tier, ...]:
        """The run's place and the tiers that rank 0 has told of."""
        by_name = {tier.name: tier for tier in self.slower.tiers}
        found: list[Tier] = [self.place]
        for name, url in told:
            tier = places.open_other_place(url) if url else by_name[name]
            tier.name = name
            found.append(tier)
        return tuple(found)

    def candidates(
        self, run: str, records: Mapping[int, AttemptRecord]
    ) -> tuple[catalog.Candidate, ...]:
        """What there is in all tiers that answer."""
        while True:
            try:
                return catalog.read_copies((self.place, *self.answering), run, records)
            except TierUnavailable as error:
                if not self._leave_out(error):
                    raise

    def must_not_miss(
        self, found: Sequence[catalog.Candidate], records: Mapping[int, AttemptRecord]
    ) -> None:
        """Refuse to go on from a snapshot that is older than what a silent tier holds.

        Raises:
            TierUnavailable: one does, by the records, and older ones are not accepted.
        """
        if not self.silent:
            return
        best = max((c.name for c in found if c.usable), default=None)
        reach = catalog.ancestry(records, [c.name for c in found])
        for tier, commits in newest_commits(records).items():
            for snapshot in commits.values() if tier in self.silent else ():
                name = SnapshotName.parse(snapshot)
                if name is None or name.sequence > reach.get(name.attempt, -1):
                    continue
                if best is None or name > best:
                    self._miss(tier, name, best)
        for tier, why in self.silent.items():
            logger.warning("the tier %s is left out: %s", tier, why)

    def _miss(self, tier: str, name: SnapshotName, best: SnapshotName | None) -> None:
        if self.accept_older:
            logger.warning("%s in %s is newer, and left: it does not answer", name, tier)
            return
        older = f"the newest elsewhere is {best}" if best else "there is none elsewhere"
        raise TierUnavailable(
            f"the tier {tier} holds {name}, {older}, and it does not answer: {self.silent[tier]}",
            hint=ACCEPT,
        )

    def _look(self, tier: Tier) -> str | None:
        """The run that it holds; None if none, or if it does not answer."""
        self.silent.pop(tier.name, None)
        try:
            return answer_within(tier.url, lambda: attempt_records.run_id(tier))
        except TrainckptError as error:
            self.silent[tier.name] = error.message
            return None

    def _is_the_place(self, tier: Tier) -> bool:
        """Whether both are one folder, whatever they are called: no copy of anything."""
        if not (isinstance(tier, LocalTier) and isinstance(self.place, LocalTier)):
            return False
        ours, theirs, same = self.place.root, tier.root, False
        with contextlib.suppress(OSError, TrainckptError):
            same = answer_within(tier.url, lambda: theirs.samefile(ours))
        if same and tier in self.slower.tiers:
            raise ConfigurationError(
                f"the tier {tier.name} at {tier.url} is {self.place.url} by another name: it "
                "would hold no copy",
                hint="name another place, and not the run's own",
            )
        return same

    def _leave_out(self, error: TierUnavailable) -> bool:
        """A tier stopped answering between two looks; whether one is left out now."""
        for tier in self.answering:
            try:
                tier.list("snapshots")
            except TrainckptError:
                self.leave(tier, error.message)
                return True
        return False

"""Find the responding tiers of a run, and handle those that do not answer.

Rank 0 looks; the others open the tiers it names. An unresponsive slower tier is an error only in
two cases, unless an older snapshot is accepted: it is known to hold a newer snapshot than all
others, or no tier can show whether it holds the run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, TierUnavailable, TrainckptError
from trainckpt.format.names import SnapshotName
from trainckpt.run_directory import recorded_place, run_url
from trainckpt.run_directory.tier_config import TierConfig, newest_commits, recorded
from trainckpt.snapshot import attempt_history, catalog, tier_copy
from trainckpt.snapshot.decrypting_tier import KeyRing
from trainckpt.storage.local import LocalTier
from trainckpt.storage.worker_pool import answer_within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.format.attempt_record import AttemptRecord
    from trainckpt.snapshot.attempt_history import OtherHistory
    from trainckpt.storage.base import RunTier, Tier

ACCEPT = "accept_older=True, `trainckpt resume --accept-older`, goes on without it"


@dataclass
class TierSet:
    """The tiers of one run.

    Attributes:
        run_tier: The run directory.
        slower: The slower tiers named by the options.
        accept_older: The option.
        opener: Key ring for encrypted snapshots.
        encrypts: True if this attempt encrypts.
        answering: Responding slower tiers with the run, nearest first.
        empty: Responding slower tiers without any run.
        silent: Name of an unresponsive tier -> reason.
        cures: Name of such a tier -> what to change, where the error says it.
    """

    run_tier: RunTier
    slower: TierConfig = field(default_factory=TierConfig)
    accept_older: bool = False
    opener: KeyRing = field(default_factory=KeyRing)
    encrypts: bool = False
    answering: list[Tier] = field(default_factory=list)
    empty: list[Tier] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    cures: dict[str, str] = field(default_factory=dict)

    def find_run(self, *, must: bool = True) -> str | None:
        """Return the id of the run that slower tiers hold, for a run directory without one.

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
                f"{self.run_tier.url} holds no run, and whether a slower tier does is not known: "
                f"{why}",
                hint=self._hint(*self.silent),
            )
        return runs.pop() if runs else None

    def must_be_ours(self, run: str) -> None:
        """Refuse the run in the slower tiers if its run directory was another than this one.

        Raises:
            ConfigurationError: it was: tiers were copied to another run, or mistyped.
        """
        for tier in self.slower.tiers:
            if self._look(tier) != run:
                continue
            records = attempt_history.read_attempts(tier)
            if before := recorded_place.other_place(self.run_tier, records):
                raise ConfigurationError(
                    f"{self.run_tier.url} holds no run, and the tier {tier.name} holds that "
                    f"of {before}",
                    hint="name other tiers for a new run ({run} in a URL stands for the name of "
                    "its place); or, to go on with that run from here, resume='required'",
                )

    def adopt(self, run: str) -> None:
        """Adopt the run of the slower tiers in the run directory, with all their records."""
        holders = [tier for tier in self.slower.tiers if self._look(tier) == run]
        holders.sort(key=attempt_history.newest, reverse=True)
        for tier in holders:
            tier_copy.adopt(self.run_tier, tier)
        names = ", ".join(tier.name for tier in holders)
        logger.warning("%s holds no run: it goes on from what is in %s", self.run_tier.url, names)

    def look(self, run: str, records: Mapping[int, AttemptRecord]) -> list[list[str]]:
        """Find the responding tiers with the run, including those recorded by attempts.

        Returns:
            Name and URL of each; the URL is "" if the options name it.

        Raises:
            ConfigurationError: an option names the run directory again, by a link or a mount.
        """
        self.answering, self.empty, reported = [], [], []
        also, unknown = recorded(records, self.run_tier, self.slower.tiers)
        for name in unknown:
            self.silent[name] = f"the URL of the tier {name} holds a secret that was not stored"
        for tier in (*self.slower.tiers, *also):
            there = self._look(tier)
            if there == run and self._is_the_place(tier):
                continue
            if there == run:
                self.answering.append(tier)
                reported.append([tier.name, "" if tier in self.slower.tiers else tier.url])
            elif there is not None:
                logger.warning("%s", tier_copy.another_run(tier, there).message)
            elif tier.name not in self.silent:
                self.empty.append(tier)
        return reported

    def leave(self, tier: Tier, error: TrainckptError | None = None) -> None:
        """Ask nothing more of it; `error`: it does not answer."""
        self.answering.remove(tier)
        if error is not None:
            self._is_silent(tier, error)

    def open(self, reported: Sequence[Sequence[str]]) -> tuple[Tier, ...]:
        """Open the run directory and the tiers reported by rank 0."""
        by_name = {tier.name: tier for tier in self.slower.tiers}
        found: list[Tier] = [self.run_tier]
        for name, url in reported:
            found.append(run_url.open_tier_at(url, name) if url else by_name[name])
        return tuple(found)

    def candidates(
        self, run: str, records: Mapping[int, AttemptRecord]
    ) -> tuple[catalog.Candidate, ...]:
        """Return the snapshots of all responding tiers, without their tables of tensors."""
        parse = catalog.ManifestCache()
        while True:
            try:
                return catalog.read_copies((self.run_tier, *self.answering), run, records, parse)
            except TierUnavailable:
                if not self._leave_out(run, records, parse):
                    raise

    def must_not_miss(
        self, found: Sequence[catalog.Candidate], records: Mapping[int, AttemptRecord]
    ) -> None:
        """Refuse to resume from a snapshot older than one in a silent tier.

        Raises:
            TierUnavailable: the records name such a snapshot, and older ones are not accepted.
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
            hint=self._hint(tier),
        )

    def _hint(self, *tiers: str) -> str:
        """Return what to change for these tiers to answer, if known, and the way without them."""
        cures = dict.fromkeys(self.cures[name] for name in tiers if name in self.cures)
        return f"{'; '.join(cures) or 'wait for it'}; or {ACCEPT}"

    def _is_silent(self, tier: Tier, error: TrainckptError) -> None:
        self.silent[tier.name] = error.message
        if error.hint:
            self.cures[tier.name] = error.hint

    def _look(self, tier: Tier) -> str | None:
        """Return the run in the tier; None if it holds none or does not answer."""
        self.silent.pop(tier.name, None)
        self.cures.pop(tier.name, None)
        try:
            return answer_within(tier.url, lambda: attempt_history.run_id(tier))
        except TrainckptError as error:
            self._is_silent(tier, error)
            return None

    def _is_the_place(self, tier: Tier) -> bool:
        """Return True if both are one folder under two names, and thus no copy."""
        if not (isinstance(tier, LocalTier) and isinstance(self.run_tier, LocalTier)):
            return False
        ours, theirs, same = self.run_tier.root, tier.root, False
        with contextlib.suppress(OSError, TrainckptError):
            same = answer_within(tier.url, lambda: theirs.samefile(ours))
        if same and tier in self.slower.tiers:
            raise ConfigurationError(
                f"the tier {tier.name} at {tier.url} is {self.run_tier.url} by another name: it "
                "would hold no copy",
                hint="name another place, and not the run's own",
            )
        return same

    def _leave_out(
        self, run: str, records: Mapping[int, AttemptRecord], parse: catalog.ManifestCache
    ) -> bool:
        """Leave out a tier that refused, if only one of its snapshots. Return False if none did."""
        for tier in self.answering:
            try:
                catalog.read_copies((tier,), run, records, parse)
            except TrainckptError as error:
                self.leave(tier, error)
                return True
        return False


# ---- merge into the run directory the attempts made elsewhere
#
# On a host's own disk a run leaves its old run directory unchanged when it continues elsewhere; a
# restored backup is as outdated. Before an attempt takes its number, rank 0 copies the slower
# tiers' records to the run directory. A tier that does not answer is left out, as it is later.


def catch_up(
    reach: TierSet, run: str, read: Callable[[], dict[int, AttemptRecord]], *, sure: bool
) -> tuple[dict[int, AttemptRecord], int, list[list[str]]]:
    """Copy missing records to the run directory, and log it.

    Args:
        reach: The run directory, and its slower tiers.
        run: Id of the run.
        read: Reads the run directory's records.
        sure: Attempts at other places belong to this run, whatever their names.

    Returns:
        Records of the attempts; the highest attempt number in a record or snapshot of a slower
        tier; name and URL of the slower tiers with this run, as from `TierSet.look`.

    Raises:
        ConfigurationError: a tier named by the options holds attempts of a copy of this run.
        TierUnavailable: the run directory refused.
    """
    records, newest = read(), 0
    while True:
        tiers, brought = reach.look(run, records), False
        for tier in tuple(reach.answering):
            try:
                theirs = attempt_history.read_theirs(tier, records)
            except TrainckptError as error:
                reach.leave(tier, error)
                continue
            try:
                _must_be_of(reach, theirs, sure=sure)
                written = attempt_history.bring(reach.run_tier, records, theirs)
            except ConfigurationError as error:
                if tier in reach.slower.tiers:
                    raise
                logger.warning("the tier %s is left out: %s", tier.name, error.message)
                reach.leave(tier)
                continue
            newest = max(newest, theirs.newest)
            if written:
                logger.warning(
                    "%s was behind: the tier %s told it of the attempts %s",
                    reach.run_tier.url,
                    tier.name,
                    ", ".join(map(str, sorted(written))),
                )
                records, brought = read(), True
        if not brought:  # else a newer attempt may have named other tiers
            answering = {tier.name for tier in reach.answering}
            return records, newest, [pair for pair in tiers if pair[0] in answering]


def _must_be_of(reach: TierSet, theirs: OtherHistory, *, sure: bool) -> None:
    """Refuse attempts of a run at another place: that one, or this, is a copy."""
    before = recorded_place.other_place(reach.run_tier, theirs.records)
    if sure or not theirs.saved or not before:
        return
    raise ConfigurationError(
        f"the tier {theirs.tier.name} at {theirs.tier.url} holds attempts of the run at "
        f"{before} that {reach.run_tier.url} lacks: one of the two is a copy of the "
        "other",
        hint="name other tiers for a copy that goes its own way ({run} in a URL stands for the "
        "name of its place); or, to go on from here with what that run did, resume='required'",
    )

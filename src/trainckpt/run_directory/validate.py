"""Validate the run directory: it answers, holds the run, is seen by all hosts, and supports
commits.

    first look    one rank of each host, within a limit: a hanging disk is an error, not a hang
    judge         no run where one is required: refused before anything is created
    one place?    with several hosts: one writes a token, the others look for it; then the others
                  write theirs. A host that sees a directory of its own creates nothing in it
    capabilities  rank 0 tries the operations that a commit relies on, once, and whether the run's
                  folders take files: else a whole training could save nothing

The tokens have random names and are removed again; a dead attempt's leftover does no harm.

`must_be_the_same` checks that all ranks were given one run and the same slower tiers. Each rank
reads its own arguments and environment. If they differ, some ranks would read files that others
never wrote, or wait for a tier without uploads. Directories are compared between ranks with the
same file systems; the tokens show if several hosts see one directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import begun_mark, launch
from trainckpt.attempt.launch import COMMAND_VARIABLE
from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, NothingToResume, TierUnavailable, TrainckptError
from trainckpt.format import names
from trainckpt.preemption import slurm
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.snapshot import attempt_history
from trainckpt.storage import fs_probe
from trainckpt.storage.local import LocalTier
from trainckpt.storage.store_errors import number_behind
from trainckpt.storage.worker_pool import answer_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.ranks.store import RankStore
    from trainckpt.run_directory.tier_set import TierSet
    from trainckpt.storage.base import RunTier, Tier
    from trainckpt.storage.object_store import ObjectStoreTier


PROBE = "probe"
LOOK_AGAIN_S = 0.05
# How long a host may see an outdated folder: a network file system caches names, and
# their absence, for up to a minute. A local one has nothing to wait for.
VISIBLE_WITHIN_S, REMOTE_VISIBLE_WITHIN_S = 3.0, 75.0


@dataclass(frozen=True)
class RankLocation:
    """Location of a rank, as far as its view of the disk depends on it.

    Attributes:
        host: Name of its host.
        view: Same for ranks with one machine and one mount namespace.
    """

    host: str
    view: str


def own_view() -> str:
    """Return an identifier of this process's file systems: its machine, and its mounts."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt"):
        with contextlib.suppress(OSError):
            found = Path(path)
            parts.append(str(found.readlink()) if found.is_symlink() else found.read_text())
    return " ".join(part.strip() for part in parts)


def attach(
    tier: RunTier,
    channel: RankStore,
    seats: Sequence[RankLocation],
    mode: str,
    *,
    by_name: bool,
    reach: TierSet | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Validate the run directory. Every rank calls it.

    Args:
        tier: The run directory.
        channel: Between the ranks.
        seats: Location of every rank, in rank order.
        mode: "auto", "required" or "never".
        by_name: A snapshot was requested by name.
        reach: The slower tiers: they may hold a run that the run directory has lost.

    Returns:
        Id of the run, None if there is none yet; and (on rank 0) the capabilities of the run
            directory.

    Raises:
        NothingToResume, TierUnavailable, UnusableSnapshot, ConfigurationError: on every rank alike.
    """
    rank = channel.world.rank
    firsts = leaders(seats)

    def look() -> dict[str, Any]:
        if rank not in firsts:
            return {}
        run = answer_within(tier.url, lambda: attempt_history.run_id(tier))
        evidence = launch.evidence_of_restart()
        if run is None and rank == 0 and mode == "auto" and not by_name:
            evidence = _unless_nothing_began(evidence)
        return {"run": run, "evidence": evidence, "by name": by_name}

    looks = gather_or_raise(channel, "place/looks", look, RANKS_TIMEOUT_S)
    holders = [leader for leader in firsts if looks[leader]["run"] is not None]
    lost = None
    if not holders:
        sure = mode == "required" or bool(looks[0]["evidence"])
        lost = _elsewhere(reach, channel, must=mode != "never", sure=sure)
    if not holders and lost is None:
        _must_be_new(tier, mode, looks[0]["evidence"], by_name=looks[0]["by name"])
    if len(firsts) > 1:
        _VisibilityProbe(tier, channel, seats, firsts, writer=(holders or firsts)[0]).compare()

    def measure() -> dict[str, Any]:
        begun_mark.leave_mark()  # on every host, before the first attempt is claimed
        return _measure(tier, rank)

    found = gather_or_raise(channel, "place/can", measure, RANKS_TIMEOUT_S)
    if lost is not None:
        adopted: str = lost

        def adopt() -> None:
            if rank == 0 and reach is not None:
                reach.adopt(adopted)

        gather_or_raise(channel, "place/adopted", adopt, RANKS_TIMEOUT_S)
    return looks[holders[0]]["run"] if holders else lost, found[0]


def _unless_nothing_began(evidence: str) -> str:
    """Return the evidence of a restart, or "" if no start of the job has begun the run.

    Slurm's mark counts once: the same command may run again in this start, and then must find it.
    """
    if evidence.startswith(begun_mark.RESTARTS_VARIABLE) and begun_mark.began_nothing():
        logger.info("%s, but no ranks of this agent had begun a run", evidence)
        # Torchrun's restarts are no evidence, but a job that Slurm requeued is still a restart.
        others = {n: v for n, v in os.environ.items() if n != begun_mark.RESTARTS_VARIABLE}
        evidence = launch.evidence_of_restart(others)
    name, command = slurm.job_to_requeue(os.environ), os.environ.get(COMMAND_VARIABLE)
    if name is None or not command or not evidence.startswith(slurm.RESTARTS_VARIABLE):
        return evidence
    scontrol, restart = slurm.Scontrol(name), slurm.restarts(os.environ)
    job = scontrol.show()
    before = job.comment if job is not None else None
    if before is None or not slurm.began_nothing(before, restart, command):
        return evidence
    refused = scontrol.note(slurm.without_note(before, restart, command))
    if refused:
        logger.warning("Slurm did not take back its note that no run has begun: %s", refused)
        return evidence
    logger.info(
        "%s, but Slurm was told that this command was stopped before its run had begun", evidence
    )
    return ""


def _elsewhere(reach: TierSet | None, channel: RankStore, *, must: bool, sure: bool) -> str | None:
    """Return the run that slower tiers hold, as rank 0 sees it; `sure`: known to be this one."""
    if reach is None or not reach.slower.tiers:
        return None

    def look() -> str | None:
        run = reach.find_run(must=must) if channel.world.rank == 0 else None
        if run is not None and not sure:
            reach.must_be_ours(run)
        return run

    return gather_or_raise(channel, "place/elsewhere", look, RANKS_TIMEOUT_S)[0]


def leaders(seats: Sequence[RankLocation]) -> list[int]:
    """Return the first rank of each view, ascending."""
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        first.setdefault(f"{seat.host} {seat.view}", rank)
    return sorted(first.values())


def _must_be_new(tier: RunTier, mode: str, evidence: str, *, by_name: bool) -> None:
    if mode == "required" or (mode == "auto" and (evidence or by_name)):
        why = f", and {evidence} says this is a restart" if evidence else ""
        raise NothingToResume(f"there is no run at {tier.url}{why}", hint=_how_to_begin(evidence))


def _how_to_begin(evidence: str) -> str:
    """Return the advice to type. A restart must not use resume='never': each would begin anew."""
    afresh = {
        "SLURM_RESTART_COUNT": "submit the script again with sbatch",
        "TORCHELASTIC_RESTART_COUNT": "start torchrun again",
        "TRAINCKPT_RESTART": "start the command again without TRAINCKPT_RESTART",
    }.get(evidence.partition("=")[0])
    if afresh is None:
        return "check the path; resume='never' starts a new run whatever there was"
    return (
        "check the path: it has to be the one that the first start was given, and seen from here. "
        f"If that start ended before it had begun its run, nothing is lost: {afresh}, which is no "
        "restart"
    )


def _measure(tier: RunTier, rank: int) -> dict[str, Any]:
    if rank != 0:
        return {}
    if not isinstance(tier, LocalTier):
        return answer_within(tier.url, lambda: _ask_store(tier))

    def measure() -> fs_probe.Capabilities:
        tier.make_folder("")
        found = fs_probe.measure(tier.root, tier.disk)
        for folder in (names.ATTEMPTS, names.SNAPSHOTS):  # others may have made them
            tier.must_take_files(folder)
        return found

    found = answer_within(tier.url, measure)
    broken = found.breaks_commits()
    if broken:
        raise ConfigurationError(
            f"the file system of {tier.url} cannot hold a run: {'; '.join(broken)}",
            hint='name a directory on another one: Checkpointer("/path/on/another/file/system", '
            "...)",
        )
    for warning in found.warnings():
        logger.warning("%s: %s", tier.url, warning)
    return found.to_json()


def _ask_store(tier: ObjectStoreTier) -> dict[str, Any]:
    """Test if the store refuses to overwrite, and abort the stale uploads of dead writers."""
    found = {"store": tier.name, "create_only": tier.creates_only()}
    if not found["create_only"]:
        logger.debug("%s creates what is there already, so names are claimed first", tier.url)
    with contextlib.suppress(TrainckptError):  # a store may deny it
        tier.abort_stale_uploads()
    return found


class _VisibilityProbe:
    """Test if all hosts see one directory, by files they write for each other."""

    def __init__(
        self,
        tier: RunTier,
        channel: RankStore,
        seats: Sequence[RankLocation],
        leaders: Sequence[int],
        writer: int,
    ) -> None:
        self._tier, self._channel, self._seats = tier, channel, seats
        self._leaders, self._writer = leaders, writer
        self._rank = channel.world.rank
        self._token = secrets.token_hex(8)
        self._made: list[Path] = []

    def compare(self) -> None:
        """Return if they do; else `ConfigurationError` on every rank, and nothing is left."""
        shared = False
        try:
            self._round("first", [self._writer])
            self._round("others", [leader for leader in self._leaders if leader != self._writer])
            shared = True
        finally:
            self._tidy(also_folders=not shared)

    def _round(self, name: str, writers: Sequence[int]) -> None:
        """Write the tokens of `writers`, then look for them on every host."""
        tokens = gather_or_raise(
            self._channel, f"place/{name}/tokens", lambda: self._write(writers), RANKS_TIMEOUT_S
        )
        wanted = {tokens[rank] for rank in writers}
        unseen = gather_or_raise(
            self._channel, f"place/{name}/seen", lambda: self._unseen(wanted), RANKS_TIMEOUT_S
        )
        blind = {
            (self._seats[reader].host, self._seats[writer].host)
            for reader, missing in enumerate(unseen)
            for writer in writers
            if tokens[writer] in missing
        }
        if blind:
            self._refuse(sorted(blind))

    def _write(self, writers: Sequence[int]) -> str:
        """Create the token, if this rank is one of `writers`.

        Waits for a missing folder: another start of this run may be removing it just now, and a
        client of a file server may still see a folder that another host has removed.
        """
        until = time.monotonic() + self._patience_s()
        while self._rank in writers:
            try:
                answer_within(self._tier.url, self._create)
                break
            except TierUnavailable as error:
                if number_behind(error) != errno.ENOENT or time.monotonic() > until:
                    raise
            time.sleep(LOOK_AGAIN_S)
        return self._token

    def _create(self) -> None:
        if not isinstance(self._tier, LocalTier):
            self._tier.replace(f"{PROBE}/{self._token}", b"")
            return
        self._made += self._tier.make_folder(PROBE)
        try:
            os.close(self._tier.disk.create(self._tier.root / PROBE / self._token))
        except FileNotFoundError as error:
            why = f"{self._tier.url} does not keep what is written to it"
            raise TierUnavailable(why) from error

    def _patience_s(self) -> float:
        """Return how long a host may see an outdated folder."""
        kind = fs_probe.file_system(self._tier.root) if isinstance(self._tier, LocalTier) else ""
        return REMOTE_VISIBLE_WITHIN_S if fs_probe.is_remote(kind) else VISIBLE_WITHIN_S

    def _unseen(self, wanted: set[str]) -> list[str]:
        if self._rank not in self._leaders:
            return []
        until = time.monotonic() + self._patience_s()

        def missing() -> list[str]:
            return [token for token in wanted if token not in self._tier.list(PROBE)]

        while unseen := answer_within(self._tier.url, missing):
            if time.monotonic() > until:
                break
            time.sleep(LOOK_AGAIN_S)
        return unseen

    def _refuse(self, blind: Sequence[tuple[str, str]]) -> None:
        hosts = sorted({host for pair in blind for host in pair})
        seen = "; ".join(f"{reader} does not see what {writer} writes" for reader, writer in blind)
        raise ConfigurationError(
            f"the hosts {' and '.join(hosts)} do not see one directory at {self._tier.url}: {seen}",
            hint='name a directory that all hosts share: Checkpointer("/path/on/a/shared/file/'
            'system", ...)',
        )

    def _tidy(self, *, also_folders: bool) -> None:
        if not isinstance(self._tier, LocalTier):
            with contextlib.suppress(TrainckptError):
                self._tier.remove(f"{PROBE}/{self._token}")
            return
        folder = self._tier.root / PROBE
        with contextlib.suppress(OSError):
            (folder / self._token).unlink(missing_ok=True)
        # Another host's token may remain: the last host removes the folder.
        for path in [*reversed(self._made)] if also_folders else [folder]:
            with contextlib.suppress(OSError):
                path.rmdir()


RUN, TIERS = "run", "tiers"


def own_places(run_tier: Tier, slower: Sequence[Tier]) -> list[list[str]]:
    """Return the name and location of each tier given to this rank, its run directory first."""
    return [[tier.name, _where(tier.url)] for tier in (run_tier, *slower)]


def must_be_the_same(views: Sequence[str], everyone: Sequence[Sequence[Sequence[str]]]) -> None:
    """Refuse to go on if they differ.

    Args:
        views: View of each rank: same for ranks with the same file systems.
        everyone: Tiers of each rank (`own_places`).

    Raises:
        ConfigurationError: names the rank and its tiers.
    """
    first = everyone[0]
    for rank, mine in enumerate(everyone[1:], 1):
        what = RUN if _differ([first[0]], [mine[0]], views[0] == views[rank]) else ""
        if not what and _differ(first[1:], mine[1:], views[0] == views[rank]):
            what = TIERS
        if what:
            begin, end = (0, 1) if what == RUN else (1, None)
            theirs, ours = (
                ", ".join(where for _, where in each[begin:end]) or "none" for each in (first, mine)
            )
            raise ConfigurationError(
                f"the ranks were given different places ({what}): rank 0 {theirs}; "
                f"rank {rank} {ours}",
                hint="give every rank the same arguments, and the same TRAINCKPT_... variables",
            )


def _differ(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]], same_view: bool) -> bool:
    if len(one) != len(other):
        return True
    for (name, where), (other_name, other_where) in zip(one, other, strict=True):
        is_store = "://" in where or "://" in other_where
        if name != other_name or (where != other_where and (is_store or same_view)):
            return True
    return False


def _where(url: str) -> str:
    return url if "://" in url else os.path.abspath(url)  # noqa: PTH100 - a look may hang

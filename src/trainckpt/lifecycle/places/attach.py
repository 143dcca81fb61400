"""Attach: whether the run's place answers, holds the run, is seen by all hosts, and will do.

    first look    one rank of each host, within a limit: a place that hangs is an error, not a hang
    judge         no run, where there must be one: refused before anything is created
    one place?    with several hosts: one writes a token, the others look for it; then the others
                  write theirs. A host that sees a directory of its own creates nothing in it
    capabilities  rank 0 tries what a commit relies on, once

The tokens have random names and are removed again; one that a dead attempt left does no harm.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import (
    ConfigurationError,
    NothingToResume,
    TierUnavailable,
    TrainckptError,
)
from trainckpt.lifecycle.run import launch
from trainckpt.lifecycle.run.command_word import COMMAND_VARIABLE
from trainckpt.lifecycle.run.error_json import together
from trainckpt.lifecycle.run.log import logger
from trainckpt.preemption import slurm
from trainckpt.snapshot import attempts as attempt_records
from trainckpt.tiers import capabilities
from trainckpt.tiers.local import LocalTier
from trainckpt.tiers.patience import answer_within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.lifecycle.places.reach import Reach
    from trainckpt.ranks.channel import Channel
    from trainckpt.tiers.object_store import ObjectStoreTier
    from trainckpt.tiers.places import Place

RANKS_TIMEOUT_S = 600.0
PROBE = "probe"
LOOK_AGAIN_S = 0.05
# How long a host may go on seeing what was there before: a network file system keeps names, and
# that there is none, for up to a minute. A local one has nothing to wait for.
VISIBLE_WITHIN_S, REMOTE_VISIBLE_WITHIN_S = 3.0, 75.0


@dataclass(frozen=True)
class Seat:
    """Where a rank sits, as far as what it sees of the disk depends on it.

    Attributes:
        host: Name of its host.
        view: Same for ranks that have one machine and one mount namespace.
    """

    host: str
    view: str


def own_view() -> str:
    """Names what this process sees of the file systems: its machine, and its mounts."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt"):
        with contextlib.suppress(OSError):
            found = Path(path)
            parts.append(str(found.readlink()) if found.is_symlink() else found.read_text())
    return " ".join(part.strip() for part in parts)


def attach(
    tier: Place,
    channel: Channel,
    seats: Sequence[Seat],
    mode: str,
    *,
    by_name: bool,
    reach: Reach | None = None,
) -> tuple[str | None, dict[str, Any]]:
    """Look at the place. Every rank calls it.

    Args:
        tier: The run's place.
        channel: Between the ranks.
        seats: Of every rank, in rank order.
        mode: "auto", "required" or "never".
        by_name: A snapshot was asked for by name.
        reach: The slower tiers: they may hold the run where the place has lost it.

    Returns:
        Id of the run, None if there is none yet; and (on rank 0) what the place can do.

    Raises:
        NothingToResume, TierUnavailable, UnusableSnapshot, ConfigurationError: on every rank
            alike.
    """
    rank = channel.world.rank
    firsts = leaders(seats)

    def look() -> dict[str, Any]:
        if rank not in firsts:
            return {}
        run = answer_within(tier.url, lambda: attempt_records.run_id(tier))
        evidence = launch.evidence_of_restart()
        if run is None and rank == 0 and mode == "auto" and not by_name:
            evidence = _unless_nothing_began(evidence)
        return {"run": run, "evidence": evidence, "by name": by_name}

    looks = together(channel, "place/looks", look, RANKS_TIMEOUT_S)
    holders = [leader for leader in firsts if looks[leader]["run"] is not None]
    lost = None
    if not holders:
        sure = mode == "required" or bool(looks[0]["evidence"])
        lost = _elsewhere(reach, channel, must=mode != "never", sure=sure)
    if not holders and lost is None:
        _must_be_new(tier, mode, looks[0]["evidence"], by_name=looks[0]["by name"])
    if len(firsts) > 1:
        _Tokens(tier, channel, seats, firsts, writer=(holders or firsts)[0]).compare()
    found = together(channel, "place/can", lambda: _measure(tier, rank), RANKS_TIMEOUT_S)
    if lost is not None:
        adopted: str = lost
        together(channel, "place/adopted", lambda: _adopt(reach, adopted, rank), RANKS_TIMEOUT_S)
    return looks[holders[0]]["run"] if holders else lost, found[0]


def _unless_nothing_began(evidence: str) -> str:
    """Evidence of a restart, but that of Slurm where no start of the job has begun the run.

    The note counts once: the same command may be run again in this start, and then must find it.
    """
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


def _elsewhere(reach: Reach | None, channel: Channel, *, must: bool, sure: bool) -> str | None:
    """The run that slower tiers hold, as rank 0 sees it; `sure`: it is known to be this one."""
    if reach is None or not reach.slower.tiers:
        return None

    def look() -> str | None:
        run = reach.find_run(must=must) if channel.world.rank == 0 else None
        if run is not None and not sure:
            reach.must_be_ours(run)
        return run

    return together(channel, "place/elsewhere", look, RANKS_TIMEOUT_S)[0]


def _adopt(reach: Reach | None, run: str, rank: int) -> None:
    if rank == 0 and reach is not None:
        reach.adopt(run)


def leaders(seats: Sequence[Seat]) -> list[int]:
    """The first rank of each view, ascending."""
    first: dict[str, int] = {}
    for rank, seat in enumerate(seats):
        first.setdefault(f"{seat.host} {seat.view}", rank)
    return sorted(first.values())


def _must_be_new(tier: Place, mode: str, evidence: str, *, by_name: bool) -> None:
    if mode == "required" or (mode == "auto" and (evidence or by_name)):
        why = f", and {evidence} says this is a restart" if evidence else ""
        raise NothingToResume(f"there is no run at {tier.url}{why}", hint=_how_to_begin(evidence))


def _how_to_begin(evidence: str) -> str:
    """What to type. A restart must not go on with resume='never': each would begin anew."""
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


def _measure(tier: Place, rank: int) -> dict[str, Any]:
    if rank != 0:
        return {}
    if not isinstance(tier, LocalTier):
        return answer_within(tier.url, lambda: _ask_store(tier))

    def measure() -> capabilities.Capabilities:
        tier.make_folder("")
        return capabilities.measure(tier.root, tier.disk)

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
    """Whether it refuses to create what is there; and away with what dead writers left in it."""
    found = {"store": tier.name, "create_only": tier.creates_only()}
    if not found["create_only"]:
        logger.info("%s creates what is there already, so names are claimed first", tier.url)
    with contextlib.suppress(TrainckptError):  # a store may keep that from us
        tier.abort_stale_uploads()
    return found


class _Tokens:
    """Whether all hosts see one directory, by files they write for each other."""

    def __init__(
        self,
        tier: Place,
        channel: Channel,
        seats: Sequence[Seat],
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
        """`writers` write their tokens, then every host looks for them."""
        tokens = together(
            self._channel, f"place/{name}/tokens", lambda: self._write(writers), RANKS_TIMEOUT_S
        )
        wanted = {tokens[rank] for rank in writers}
        unseen = together(
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
        if self._rank in writers:
            answer_within(self._tier.url, self._create)
        return self._token

    def _create(self) -> None:
        if not isinstance(self._tier, LocalTier):
            self._tier.replace(f"{PROBE}/{self._token}", b"")
            return
        for _ in range(3):  # another start of this run may be removing the folder just now
            self._made += self._tier.make_folder(PROBE)
            with contextlib.suppress(FileNotFoundError):
                os.close(self._tier.disk.create(self._tier.root / PROBE / self._token))
                return
        raise TierUnavailable(f"{self._tier.url} does not keep what is written to it")

    def _unseen(self, wanted: set[str]) -> list[str]:
        if self._rank not in self._leaders:
            return []
        kind = ""
        if isinstance(self._tier, LocalTier):
            kind = capabilities.file_system(self._tier.root)
        is_remote = capabilities.is_remote(kind)
        patience = REMOTE_VISIBLE_WITHIN_S if is_remote else VISIBLE_WITHIN_S
        until = time.monotonic() + patience

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
        # Another host's token may still lie there: whoever is last removes the folder.
        for path in [*reversed(self._made)] if also_folders else [folder]:
            with contextlib.suppress(OSError):
                path.rmdir()

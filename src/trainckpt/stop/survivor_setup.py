"""Set up the survivors' save: the remaining ranks save after others have died.

step_history       each rank's state, window by window; its own part is at its partner too
failure_detector   liveness of the ranks
survivor_save      the save itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.replicate.replicator import domains_of
from trainckpt.snapshot.redundancy import NOTHING, PARTNER, RedundancySpec, make_plan
from trainckpt.survivors.failure_detector import FailureDetector
from trainckpt.survivors.step_history import HOLD_S, PartnerStateExchange, StepHistory
from trainckpt.survivors.survivor_save import WITHIN_S, SurvivorSave

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.attempt.status_files import RankStatusWriter
    from trainckpt.format.cursor import Cursor
    from trainckpt.ranks.store import RankStore
    from trainckpt.save.committer import ManifestDefaults
    from trainckpt.save.coordinator import SaveCoordinator
    from trainckpt.save.encryption import SnapshotEncryption
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

# Parts of torch's messages about a failed collective of gloo or NCCL.
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class SurvivorSetup:
    """One rank's survivor setup for an attempt."""

    def __init__(
        self,
        *,
        channel: RankStore,
        saver: SaveCoordinator,
        hard_exit: Callable[[str], object],
        moments: StepHistory,
        survivors: SurvivorSave,
        small: PartnerStateExchange | None,
        after_s: float,
        status_writer: RankStatusWriter,
    ) -> None:
        """`hard_exit`: ends this process at once, for the reason given."""
        self.record: Callable[[Cursor], None] = moments.record
        self._saver, self._hard_exit = saver, hard_exit
        self._moments, self._survivors, self._small = moments, survivors, small
        self._status_writer, self._after_s = status_writer, after_s
        status_writer.update(survives_s=after_s)
        self._detector = FailureDetector(
            channel,
            after_s,
            lambda: moments.progress,
            lambda: small.failure if small is not None else "",
            self._save_and_exit,
        )
        self._detector.start()

    def after(self, error: BaseException | None) -> None:
        """Save if the script ended by an error that means another rank is gone."""
        if error is None or not says_that_a_rank_is_gone(error):
            return
        why = f"{type(error).__name__}: {str(error)[:300]}"
        self._detector.stop()
        self._detector.report_lost(why)
        self._save(why)

    def close(self, *, left: bool) -> None:
        """End at the attempt's end: on all ranks in order (`left`), or on this one by an error."""
        self._detector.stop(left=left)
        if self._small is not None:
            self._small.close()
        self._moments.close()

    def _save_and_exit(self, why: str) -> None:  # background thread: main hangs
        self._save(why)
        self._hard_exit(why)

    def _save(self, why: str) -> None:
        self._status_writer.update(survives_s=self._after_s + WITHIN_S)
        saved = self._survivors.save(why)
        if saved is not None:
            self._saver.adopt(saved.name, saved.cursor)


def set_up(
    *,
    options: Options,
    channel: RankStore,
    tier: Tier,
    registry: Registry,
    defaults: ManifestDefaults,
    saver: SaveCoordinator,
    hard_exit: Callable[[str], object],
    hosts: Sequence[str],
    status_writer: RankStatusWriter,
    encryption: SnapshotEncryption | None = None,
) -> SurvivorSetup | None:
    """Set up this rank's part; return None if the options ask for nothing. Every rank calls it.

    Args:
        options: `survivors` and `redundancy`, the same on every rank.
        channel: Fresh keys.
        tier: The run directory.
        registry, defaults, saver: Objects of this attempt.
        hard_exit: Ends this process at once, for the reason given.
        hosts: Host of every rank.
        status_writer: Reports to this host's supervisor, since that would soon end the ranks after
            another died.
        encryption: Encryption of the snapshots; None: not encrypted.
    """
    spec, after_s = options.redundancy, options.survivors.seconds
    keeps = spec.kind != NOTHING
    wanted = not options.survivors.auto or (keeps and options.memory_every.steps != 1)
    if channel.world.size == 1 or after_s is None or not wanted:
        return None
    channel = channel.scoped("survival")
    small = None
    if keeps:
        small = PartnerStateExchange(channel, _partners(options, channel, hosts))
    hold_s = max(HOLD_S, 2 * after_s)
    moments = StepHistory(registry, channel, small, saver.arenas.copy_threads, hold_s=hold_s)
    survivors = SurvivorSave(
        tier=tier,
        rank=channel.world.rank,
        world=channel.world.size,
        facts=defaults,
        moments=moments,
        sequence=lambda: saver.sequence,
        encryption=encryption,
        waits_for_own=small is None,
    )
    if channel.world.rank == 0:
        how = "" if keeps else ", not bitwise with redundancy='none'"
        logger.debug("if ranks die, the others save their newest whole step%s", how)
    return SurvivorSetup(
        channel=channel,
        saver=saver,
        hard_exit=hard_exit,
        moments=moments,
        survivors=survivors,
        small=small,
        after_s=after_s,
        status_writer=status_writer,
    )


def _partners(options: Options, channel: RankStore, hosts: Sequence[str]) -> tuple[int, ...]:
    """Return each rank's partner for its own state, in another failure domain if there is one."""
    declared = channel.gather("failure domains", options.failure_domain or "", RANKS_TIMEOUT_S)
    domains = domains_of(hosts, declared)
    if len(set(domains)) == 1:
        domains = [str(rank) for rank in range(len(hosts))]  # any rank may die alone
    return make_plan(RedundancySpec(PARTNER), domains).partners


def says_that_a_rank_is_gone(error: BaseException) -> bool:
    """Return True if an error comes from a failed collective."""
    kinds: list[Any] = [type(each).__name__ for each in (error, error.__cause__) if each]
    text = str(error).lower()
    return any(kind.startswith("Dist") for kind in kinds) or (
        isinstance(error, RuntimeError) and any(each in text for each in _OF_COLLECTIVES)
    )

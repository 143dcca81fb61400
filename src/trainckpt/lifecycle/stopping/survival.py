"""Survival: puts together what lets the ranks that are left save when others have died.

moments          what each rank keeps, window by window
small_states     what is a rank's own, at its partner
signs_of_life    who is there still
survivors        the save itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.saving.domains import domains_of
from trainckpt.lifecycle.surviving.moments import Moments
from trainckpt.lifecycle.surviving.signs_of_life import SignsOfLife
from trainckpt.lifecycle.surviving.small_states import SmallStates
from trainckpt.lifecycle.surviving.survivors import WITHIN_S, Survivors
from trainckpt.snapshot.redundancy import NOTHING, PARTNER, Wish, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainckpt.format.cursor import Cursor
    from trainckpt.lifecycle.run.options import Options
    from trainckpt.lifecycle.run.told import Teller
    from trainckpt.lifecycle.saving.saver import Saver
    from trainckpt.lifecycle.saving.sealing import Sealing
    from trainckpt.lifecycle.saving.writer import Facts
    from trainckpt.lifecycle.stopping.departure import Departure
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.registry import Registry
    from trainckpt.tiers.base import Tier

# What says that a collective failed, not the script: of gloo and NCCL, as torch raises it.
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")


class Survival:
    """Of one rank of an attempt."""

    def __init__(
        self,
        channel: Channel,
        saver: Saver,
        departure: Departure,
        moments: Moments,
        survivors: Survivors,
        small: SmallStates | None,
        after_s: float,
        teller: Teller,
    ) -> None:
        self.note: Callable[[Cursor], None] = moments.note
        self._saver, self._departure = saver, departure
        self._moments, self._survivors, self._small = moments, survivors, small
        self._teller, self._after_s = teller, after_s
        teller.tell(survives_s=after_s)
        self._signs = SignsOfLife(
            channel,
            after_s,
            lambda: moments.progress,
            lambda: small.gone if small is not None else "",
            self._lost,
        )
        self._signs.start()

    def after(self, error: BaseException | None) -> None:
        """The script was left by an error: if it says that another rank is gone, save."""
        if error is None or not says_that_a_rank_is_gone(error):
            return
        why = f"{type(error).__name__}: {str(error)[:300]}"
        self._signs.stop()
        self._signs.tell_soon(why)
        self._save(why)

    def close(self, *, left: bool) -> None:
        """The attempt ends, on all ranks in order (`left`), or on this one by an error."""
        self._signs.stop(left=left)
        if self._small is not None:
            self._small.close()
        self._moments.close()

    def _lost(self, why: str) -> None:
        """Background thread: main hangs."""
        self._save(why)
        self._departure.cut_short(why)

    def _save(self, why: str) -> None:
        self._teller.tell(survives_s=self._after_s + WITHIN_S)
        saved = self._survivors.save(why)
        if saved is not None:
            self._saver.committed = saved.name, saved.cursor


def set_up(
    options: Options, channel: Channel, tier: Tier, registry: Registry, facts: Facts,
    saver: Saver, departure: Departure, hosts: Sequence[str], teller: Teller,
    seals: Sealing | None = None,
) -> Survival | None:  # fmt: skip
    """What this rank does for it; None: nothing was asked for. Every rank calls it.

    Args:
        options: `survivors` and `redundancy`, the same on every rank.
        channel: Fresh keys.
        tier: The run's place.
        registry, facts, saver, departure: Of this attempt.
        hosts: Of every rank.
        teller: Tells this host's supervisor, which would end them soon after another died.
        seals: What is saved is encrypted.
    """
    wish, after_s = options.redundancy, options.survivors.seconds
    keeps = wish.kind != NOTHING
    wanted = not options.survivors.auto or (keeps and options.memory_every.steps != 1)
    if channel.world.size == 1 or after_s is None or not wanted:
        return None
    channel = channel.scoped("survival")
    small = None
    if keeps:
        small = SmallStates(channel, _partners(options, channel, hosts))
    moments = Moments(registry, channel, small, saver.arenas.copy_threads)
    survivors = Survivors(
        tier, channel.world.rank, channel.world.size, facts, moments,
        lambda: saver.sequence, seals, waits_for_own=small is None,
    )  # fmt: skip
    if channel.world.rank == 0:
        how = "" if keeps else "; redundancy='none', so that will not be bitwise"
        logger.info("if ranks die the others save the newest step they hold%s", how)
    return Survival(channel, saver, departure, moments, survivors, small, after_s, teller)


def _partners(options: Options, channel: Channel, hosts: Sequence[str]) -> tuple[int, ...]:
    """Of every rank, who keeps what is its own: of another domain, where there is one."""
    declared = channel.gather("failure domains", options.failure_domain or "", RANKS_TIMEOUT_S)
    domains = domains_of(hosts, declared)
    if len(set(domains)) == 1:
        domains = [str(rank) for rank in range(len(hosts))]  # any rank may die alone
    return make_plan(Wish(PARTNER), domains).partners


def says_that_a_rank_is_gone(error: BaseException) -> bool:
    """Whether an error comes of a collective that failed."""
    kinds: list[Any] = [type(each).__name__ for each in (error, error.__cause__) if each]
    text = str(error).lower()
    return any(kind.startswith("Dist") for kind in kinds) or (
        isinstance(error, RuntimeError) and any(each in text for each in _OF_COLLECTIVES)
    )

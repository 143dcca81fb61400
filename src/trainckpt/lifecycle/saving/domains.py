"""Domains: which ranks fail together, and what follows from that for who keeps what of whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.saving.protection import Protection
from trainckpt.snapshot import parity
from trainckpt.snapshot.redundancy import NOTHING, PARITY, Wish, make_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.lifecycle.run.options import Options
    from trainckpt.ranks.channel import Channel
    from trainckpt.snapshot.redundancy import Plan


def set_up(options: Options, channel: Channel, run: str, hosts: Sequence[str]) -> Protection | None:
    """What this rank does for the others' files; None: nothing was asked for. Every rank calls it.

    Args:
        options: With the same redundancy on every rank, and each host's own failure domain.
        channel: Fresh keys.
        run: The run's place, which names its memory.
        hosts: Of every rank.

    Raises:
        ConfigurationError: parity is wanted, and NumPy is not installed.
    """
    wish = options.redundancy
    if wish.kind == NOTHING and options.memory_every.steps is None:
        return None
    if wish.kind == PARITY:
        parity.check_available()
    declared = channel.gather("failure domains", options.failure_domain or "", RANKS_TIMEOUT_S)
    plan = make_plan(wish, domains_of(hosts, declared))
    if channel.world.rank == 0:
        _say(plan)
    local = [rank for rank, host in enumerate(hosts) if host == channel.world.host]
    return Protection(plan, channel, run, local)


def on_this_host(channel: Channel, run: str, hosts: Sequence[str]) -> Protection:
    """As `set_up`, for a rank whose file nobody else is to keep."""
    local = [rank for rank, host in enumerate(hosts) if host == channel.world.host]
    return Protection(make_plan(Wish(), list(hosts)), channel, run, local)


def domains_of(hosts: Sequence[str], declared: Sequence[str]) -> list[str]:
    """The failure domain of each rank: what its host's first rank declares, or the host itself.

    Ranks of one host are always in one: they share the memory in which things are kept.
    """
    first: dict[str, str] = {}
    for host, name in zip(hosts, declared, strict=True):
        first.setdefault(host, name or f"host {host}")
    return [first[host] for host in hosts]


def _say(plan: Plan) -> None:
    """What is kept where, and what is not as it was asked for."""
    for warning in plan.warnings:
        logger.warning("%s", warning)
    if plan.partners:
        logger.info("each rank's file is copied to a rank of another host")
    elif plan.sets:
        sizes = sorted({len(coded.members) for coded in plan.sets})
        logger.info("ranks of other hosts keep parities of each rank's file, in sets of %s: any %d "
                    "of the hosts may be lost", " or ".join(map(str, sizes)),
                    plan.num_losses)  # fmt: skip

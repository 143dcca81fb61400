"""Failure domains: the ranks that fail together, and the replication plan made from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.attempt.log import logger
from trainckpt.replicate.replicator import Replicator
from trainckpt.run_directory.validate import RANKS_TIMEOUT_S
from trainckpt.snapshot import parity
from trainckpt.snapshot.redundancy import NOTHING, PARITY, RedundancySpec, make_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.attempt.options import Options
    from trainckpt.ranks.store import RankStore
    from trainckpt.snapshot.redundancy import RedundancyPlan


def set_up(
    options: Options, channel: RankStore, run: str, hosts: Sequence[str]
) -> Replicator | None:
    """Return this rank's replicator, or None if no replication was asked for. Collective.

    Args:
        options: The same redundancy on every rank, and each host's own failure domain.
        channel: Fresh keys.
        run: Run directory, which names its shared memory.
        hosts: Host of every rank.

    Raises:
        ConfigurationError: parity is wanted, and NumPy is not installed.
    """
    spec = options.redundancy
    if spec.kind == NOTHING and options.memory_every.steps is None:
        return None
    if spec.kind == PARITY:
        parity.check_available()
    declared = channel.gather("failure domains", options.failure_domain or "", RANKS_TIMEOUT_S)
    plan = make_plan(spec, domains_of(hosts, declared))
    if channel.world.rank == 0:
        _log_plan(plan)
    local = [rank for rank, host in enumerate(hosts) if host == channel.world.host]
    return Replicator(plan, channel, run, local)


def set_up_local(channel: RankStore, run: str, hosts: Sequence[str]) -> Replicator:
    """Return a replicator like that of `set_up`, for a rank whose file stays on its own host."""
    local = [rank for rank, host in enumerate(hosts) if host == channel.world.host]
    return Replicator(make_plan(RedundancySpec(), list(hosts)), channel, run, local)


def domains_of(hosts: Sequence[str], declared: Sequence[str]) -> list[str]:
    """Return each rank's failure domain: the name its host's first rank declares, or the host
    itself.

    Ranks of one host always share a domain, since they share the memory that holds the replicas.
    """
    first: dict[str, str] = {}
    for host, name in zip(hosts, declared, strict=True):
        first.setdefault(host, name or f"host {host}")
    return [first[host] for host in hosts]


def _log_plan(plan: RedundancyPlan) -> None:
    """Log the replication plan, and where it falls short of the options."""
    for warning in plan.warnings:
        logger.warning("%s", warning)
    if plan.partners:
        logger.debug("each rank's file is copied to a rank of another host")
    elif plan.sets:
        sizes = sorted({len(coded.members) for coded in plan.sets})
        logger.info(
            "ranks of other hosts keep parities of each rank's file, in sets of %s: any %d "
            "of the hosts may be lost",
            " or ".join(map(str, sizes)),
            plan.num_losses,
        )

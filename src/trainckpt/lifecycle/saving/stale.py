"""Stale: a model that is saved and never changes although its optimizer steps is the wrong one.

A script that tracks a copy, or wraps the model anew after tracking it, trains one and saves the
other: every snapshot is whole, verified, and worthless. It shows at the second save.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format.digest import compact
from trainckpt.lifecycle.run.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.state.registry import Registry


class Stale:
    """Compares each save of this rank with the one before."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._before: tuple[int, dict[str, str]] | None = None
        self._said: set[str] = set()

    def look(self, step: int, header: ShardHeader) -> list[str]:
        """A save at this step was committed; names of models that look stale, each said once."""
        before, digests = self._before, self._trained(header)
        if before is not None:
            digests = {**{k: d for k, d in before[1].items() if k in header.references}, **digests}
        self._before = step, digests
        if before is None or step <= before[0]:
            return []
        found = [name for name in unchanged(before[1], digests) if name not in self._said]
        self._said.update(found)
        for name in found:
            logger.warning(
                "%s has not changed in %d steps, in no bit of what is saved of it: is it the one "
                "that is trained?", name, step - before[0],
            )  # fmt: skip
        return found

    def _trained(self, header: ShardHeader) -> dict[str, str]:
        """Region -> digest, of parameters that some tracked optimizer should change."""
        stepped = self._registry.stepped_parameters()
        names = {name for name, parameter in stepped.items() if parameter.requires_grad}
        return {r.key: compact(r.digest) for r in header.regions if r.tensor in names}


def unchanged(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Tracked names of which every region that both saves know is as it was; sorted."""
    same: dict[str, bool] = {}
    for key in before.keys() & now.keys():
        name = key.partition("/")[0]
        same[name] = same.get(name, True) and before[key] == now[key]
    return sorted(name for name, is_same in same.items() if is_same)

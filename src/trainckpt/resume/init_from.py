"""Initial weights: a new run's models begin with those of another run (option `init_from`).

Only at step 0, and only parameters and buffers: optimizers, schedulers, data and random
generators begin as the script made them. Every rank reads and compares before any is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.inspect.contents import Contents, models_in
from trainckpt.inspect.load import Globs, SelectiveLoad, read_into
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.run_directory.run_tiers import open_source

if TYPE_CHECKING:
    from trainckpt.format.globs import Rename
    from trainckpt.ranks.store import RankStore
    from trainckpt.state.registry import Registry


@dataclass(frozen=True)
class InitialWeights:
    """Verified initial weights: the name of their snapshot, and the argument of `put`."""

    source: str
    loading: SelectiveLoad


def read_initial(
    target: str,
    registry: Registry,
    channel: RankStore,
    *,
    only: Globs = (),
    rename: Rename | None = None,
) -> InitialWeights:
    """Read initial values for the tracked models. Every rank calls it; nothing live is touched.

    Args:
        target: "RUN" or "RUN@SNAPSHOT".
        registry: Its models are loaded by name; with one model on each side the names may differ.
        channel: Fresh keys of this Checkpointer.
        only: Globs of the tensors to load, by their names here; none: all.
        rename: Names in the snapshot -> names here; None: they are the same.

    Raises:
        NothingToResume, UnusableSnapshot, StateMismatch, ConfigurationError: on every rank alike.
    """
    loads: list[SelectiveLoad] = []

    def read() -> str:
        contents = Contents(open_source(target))
        loads.append(read_into(contents, _objects(contents, registry), channel.world, only, rename))
        return str(contents.source)

    named = gather_or_raise(channel, "initial weights", read, RANKS_TIMEOUT_S)
    if len(set(named)) > 1:
        raise ConfigurationError(
            f"init_from={target!r} names different snapshots on the ranks: {sorted(set(named))}",
            hint="name the snapshot (RUN@NAME), in a directory shared by all hosts",
        )
    return InitialWeights(named[0], loads[0])


def _objects(contents: Contents, registry: Registry) -> dict[str, Any]:
    if not registry.models:
        raise ConfigurationError("init_from found no tracked model", hint="track one, model=...")
    models = models_in(contents.values(0))
    if len(models) == len(registry.models) == 1:
        return {models[0]: registry.models[0].wrapped}
    return {model.name: model.wrapped for model in registry.models}

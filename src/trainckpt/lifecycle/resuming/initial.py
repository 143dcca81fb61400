"""Initial weights: a new run's models begin with those of another run (option `init_from`).

Only at step 0, and only parameters and buffers: optimizers, schedulers, data and random
generators begin as the script made them. Every rank reads and compares before any is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.places.source import open_source
from trainckpt.lifecycle.reading.contents import Contents, models_in
from trainckpt.lifecycle.reading.load import Loading, read_into
from trainckpt.lifecycle.run.error_json import together

if TYPE_CHECKING:
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.registry import Registry


@dataclass(frozen=True)
class Initial:
    """Weights to begin with, verified: the snapshot they are of, and what `put` takes."""

    source: str
    loading: Loading


def read_initial(target: str, registry: Registry, channel: Channel) -> Initial:
    """Read what the tracked models begin with. Every rank calls it; nothing live is touched.

    Args:
        target: "RUN" or "RUN@SNAPSHOT".
        registry: Its models are loaded by name; where there is one model here and one there,
            the names need not be equal.
        channel: Fresh keys of this Checkpointer.

    Raises:
        NothingToResume, UnusableSnapshot, StateMismatch, ConfigurationError: on every rank alike.
    """
    found: list[Loading] = []

    def read() -> str:
        contents = Contents(open_source(target))
        found.append(read_into(contents, _objects(contents, registry), (), channel.world))
        return str(contents.source)

    named = together(channel, "initial weights", read, RANKS_TIMEOUT_S)
    if len(set(named)) > 1:
        raise ConfigurationError(
            f"the ranks found different snapshots by init_from={target!r}: {sorted(set(named))}",
            hint="name the snapshot, and a place that all hosts see",
        )
    return Initial(named[0], found[0])


def _objects(contents: Contents, registry: Registry) -> dict[str, Any]:
    """Name in the snapshot -> live module."""
    if not registry.models:
        raise ConfigurationError("init_from has no model to load into", hint="track one, model=...")
    models = models_in(contents.values(0))
    if len(models) == len(registry.models) == 1:
        return {models[0]: registry.models[0].wrapped}
    return {model.name: model.wrapped for model in registry.models}

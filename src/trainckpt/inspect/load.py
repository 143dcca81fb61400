"""Load a snapshot's tensors, or restore objects from them, without a Checkpointer.

    contents   open the snapshot, read its values
    objects    the live ones, under their tracked names; decide the tensors they need
    read       every byte needed, verified; each rank its own boxes only
    compare    all differences at once
    put        only now is anything live touched

Nothing is claimed and nothing is written: the run does not notice. No rank waits for another, so
ranks with columns of the same rows each read those rows whole; `resume` divides them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.globs import matches, parse_globs, select
from trainckpt.inspect.contents import Contents, models_in, with_tied
from trainckpt.ranks.world import current_world
from trainckpt.run_directory.run_tiers import open_source
from trainckpt.state import apply, imported
from trainckpt.state.adapters import fsdp
from trainckpt.state.adapters.model import compare, copy
from trainckpt.state.captured import Saved
from trainckpt.state.registry import RESERVED, Registry
from trainckpt.state.restore_targets import find_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from trainckpt.format.manifest import TensorEntry
    from trainckpt.ranks.world import World

Globs = tuple[str, ...]


@dataclass(frozen=True)
class SelectiveLoad:
    """Everything read, verified and compared; nothing live touched yet.

    Attributes:
        registry: The live objects.
        saved: State to put into them.
        only: The live tensors to load, if not all.
    """

    registry: Registry
    saved: Saved
    only: Mapping[str, torch.Tensor] | None = None


@overload
def load(
    run_or_snapshot: str | os.PathLike[str],
    into: None = None,
    only: str | Sequence[str] | None = None,
) -> dict[str, torch.Tensor]: ...
@overload
def load(
    run_or_snapshot: str | os.PathLike[str],
    into: nn.Module | Mapping[str, Any],
    only: str | Sequence[str] | None = None,
) -> None: ...
def load(
    run_or_snapshot: str | os.PathLike[str],
    into: nn.Module | Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
) -> dict[str, torch.Tensor] | None:
    """Read a snapshot without resuming, whatever the layout in which it was saved.

        weights = trainckpt.load("runs/gpt@best", only="blocks.*")   # dict of whole CPU tensors
        trainckpt.load("runs/gpt", into=model)                       # the model alone
        trainckpt.load("runs/gpt@s1200", into={"model": model, "optimizer": optimizer})

    Args:
        run_or_snapshot: "RUN", "RUN@s1200", "RUN@tag" or "RUN@latest"; "RUN" is the latest.
        into: A module, whose parameters and buffers are loaded; or a dict of objects under their
            tracked names, where an optimizer comes with its model. A module may be wrapped in DDP,
            compiled, or sharded with DTensors: each rank reads its own part, of columns the whole
            rows. Tensors that were excluded from the snapshot stay as they are. Without `into` the
            tensors are returned.
        only: Globs of the tensors to load. With a `/` they match full names
            ("optimizer/*/exp_avg"), else the paths inside the models ("blocks.*.weight"); `*`
            stands for dots and slashes too. With `into` they choose tensors of models, and the
            others stay as they are.

    Returns:
        Without `into`, full name ("model/blocks.0.weight") -> whole tensor on the CPU in its saved
            type; of tensors that each rank has for itself, this rank's. Else None.

    Raises:
        NothingToResume: There is no such run, or it has committed nothing.
        UnusableSnapshot: There is no such snapshot, or bytes are missing or damaged.
        StateMismatch: Names, shapes or types differ; lists all. Nothing was loaded.
        ConfigurationError: A glob matches nothing, one of several models must be chosen, or an
            object cannot be loaded into.
    """
    contents = Contents(open_source(os.fspath(run_or_snapshot)))
    globs = _globs(only)
    world = current_world()
    if into is None:
        return _tensors(contents, globs, world)
    put(read_into(contents, into, globs, world))
    return None


def read_into(contents: Contents, into: Any, globs: Globs, world: World) -> SelectiveLoad:
    """Read and compare all tensors needed by `into`; errors as `load`."""
    donor = world.rank % contents.manifest.world
    values = contents.values(donor)
    registry = _register(contents, values, into)
    own = {name: values[name] for name in registry.names()}
    entries: Mapping[str, TensorEntry] = contents.manifest.tensors
    if imported.source(values):
        own, entries = imported.fit(own, entries, registry)
    targets = find_targets(registry, own, entries, world=world.size, then=contents.manifest.world)
    only: dict[str, torch.Tensor] | None = None
    stored: set[str] = set()
    if globs:
        only, stored = _choose(contents, registry, values, globs)
        targets.wanted = {n: box for n, box in targets.wanted.items() if n in stored}
    _refuse(contents, targets.problems)
    saved = Saved(
        contents.read_boxes(targets.wanted, donor),
        own,
        shapes={name: entry.shape for name, entry in entries.items()},
        wraps=targets.wraps,
        exact=targets.exact,
        is_own=donor == world.rank,
        worlds=(contents.manifest.world, world.size),
    )
    if only is None:
        left = {n for model in registry.models for n in model.left_out(own, entries)}
        saved = replace(saved, left=frozenset(left))
        if left:
            logger.warning(
                "not in %s, excluded, so left as they are: %s",
                contents.source,
                ", ".join(sorted(left)),
            )
    found = apply.differences(registry, saved) if only is None else compare(only, stored, saved)
    _refuse(contents, found)
    return SelectiveLoad(registry, saved, only)


def put(loading: SelectiveLoad) -> None:
    """Put the loaded state into the live objects."""
    if loading.only is None:
        # As into another layout: the state of an open window is not loaded.
        apply.apply(loading.registry, replace(loading.saved, exact=False))
        return
    for model in loading.registry.models:
        fsdp.rest(model.wrapped)
    copy(loading.only, loading.saved)


def _tensors(contents: Contents, globs: Globs, world: World) -> dict[str, torch.Tensor]:
    donor = world.rank % contents.manifest.world
    names = contents.names
    if globs:
        values = contents.values(donor)
        known = with_tied(contents.names, values)
        names = sorted({known[name] for name in select(globs, known, models_in(values))})
    return contents.read_boxes(dict.fromkeys(names), donor)


def _register(contents: Contents, values: dict[str, Any], into: Any) -> Registry:
    """Register the live objects under their names in the snapshot."""
    if isinstance(into, nn.Module):
        models = models_in(values)
        if len(models) != 1:
            listed = ", ".join(models) or "none"
            raise ConfigurationError(
                f"{contents.source} holds {len(models)} models: {listed}",
                hint=f"load(..., into={{{(models or ['model'])[0]!r}: module}})",
            )
        into = {models[0]: into}
    if not isinstance(into, Mapping) or not into:
        raise ConfigurationError(
            f"into is a {type(into).__name__}", hint="give a module, or a dict of tracked objects"
        )
    registry = Registry()
    for name, value in into.items():
        registry.add(str(name), value)
    unknown = [name for name in registry.names() if name not in values]
    tracked = sorted(values.keys() - RESERVED)
    _refuse(contents, [f"{name} is not in the snapshot, which has {tracked}" for name in unknown])
    return registry


def _choose(
    contents: Contents, registry: Registry, values: dict[str, Any], globs: Globs
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the live tensors matched by the globs, and the stored ones."""
    models = [model.name for model in registry.models]
    others = sorted(set(registry.names()) - set(models))
    if others:
        raise ConfigurationError(
            f"only chooses among tensors of models; {', '.join(others)} can only be loaded whole",
            hint="load them by a call of their own, without only",
        )
    known = with_tied(contents.names, values)
    known = {name: known[name] for name in known if name.partition("/")[0] in models}
    stored = {known[name] for name in select(globs, known, models)}
    live = {name: t for model in registry.models for name, t in model.tensors().items()}
    meant = (n for n in live if any(matches(glob, n, models) for glob in globs))
    return {name: live[name] for name in {*meant, *stored} if name in live}, stored


def _refuse(contents: Contents, differences: Sequence[str]) -> None:
    if differences:
        raise StateMismatch(
            f"the objects are not those of {contents.source}",
            sorted(differences),
            hint="load what fits: trainckpt.load(RUN, into=module, only=...)",
        )


def _globs(only: str | Sequence[str] | None) -> Globs:
    if only is None:
        return ()
    try:
        found = parse_globs([only] if isinstance(only, str) else list(only))
    except (TypeError, ValueError):
        found = ()
    if not found:
        raise ConfigurationError(f"only={only!r} is no glob", hint='use only="blocks.*.weight"')
    return found

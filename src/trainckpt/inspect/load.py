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
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from torch import nn

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.globs import Rename, matches, parse_globs, renamed, select
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


class _Part(NamedTuple):
    """The tensors to load: those matched by globs, or all; under other names than in the file."""

    globs: Globs
    rename: Rename | None


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
    rename: None = None,
) -> dict[str, torch.Tensor]: ...
@overload
def load(
    run_or_snapshot: str | os.PathLike[str],
    into: nn.Module | Mapping[str, Any],
    only: str | Sequence[str] | None = None,
    rename: Rename | None = None,
) -> None: ...
def load(
    run_or_snapshot: str | os.PathLike[str],
    into: nn.Module | Mapping[str, Any] | None = None,
    only: str | Sequence[str] | None = None,
    rename: Rename | None = None,
) -> dict[str, torch.Tensor] | None:
    """Read a snapshot without resuming, whatever the layout in which it was saved.

        weights = trainckpt.load("runs/gpt@best", only="blocks.*")   # dict of whole CPU tensors
        trainckpt.load("runs/gpt", into=model)                       # the model alone
        trainckpt.load("runs/gpt@s1200", into={"model": model, "optimizer": optimizer})
        trainckpt.load("runs/gpt", into=other, only="encoder.*", rename={"blocks": "encoder"})

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
        rename: For `into` with other names than the snapshot's: a dict from the beginning of a
            path inside the models to the one it has here ("blocks" -> "encoder", whole parts
            only), or a function from path to path, or to None for a tensor to leave out. `only`
            then means the names here.

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
        if rename is not None:
            raise ConfigurationError(
                "rename is for loading into a model", hint="give into=, or rename the dict's keys"
            )
        return _tensors(contents, globs, world)
    put(read_into(contents, into, world, globs, rename))
    return None


def read_into(
    contents: Contents, into: Any, world: World, globs: Globs = (), rename: Rename | None = None
) -> SelectiveLoad:
    """Read and compare all tensors needed by `into`; errors as `load`."""
    donor = world.rank % contents.manifest.world
    values = contents.values(donor)
    registry = _register(contents, values, into)
    own = {name: values[name] for name in registry.names()}
    if globs or rename is not None:
        return _read_part(contents, registry, own, world, _Part(globs, rename))
    entries: Mapping[str, TensorEntry] = contents.manifest.tensors
    if imported.source(values):
        own, entries = imported.fit(own, entries, registry)
    targets = find_targets(registry, own, entries, world=world.size, then=contents.manifest.world)
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
    left = {n for model in registry.models for n in model.left_out(own, entries)}
    saved = replace(saved, left=frozenset(left))
    if left:
        logger.warning(
            "not in %s, excluded, so left as they are: %s",
            contents.source,
            ", ".join(sorted(left)),
        )
    _refuse(contents, apply.differences(registry, saved))
    return SelectiveLoad(registry, saved)


def _read_part(
    contents: Contents, registry: Registry, own: Mapping[str, Any], world: World, part: _Part
) -> SelectiveLoad:
    """Read the chosen tensors of models, under the names that they have here."""
    models = [model.name for model in registry.models]
    others = sorted(set(registry.names()) - set(models))
    if others:
        raise ConfigurationError(
            f"only and rename choose among tensors of models; {', '.join(others)} can only be "
            "loaded whole",
            hint="load them by a call of their own, without only and rename",
        )
    known = with_tied(contents.names, own)
    known = {name: known[name] for name in known if name.partition("/")[0] in models}
    if part.rename is not None:
        known = renamed(known, part.rename)
    live = {name: t for model in registry.models for name, t in model.tensors().items()}
    meant = set(live)
    chosen = set(known) - {
        f"{name}/{path}" for name in models for path in own[name].get("transient", ())
    }
    if part.globs:
        chosen = select(part.globs, known, models)
        meant = {n for n in live if any(matches(glob, n, models) for glob in part.globs)}
    # A tied tensor has several names, and perhaps not all of them here.
    tensors, of_live = {known[n] for n in chosen}, {known[n] for n in live if n in known}
    only = {n: live[n] for n in live if n in meant or known.get(n) in tensors}
    stored = {n for n in chosen if known[n] not in of_live} | (only.keys() & known.keys())
    entries = {name: contents.manifest.tensors[known[name]] for name in stored}
    donor, then = world.rank % contents.manifest.world, contents.manifest.world
    wanted = find_targets(registry, {}, entries, world=world.size, then=then).wanted
    boxes = {known[name]: box for name, box in wanted.items()}
    read = contents.read_boxes(boxes, donor)
    saved = Saved(
        {name: read[known[name]] for name in wanted},
        {},
        shapes={name: entry.shape for name, entry in entries.items()},
    )
    _refuse(contents, compare(only, stored, saved))
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
    for engine in registry.engines:
        raise ConfigurationError(
            f"{engine.name} is a DeepSpeed engine, which has copied its weights to partitions",
            hint="load into the plain module, before deepspeed.initialize",
        )
    unknown = [name for name in registry.names() if name not in values]
    tracked = sorted(values.keys() - RESERVED)
    _refuse(contents, [f"{name} is not in the snapshot, which has {tracked}" for name in unknown])
    return registry


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

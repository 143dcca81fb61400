"""Apply saved state to live objects in the one exact order. The mirror of `capture`.

The order is data (`STEPS`), because it is the promise: DDP's buckets first, since rebuilding
them clears gradients; buffers after wrapping; gradients after anything that may zero them. The
random generators come last of all and separately (`apply_rng`), right before the first batch.
Nothing is applied before `check` finds no difference, so a refused resume changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import StateMismatch
from trainckpt.state import attributes, imported, plain_tensors, script_randomness
from trainckpt.state.adapters import ddp, ddp_hooks, fsdp, gradients, rng
from trainckpt.state.capture import DDP, FSDP, LOADERS
from trainckpt.state.registry import RESERVED

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry


MODEL, OPTIMIZER, LOADER = "a model", "an optimizer", "a loader"
OBJECT = "an object of another kind"
AS_IT_WAS = "run the script as it was, or start a new run in another place"
OTHER_DATA = (
    "run the script with the loader as it was; to train on with other batches, start a new run in "
    'another place that begins with these weights: init_from="<directory of this run>"'
)


def check(registry: Registry, saved: Saved, snapshot: str) -> None:
    """Raise `StateMismatch` with every difference between the script's objects and `saved`.

    A saved loader not tracked yet is no difference: scripts may register it after the resume.
    `loaders_to_come` returns those still missing.
    """
    live = {*registry.names(), *(m.name for m in registry.models)}
    implied = {optimizer.name for optimizer in registry.optimizers if optimizer.implied}
    implied |= {generic.name for generic in registry.generics if generic.implied}
    live -= implied - saved.values.keys()
    if imported.source(saved.values):  # what it lacks stays as the script made it
        live -= live - {model.name for model in registry.models} - saved.values.keys()
    then = saved.values.keys() - RESERVED - loaders_to_come(registry, saved)
    found = [f"{name} is tracked now, and not in the snapshot" for name in sorted(live - then)]
    found += [f"{name} is in the snapshot, and not tracked now" for name in sorted(then - live)]
    found += differences(registry, saved)
    for file in registry.files:
        found += file.differences(saved)
    if found:
        loaders = tuple(f"{loader.name}: " for loader in registry.loaders)
        is_data_alone = all(line.startswith(loaders) for line in found)
        hint = OTHER_DATA if is_data_alone else AS_IT_WAS
        if imported.source(saved.values):
            hint = "import it again, with --rename KEY=NAME or --without KEY for other names"
        raise StateMismatch(
            f"the script's objects are not those of snapshot {snapshot}",
            found,
            hint=hint,
        )


def differences(registry: Registry, saved: Saved) -> list[str]:
    """Return the differences between objects and their saved state, one sentence each."""
    names = registry.parameter_names()
    found = _other_kinds(registry, saved)
    for model in registry.models:
        if _kind(saved, model.name) == MODEL:
            found += model.differences(saved)
    for optimizer in registry.optimizers:
        if _kind(saved, optimizer.name) == OPTIMIZER:
            found += optimizer.differences(saved, names)
    for loader in registry.loaders:
        if _kind(saved, loader.name) == LOADER:
            found += loader.differences(saved)
    return found


def _kind(saved: Saved, name: str) -> str:
    """Return the kind of the state saved under `name`; "" if there is none."""
    tree = saved.values.get(name)
    if name in saved.values.get(LOADERS, ()):
        return LOADER
    if isinstance(tree, dict) and tree.keys() >= {"tied", "extra"}:
        return MODEL
    if isinstance(tree, dict) and tree.keys() >= {"groups", "state"}:
        return OPTIMIZER
    return OBJECT if name in saved.values else ""


def _other_kinds(registry: Registry, saved: Saved) -> list[str]:
    live: dict[str, Sequence[Any]] = {
        MODEL: registry.models,
        OPTIMIZER: registry.optimizers,
        LOADER: registry.loaders,
        OBJECT: registry.generics,
    }
    return [
        f"{item.name} was {_kind(saved, item.name)}, is {kind}"
        for kind, items in live.items()
        for item in items
        if _kind(saved, item.name) not in ("", kind)
    ]


def loaders_to_come(registry: Registry, saved: Saved) -> set[str]:
    """Return the snapshot's loaders not registered by the script yet."""
    return set(saved.values.get(LOADERS, ())) - set(registry.names())


def apply(registry: Registry, saved: Saved, *, again: bool = False, loaders: bool = True) -> None:
    """Restore everything but the random generators. Collective under DDP.

    Args:
        registry, saved: The live objects, and the restored state, checked to fit.
        again: The same state was applied before in this process; each DDP gets its buckets once.
        loaders: Restore the loaders too.
    """
    for model in registry.models:
        fsdp.rest(model.wrapped)
    saved.is_again = again
    if again and saved.given is not None:
        saved.given.mend(saved.num_threads)
    for name, step in STEPS:
        left_out = name == LOADERS and not loaders
        if not left_out and (saved.exact or name not in OF_THE_WINDOW):
            step(registry, saved)


def apply_modes(registry: Registry, saved: Saved) -> None:
    """Set the training mode of each module, at the very boundary of the snapshot.

    The script may set modes between two boundaries at any time, so they are exact only there.
    """
    for model in registry.models:
        model.apply_modes(saved)


def hidden_in_ddp(saved: Saved) -> list[str]:
    """Return the models with saved DDP state relevant to the result; they need DDP again."""
    found = saved.values[DDP].items() if saved.exact else ()
    return [name for name, hidden in found if ddp.counts(hidden, saved.worlds[0])]


def not_kept_of_ddp(saved: Saved) -> list[str]:
    """Return the parts of DDP missing from the snapshot, one sentence each."""
    hidden = saved.values[DDP].values() if saved.exact else ()
    return [sentence for each in hidden for sentence in each.get("not_kept", ())]


def in_another_ddp(registry: Registry, names: Container[str]) -> list[str]:
    """Return those of these models with a DDP wrapper other than the restored one."""
    return [
        model.name
        for model in registry.models
        if model.name in names and model.reducing not in registry.as_saved
    ]


def settled(registry: Registry) -> None:
    """Tell the optimizers: the restored state is final."""
    for optimizer in registry.optimizers:
        optimizer.settled()


def apply_rng(registry: Registry, saved: Saved) -> None:
    """Restore the random generators: the last act before the first batch.

    A new rank, absent from the saved run, keeps the generators seeded by the script. So do all
    ranks if others trained the same samples then.
    """
    if saved.is_own:
        attributes.restore_generators(registry.watched, saved)
        script_randomness.restore(registry, saved)
        rng.apply(saved, registry.devices())


def generators_not_restored(registry: Registry, saved: Saved) -> list[str]:
    """Return the variables and attributes whose generator `apply_rng` could not restore."""
    if not saved.is_own:
        return []
    others = attributes.other_generators(registry.watched, saved)
    return others + script_randomness.lost(registry, saved)


def rng_not_put_back(registry: Registry, saved: Saved) -> list[str]:
    """Return a sentence for each random generator not restorable by `apply_rng`."""
    if not saved.is_own:
        return []
    lost = attributes.lost_generators(registry.watched, saved)
    return lost + rng.not_put_back(saved, registry.devices())


def _bucket_order(registry: Registry, saved: Saved) -> None:
    for model in registry.models:
        hidden, wrapper = saved.values[DDP].get(model.name), model.reducing
        if wrapper in registry.as_saved or not ddp.fits(wrapper, hidden):
            continue
        # It may apply again as it did then: a hook can be registered after the resume.
        if ddp.rounds_by_buckets(wrapper) or hidden.get("own_way", True):
            ddp.apply_bucket_order(wrapper, hidden)
        registry.bucket_orders[wrapper] = hidden["bucket_order"]
        registry.as_saved.add(wrapper)


def _hooks(registry: Registry, saved: Saved) -> None:
    """Restore the hooks, after the buckets: replaying the bucket order calls the hooks."""
    for model in registry.models:
        then = (saved.values[DDP].get(model.name) or {}).get("hooks")  # of an older release: None
        wrapper = model.reducing
        if then is not None and not ddp_hooks.apply(wrapper, then, saved):
            registry.as_saved.discard(wrapper)


def _parameters(registry: Registry, saved: Saved) -> None:
    for model in registry.models:
        model.apply_parameters(saved)


def _buffers(registry: Registry, saved: Saved) -> None:
    for model in registry.models:
        model.apply_buffers(saved)


def _forward_sync(registry: Registry, saved: Saved) -> None:
    for model in registry.models:
        ddp.apply_forward_sync(model.reducing, saved.values[DDP].get(model.name))


def _optimizers(registry: Registry, saved: Saved) -> None:
    with registry.unchanged():
        names, parameters = registry.parameter_names(), registry.model_parameters()
    for optimizer in registry.optimizers:
        if optimizer.name in saved.values:
            optimizer.add_groups(saved, parameters)
            optimizer.apply(saved, names)


def _generics(registry: Registry, saved: Saved) -> None:
    for generic in registry.generics:
        generic.apply(saved)


def _used_parameters(registry: Registry, saved: Saved) -> None:
    stored = saved.values[gradients.PART]
    for model in registry.models:
        hidden = saved.values[DDP].get(model.name)
        if hidden is not None:
            used = [parameter for name, parameter in model.parameters() if name in stored]
            ddp.apply_used_parameters(model.reducing, hidden, used)


def _plain_tensors(registry: Registry, saved: Saved) -> None:
    registry.plain_tensors.apply(registry, saved)


def _gradients(registry: Registry, saved: Saved) -> None:
    gradients.apply(saved, registry.trained_parameters())


def _outside_gradients(registry: Registry, saved: Saved) -> None:
    for model in registry.models:
        tree = saved.values.get(FSDP, {}).get(model.name)
        fsdp.apply(model.wrapped, tree, saved)


def _engines(registry: Registry, saved: Saved) -> None:
    for engine in registry.engines:
        engine.apply(saved)


def _engine_gradients(registry: Registry, saved: Saved) -> None:
    for engine in registry.engines:
        engine.apply_window(saved)


def _loaders(registry: Registry, saved: Saved) -> None:
    for loader in registry.loaders:
        if loader.name in saved.values:  # not in one that was imported
            loader.apply(saved)


BUCKETS, HOOKS = "DDP bucket order", "DDP communication hooks"
# Not restored under a changed layout: the window begins anew.
OF_THE_WINDOW = frozenset(
    (
        *(BUCKETS, HOOKS, "DDP forward sync", "DDP used parameters", "gradients"),
        *("FSDP2's gradients", "DeepSpeed's gradients"),
    )
)
STEPS: tuple[tuple[str, Callable[[Registry, Saved], None]], ...] = (
    (BUCKETS, _bucket_order),
    (HOOKS, _hooks),
    ("parameters", _parameters),
    ("buffers", _buffers),
    ("DDP forward sync", _forward_sync),
    ("objects", _generics),  # some load their own optimizer, and so cast its moments
    ("optimizers", _optimizers),
    ("DeepSpeed's counters", _engines),
    (plain_tensors.PART, _plain_tensors),
    ("DDP used parameters", _used_parameters),
    ("gradients", _gradients),
    ("FSDP2's gradients", _outside_gradients),
    ("DeepSpeed's gradients", _engine_gradients),
    (LOADERS, _loaders),
)

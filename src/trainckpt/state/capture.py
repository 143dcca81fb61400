"""Capture: live objects -> names, tensors and values of this rank. The mirror of `apply`.

Call it at a boundary, on the training thread. What devices were asked for is done when it returns,
on whatever stream (`side.finish`), so any thread may read. Copies nothing: `stage` does, before
training goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.preemption.alarms import raised_by_handler
from trainckpt.state import side
from trainckpt.state.attributes import PART as ATTRIBUTES
from trainckpt.state.captured import Captured
from trainckpt.state.kinds import ddp, ddp_hooks, fsdp, gradients, rng, tracked_file

if TYPE_CHECKING:
    from trainckpt.state.kinds.generic import GenericState
    from trainckpt.state.kinds.loader import LoaderState
    from trainckpt.state.registry import Registry

DDP, FSDP = "ddp", "fsdp"
LOADERS = "loaders"  # names of the tracked loaders: a script may register them later


def must_be_storable(registry: Registry) -> None:
    """Refuse now what no save could store. No collective: ranks need not call it together.

    Raises:
        ConfigurationError: something tracked has a state that cannot be stored; by name.
    """
    out, names = Captured(), registry.parameter_names()
    for optimizer in registry.optimizers:
        optimizer.capture(out, names)
    kinds: list[GenericState | LoaderState] = [*registry.generics, *registry.loaders]
    for kind in kinds:
        try:
            kind.capture(out)
        except ConfigurationError:
            raise
        except Exception as error:
            if alarm := raised_by_handler(error):
                raise alarm from None
            raise ConfigurationError(
                f"the state of {kind.name} cannot be saved: {type(error).__name__}: {error}",
                hint="its state_dict() has to work at any time between two batches",
            ) from error


def capture(registry: Registry) -> Captured:
    """Everything that a resume needs, of this rank, as it is now.

    Raises:
        values.UnknownValue: something tracked holds a value that cannot be stored; by path.
    """
    out = Captured()
    # Collective, so before anything that may fail on one rank alone and leave the others waiting.
    out.values[DDP] = {}
    for model in registry.models:
        wrapper = model.reducing
        hidden = ddp.capture(wrapper, registry.bucket_orders.get(wrapper, ""))
        if hidden is not None:
            registry.bucket_orders[wrapper] = hidden["bucket_order"]
            out.values[DDP][model.name] = hidden
    for model in registry.models:
        fsdp.rest(model.wrapped)
    # A step may have been taken on any stream. From here on only this thread asks for anything.
    finished = side.finish(registry.all_parameters())
    names = registry.parameter_names()
    for model in registry.models:
        model.capture(out)
        if model.name in out.values[DDP]:
            hooks = ddp_hooks.capture(model.reducing, f"{DDP}/{model.name}/hook", out)
            out.values[DDP][model.name] |= {
                "hooks": hooks,
                "not_kept": ddp_hooks.problems(model.reducing, model.name, registry.tracks),
            }
    for optimizer in registry.optimizers:
        optimizer.capture(out, names)
    for generic in registry.generics:
        generic.capture(out)
        registry.watched.watch(generic.name, generic.target, has_state=not generic.is_empty_in(out))
    if changed := registry.watched.changed():
        out.values[ATTRIBUTES] = out.encode(changed, ATTRIBUTES)
    for loader in registry.loaders:
        loader.capture(out)
    out.values[LOADERS] = [loader.name for loader in registry.loaders]
    gradients.capture(out, registry.trained_parameters())
    out.values[FSDP] = {}
    for model in registry.models:
        outside = fsdp.capture(model.wrapped, model.name, out)
        if outside is not None:
            out.values[FSDP][model.name] = outside
    tracked_file.capture(out, registry.files)
    rng.capture(out, registry.devices)
    # Copies that were made for it, which any thread may read; and devices without parameters.
    side.finish(out.tensors.values(), finished=finished)
    return out

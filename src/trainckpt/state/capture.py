"""Capture live objects as names, tensors and values of this rank. The mirror of `apply`.

Call it at a boundary, on the training thread. On return all submitted device work is done, on any
stream (`device_copy.finish`), so any thread may read. Copies nothing: `staging` does, before
training goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.preemption.signal_source import raised_by_handler
from trainckpt.state import attributes, device_copy, script_randomness
from trainckpt.state.adapters import (
    ddp,
    ddp_hooks,
    fsdp,
    gradients,
    rng,
    tracked_file,
    tracked_run,
)
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from trainckpt.state.adapters.loader import LoaderState
    from trainckpt.state.adapters.stateful import GenericState
    from trainckpt.state.registry import Registry

DDP, FSDP = "ddp", "fsdp"
LOADERS = "loaders"  # names of the tracked loaders: a script may register them later


def must_be_storable(registry: Registry, *, optimizers: bool = True) -> None:
    """Refuse unstorable state before the first save. No collective.

    `optimizers`: theirs too; a state that a snapshot has just given them can be stored.

    Raises:
        ConfigurationError: A tracked object has unstorable state; by name.
    """
    out, names = Captured(), registry.parameter_names()
    for optimizer in registry.optimizers if optimizers else ():
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
    """Return everything a resume needs of this rank, as it is now.

    Raises:
        values.UnknownValue: A tracked object has an unstorable value; by path.
    """
    out = Captured()
    # Collective, so first: a later failure on one rank alone would leave the others waiting.
    out.values[DDP] = {}
    for model in registry.models:
        wrapper = model.reducing
        hidden = ddp.capture(wrapper, registry.bucket_orders.get(wrapper, ""))
        if hidden is not None:
            registry.bucket_orders[wrapper] = hidden["bucket_order"]
            out.values[DDP][model.name] = hidden
    for model in registry.models:
        fsdp.rest(model.wrapped)
    # A step may have used any stream. From here on only this thread submits device work.
    device_copy.finish(registry.all_parameters())
    names = registry.parameter_names()
    for model in registry.models:
        model.capture(out)
        if model.name in out.values[DDP]:
            hooks = ddp_hooks.capture(model.reducing, f"{DDP}/{model.name}/hook", out)
            out.values[DDP][model.name] |= {
                "hooks": hooks,
                "not_kept": ddp_hooks.problems(model.reducing, model.name, registry.tracks),
            }
    _capture_modes(registry, out)
    for optimizer in registry.optimizers:
        optimizer.capture(out, names)
    for generic in registry.generics:
        generic.capture(out)
        registry.watched.watch(generic.name, generic.target, has_state=not generic.is_empty_in(out))
    if changed := registry.watched.changed():
        out.values[attributes.PART] = out.encode(changed, attributes.PART)
    registry.callback_values.capture(out)
    registry.plain_tensors.capture(registry, out)
    for loader in registry.loaders:
        loader.capture(out)
    out.values[LOADERS] = [loader.name for loader in registry.loaders]
    gradients.capture(out, registry.trained_parameters())
    _capture_hidden_gradients(registry, out)
    tracked_file.capture(out, registry.files)
    tracked_run.capture(out, registry.runs, registry.left_s())
    attributes.capture_generators(registry.watched, out)
    script_randomness.capture(registry, out)
    registry.epoch_head.capture(out)
    registry.open_loaders.capture(out)
    registry.script_variables.capture(out)
    rng.capture(out, registry.devices)
    # Any thread may read the copies made above. Also devices without parameters.
    device_copy.finish(out.tensors.values())
    return out


def _capture_hidden_gradients(registry: Registry, out: Captured) -> None:
    """Add gradients that are no parameter's: FSDP2's, and those of a DeepSpeed engine."""
    out.values[FSDP] = {}
    for model in registry.models:
        outside = fsdp.capture(model.wrapped, model.name, out)
        if outside is not None:
            out.values[FSDP][model.name] = outside
    for engine in registry.engines:
        engine.capture(out)


def _capture_modes(registry: Registry, out: Captured) -> None:
    for model in () if registry.is_over else registry.models:
        model.capture_modes(out)

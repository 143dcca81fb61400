"""The parts of a model that FSDP2 shards, and the parameters that the optimizer holds of them.

A unit is what one call of `fully_shard` or `replicate` made; its groups reduce their gradients
together. A module holds the unsharded parameters while its unit is gathered: after an
evaluation, and between micro-batches that do not reshard.

Private names of torch are used here and in `fsdp` only; `self_test` says which one is gone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_GROUP_NAMES = (*FLAGS, "fsdp_params", "mp_policy", "device", "device_handle", "_to_sharded",
                "mesh_info", "wait_for_unshard", "_partial_reduce_output", "_post_reduce_event",
                "_reset_sharded_params")  # fmt: skip
_PARAM_NAMES = ("sharded_param", "_unsharded_param", "unsharded_accumulated_grad", "_module_info",
                "_orig_size", "padded_sharded_param_size", "grad_offload_event")  # fmt: skip
_INFO_NAMES = ("module", "param_name", "shared_modules", "shared_param_names")


def self_test(module: nn.Module, name: str) -> None:
    """Raise `ConfigurationError` if this torch lacks what capture and apply rely on."""
    missing: dict[str, None] = {}
    for _, unit in _sharded_parts(module):
        if not hasattr(unit, "_get_fsdp_state"):
            missing["FSDPModule._get_fsdp_state"] = None
            continue
        state = unit._get_fsdp_state()
        missing.update(_gone(state, ("_state_ctx",)))
        missing.update(_gone(getattr(state, "_state_ctx", None), ("is_last_backward",)))
        if not hasattr(state, "_fsdp_param_groups"):  # older ones have one group, or none
            missing.update(_gone(state, ("_fsdp_param_group",)))
        for group in groups(unit):
            missing.update(_gone(group, _GROUP_NAMES))
            for held in getattr(group, "fsdp_params", ()):
                missing.update(_gone(held, _PARAM_NAMES))
                missing.update(_gone(getattr(held, "_module_info", None), _INFO_NAMES))
    if missing:
        raise ConfigurationError(
            f"{name}: torch {torch.__version__} no longer has {', '.join(missing)}, so FSDP2's "
            "hidden state cannot be restored exactly",
            hint="use a torch version that trainckpt was tested with, or a newer trainckpt",
        )


def plain_path(path: str) -> str:
    """The path without what torch.compile and activation checkpointing put around modules."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters()`, with the sharded ones also while a unit is gathered.

    Any thread: nothing is resharded, and no other rank is waited for.
    """
    sharded = _sharded_by_place(module)
    if not sharded:
        if remove_duplicate:  # classes override named_parameters, and some without its options
            yield from module.named_parameters()
        else:
            yield from module.named_parameters(remove_duplicate=False)
        return
    seen: set[int] = set()
    for path, part in module.named_modules(remove_duplicate=remove_duplicate):
        for key, registered in list(part._parameters.items()):
            parameter = sharded.get((id(part), key), registered)
            if parameter is None or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            yield (f"{path}.{key}" if path else key), parameter


def rest(module: nn.Module) -> None:
    """Put the sharded parameters into the modules, and wait for their gradients. Local.

    On all ranks at the same boundary: the next forward gathers what is not gathered.
    """
    for unit in units(module).values():
        for group in groups(unit):
            rest_group(group)


def rest_group(group: Any) -> None:
    """`rest` of one group."""
    if group._post_reduce_event is not None:  # torch itself waits at the last backward only
        group.device_handle.current_stream().wait_event(group._post_reduce_event)
    for held in group.fsdp_params:
        if held.grad_offload_event is not None:
            held.grad_offload_event.synchronize()
    group._to_sharded()  # `reshard` passes over a group whose last forward was not completed


def units(module: nn.Module) -> dict[str, Any]:
    """Plain path -> module, one for each unit: modules sharded together share their state."""
    found: dict[int, tuple[str, Any]] = {}
    for path, part in _sharded_parts(module):
        found.setdefault(id(part._get_fsdp_state()), (plain_path(path), part))
    return dict(found.values())


def groups(unit: Any) -> list[Any]:
    """The groups of a unit; a unit without parameters of its own has none."""
    state = unit._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    found = [getattr(state, "_fsdp_param_group", None)] if found is None else found
    return [group for group in found if group is not None]


def gathered(unit: Any) -> bool:
    """Whether unsharded parameters exist, as they do from the first gather on."""
    return all(hasattr(h, "_unsharded_param") for group in groups(unit) for h in group.fsdp_params)


def paths(module: nn.Module) -> dict[int, str]:
    """id(sharded parameter) -> its plain path in `module`; the first one of tied names."""
    return {id(parameter): plain_path(path) for path, parameter in parameters(module)}


def held_by_path(group: Any, known: dict[int, str]) -> dict[str, Any]:
    """Plain path -> torch's record of a parameter, in the order in which a group reduces them."""
    found = ((known.get(id(_sharded(group, held))), held) for held in group.fsdp_params)
    return {path: held for path, held in found if path is not None}


def _sharded(group: Any, held: Any) -> Any:
    """The sharded parameter; before the first gather torch has not noted a replaced one."""
    if group._reset_sharded_params:
        return held.sharded_param
    return held._module_info.module._parameters.get(held._module_info.param_name)


def _sharded_by_place(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """(id(module), key) -> the sharded parameter that belongs there."""
    found: dict[tuple[int, str], nn.Parameter] = {}
    for unit in units(module).values():
        for group in groups(unit):
            for held in group.fsdp_params:
                info, parameter = held._module_info, _sharded(group, held)
                found[id(info.module), info.param_name] = parameter
                for other, key in zip(info.shared_modules, info.shared_param_names, strict=True):
                    found[id(other), key] = parameter
    return found


def _sharded_parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None and _is_used(kind):
        yield from ((path, part) for path, part in module.named_modules() if isinstance(part, kind))


def _is_used(kind: type) -> bool:
    """Whether any module was sharded: each one's class becomes a subclass, also of its own."""
    found: list[type] = kind.__subclasses__()
    return any(issubclass(each, torch.nn.Module) or _is_used(each) for each in found)


def _gone(holder: Any, names: tuple[str, ...]) -> dict[str, None]:
    declared = getattr(type(holder), "__annotations__", {})  # some are set at the first gather
    kind = type(holder).__name__
    return {f"{kind}.{n}": None for n in names if not hasattr(holder, n) and n not in declared}

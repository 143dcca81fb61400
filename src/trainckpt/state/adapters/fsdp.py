"""Restore FSDP2's state (`fully_shard`, `replicate`) of an open window, besides `.grad`.

Without gradient sync every rank has whole, unreduced gradients: on the unsharded parameters or,
with a wider reduce type, beside them. Without all-reduce a group has the reduce-scattered sums so
far. A script may set the flags for the next backward only at a change, so they belong to the window
too. Only tensors and flags are stored, by path: torch itself numbers nothing before the first
forward.

This file also finds the parts of a model sharded by FSDP2, and the optimizer's parameters of them.
One call of `fully_shard` or `replicate` makes a unit; its groups reduce their gradients together. A
module has the unsharded parameters while its unit is gathered: after an evaluation, and between
micro-batches without reshard.

Private names of torch's FSDP2 are used only here; `self_test` reports a missing one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.state import values

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from trainckpt.state.captured import Captured, Saved


__all__ = [
    "apply",
    "capture",
    "differences",
    "gradient_bytes",
    "parameters",
    "plain_path",
    "rest",
    "self_test",
]


def capture(module: nn.Module, name: str, out: Captured) -> dict[str, Any] | None:
    """Return FSDP2's part of the open window, or None without FSDP2. Call `rest` before.

    Raises:
        values.UnknownValue: A gradient has an unknown placement; by path.
    """
    parts = units(module)
    if not parts:
        return None
    prefix, known = f"gradients/{name}", paths(module)
    return {
        path: {
            "gathered": gathered(unit),
            "last_backward": bool(unit._get_fsdp_state()._state_ctx.is_last_backward),
            "groups": [_capture_group(group, known, prefix, out) for group in groups(unit)],
        }
        for path, unit in parts.items()
    }


def differences(module: nn.Module, name: str, tree: dict[str, Any] | None) -> list[str]:
    """Return the differences in sharding between then and now, one sentence each.

    Raises:
        UnusableSnapshot: `tree` is not made by `capture`.
    """
    then = _params_then(tree or {})
    known = paths(module)
    now = {
        path: [sorted(params_by_path(group, known)) for group in groups(unit)]
        for path, unit in units(module).items()
    }
    full = {path: f"{name}/{path}" if path else name for path in then.keys() | now.keys()}
    lines = [f"{full[path]} was sharded by itself, is not now" for path in then.keys() - now]
    lines += [f"{full[path]} is sharded by itself now, was not" for path in now.keys() - then]
    lines += [
        f"{full[path]} was sharded together with other parameters than now"
        for path in then.keys() & now.keys()
        if then[path] != now[path]
    ]
    return sorted(lines)


def _params_then(tree: Any) -> dict[str, list[list[str]]]:
    """Return unit -> for each group, its parameters."""
    what = "the state of FSDP2"
    if not isinstance(tree, dict):
        raise UnusableSnapshot(f"{what} is no object")
    return {
        path: [
            sorted(json_io.field(group, "gradients", dict, what))
            for group in json_io.field(unit, "groups", list, what)
        ]
        for path, unit in tree.items()
    }


def apply(module: nn.Module, tree: dict[str, Any] | None, saved: Saved) -> None:
    """Restore the open window, absent gradients included; leaves all sharded. Collective.

    Units gathered then are gathered once, so that unsharded parameters exist. No others are: torch
    takes missing unsharded parameters as unused by any forward.
    """
    live = units(module)
    for path, then in (tree or {}).items():
        for group in groups(live[path]):
            group.wait_for_unshard()  # a pending gather has the earlier parameters
            rest_group(group)
        if then["gathered"] and not gathered(live[path]):
            live[path].unshard()
            live[path].reshard()
    known = paths(module)
    for path, then in (tree or {}).items():
        live[path]._get_fsdp_state()._state_ctx.is_last_backward = then["last_backward"]
        for group, group_then in zip(groups(live[path]), then["groups"], strict=True):
            _apply_group(group, known, group_then, saved)


def gradient_bytes(module: nn.Module) -> tuple[int, int]:
    """Return the bytes `capture` will add on this rank at the next boundary, and at most.

    Any thread. It reads flags and sizes alone: to read `.grad` while another thread is in a
    backward corrupts torch's memory.
    """
    coming = possible = 0
    for unit in units(module).values():
        for group in groups(unit):
            policy = group.mp_policy
            for fsdp_param in group.fsdp_params:
                if not fsdp_param.sharded_param.requires_grad:
                    continue
                dtype = policy.reduce_dtype or policy.param_dtype or fsdp_param.sharded_param.dtype
                whole = fsdp_param._orig_size.numel() * dtype.itemsize
                possible += whole
                if not group.reduce_grads:
                    coming += whole
                elif not group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None:
                    coming += fsdp_param.padded_sharded_param_size.numel() * dtype.itemsize
    return coming, possible


def _capture_group(group: Any, known: dict[int, str], prefix: str, out: Captured) -> dict[str, Any]:
    fsdp_params, partial = params_by_path(group, known), group._partial_reduce_output
    name = f"{prefix}/{next(iter(fsdp_params), '')}#partial"  # by its first parameter
    return {
        "flags": {flag: bool(getattr(group, flag)) for flag in FLAGS},
        "gradients": {
            path: {
                kind: _capture_gradient(gradient, f"{prefix}/{path}#{kind}", out)
                for kind, gradient in _gradients(fsdp_param).items()
                if gradient is not None
            }
            for path, fsdp_param in fsdp_params.items()
        },
        "partial": None if partial is None else out.add(name, partial),
    }


def _apply_group(group: Any, known: dict[int, str], then: dict[str, Any], saved: Saved) -> None:
    for flag in FLAGS:
        setattr(group, flag, then["flags"][flag])
    node = then["partial"]
    group._partial_reduce_output = None if node is None else saved.tensor(node, group.device)
    for path, fsdp_param in params_by_path(group, known).items():
        nodes = then["gradients"][path]
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        made = {kind: _saved_gradient(node, unsharded, saved) for kind, node in nodes.items()}
        if unsharded is not None:
            unsharded.grad = made.get("unsharded")
        fsdp_param.unsharded_accumulated_grad = made.get("accumulated")


def _gradients(fsdp_param: Any) -> dict[str, torch.Tensor | None]:
    unsharded = getattr(fsdp_param, "_unsharded_param", None)
    return {
        "unsharded": None if unsharded is None else unsharded.grad,
        "accumulated": fsdp_param.unsharded_accumulated_grad,
    }


def _local(gradient: Any) -> torch.Tensor:
    """Return this rank's part; with tensor parallelism underneath, gradients are DTensors."""
    local = getattr(gradient, "_local_tensor", gradient)
    wait = getattr(local, "wait", None)  # of a tensor still being communicated
    waited: torch.Tensor = local if wait is None else wait()
    return waited


def _capture_gradient(gradient: Any, path: str, out: Captured) -> dict[str, Any]:
    local = _local(gradient)
    node = out.add(path, local)
    if local is gradient:
        return node
    return {
        "local": node,
        "shape": list(gradient.shape),
        "stride": list(gradient.stride()),
        "placements": [_placement(placement, path) for placement in gradient.placements],
    }


def _saved_gradient(node: Any, unsharded: Any, saved: Saved) -> torch.Tensor:
    """Return the saved gradient, on the device and the ranks of the unsharded parameter."""
    if "local" not in node:
        return saved.tensor(node, unsharded.device)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        saved.tensor(node["local"], unsharded.device),
        unsharded.device_mesh,
        [_saved_placement(*placement) for placement in node["placements"]],
        run_check=False,
        shape=torch.Size(node["shape"]),
        stride=tuple(node["stride"]),
    )


def _placement(placement: Any, path: str) -> list[Any]:
    """Return a placement along one mesh dimension as JSON: its kind and arguments."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return ["replicate"]
    if kind == "Shard":
        return ["shard", placement.dim]
    if kind == "_StridedShard":
        return ["strided", placement.dim, placement.split_factor]
    if kind == "Partial":
        return ["partial", placement.reduce_op]
    raise values.UnknownValue(f"{path} is placed over its ranks as {placement}, an unknown way")


def _saved_placement(kind: str, *of: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types

    if kind == "strided":
        return placement_types._StridedShard(of[0], split_factor=of[1])
    known = {"replicate": Replicate, "shard": Shard, "partial": Partial}
    if kind not in known:
        raise UnusableSnapshot(f"a gradient is placed over its ranks as {kind!r}, an unknown way")
    return known[kind](*of)


WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")
_GROUP_NAMES = (
    *FLAGS,
    "fsdp_params",
    "mp_policy",
    "device",
    "device_handle",
    "_to_sharded",
    "mesh_info",
    "wait_for_unshard",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reset_sharded_params",
)
_PARAM_NAMES = (
    "sharded_param",
    "_unsharded_param",
    "unsharded_accumulated_grad",
    "_module_info",
    "_orig_size",
    "padded_sharded_param_size",
    "grad_offload_event",
)
_INFO_NAMES = ("module", "param_name", "shared_modules", "shared_param_names")


def self_test(module: nn.Module, name: str) -> None:
    """Raise `ConfigurationError` if this torch lacks a name used by capture or apply."""
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
            for fsdp_param in getattr(group, "fsdp_params", ()):
                missing.update(_gone(fsdp_param, _PARAM_NAMES))
                missing.update(_gone(getattr(fsdp_param, "_module_info", None), _INFO_NAMES))
    if missing:
        raise ConfigurationError(
            f"{name}: torch {torch.__version__} no longer has {', '.join(missing)}, so FSDP2's "
            "hidden state cannot be restored exactly",
            hint="use a torch version that trainckpt was tested with, or a newer trainckpt",
        )


def plain_path(path: str) -> str:
    """Return the path without the wrappers of torch.compile and activation checkpointing."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def parameters(
    module: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `module.named_parameters()`, with the sharded ones also while a unit is gathered.

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

    On all ranks at the same boundary: the next forward gathers them.
    """
    for unit in units(module).values():
        for group in groups(unit):
            rest_group(group)


def rest_group(group: Any) -> None:
    """Put one group's sharded parameters into the modules, and wait for their gradients."""
    if group._post_reduce_event is not None:  # torch itself waits at the last backward only
        group.device_handle.current_stream().wait_event(group._post_reduce_event)
    for fsdp_param in group.fsdp_params:
        if fsdp_param.grad_offload_event is not None:
            fsdp_param.grad_offload_event.synchronize()
    group._to_sharded()  # `reshard` skips a group after an incomplete forward


def units(module: nn.Module) -> dict[str, Any]:
    """Return plain path -> module for each unit; modules sharded together share their state."""
    by_state: dict[int, tuple[str, Any]] = {}
    for path, part in _sharded_parts(module):
        by_state.setdefault(id(part._get_fsdp_state()), (plain_path(path), part))
    return dict(by_state.values())


def groups(unit: Any) -> list[Any]:
    """Return the groups of a unit; a unit without parameters of its own has none."""
    state = unit._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    several = [getattr(state, "_fsdp_param_group", None)] if several is None else several
    return [group for group in several if group is not None]


def gathered(unit: Any) -> bool:
    """Return True if unsharded parameters exist, as they do from the first gather on."""
    return all(hasattr(h, "_unsharded_param") for group in groups(unit) for h in group.fsdp_params)


def paths(module: nn.Module) -> dict[int, str]:
    """Return id(sharded parameter) -> plain path in `module`; the first one of tied names."""
    return {id(parameter): plain_path(path) for path, parameter in parameters(module)}


def params_by_path(group: Any, known: dict[int, str]) -> dict[str, Any]:
    """Return plain path -> torch's record of a parameter, in the group's reduction order."""
    pairs = ((known.get(id(_sharded(group, param))), param) for param in group.fsdp_params)
    return {path: param for path, param in pairs if path is not None}


def _sharded(group: Any, fsdp_param: Any) -> Any:
    """Return the sharded parameter; before the first gather torch has not noted a replaced one."""
    if group._reset_sharded_params:
        return fsdp_param.sharded_param
    return fsdp_param._module_info.module._parameters.get(fsdp_param._module_info.param_name)


def _sharded_by_place(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """Return (id(module), key) -> the sharded parameter of that place."""
    by_place: dict[tuple[int, str], nn.Parameter] = {}
    for unit in units(module).values():
        for group in groups(unit):
            for fsdp_param in group.fsdp_params:
                info, parameter = fsdp_param._module_info, _sharded(group, fsdp_param)
                by_place[id(info.module), info.param_name] = parameter
                for other, key in zip(info.shared_modules, info.shared_param_names, strict=True):
                    by_place[id(other), key] = parameter
    return by_place


def _sharded_parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes a second
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None and _is_used(kind):
        yield from ((path, part) for path, part in module.named_modules() if isinstance(part, kind))


def _is_used(kind: type) -> bool:
    """Return True if any module was sharded: that makes a subclass of its class."""
    kinds: list[type] = kind.__subclasses__()
    return any(issubclass(kind, torch.nn.Module) or _is_used(kind) for kind in kinds)


def _gone(holder: Any, names: tuple[str, ...]) -> dict[str, None]:
    declared = getattr(type(holder), "__annotations__", {})  # some are set at the first gather
    kind = type(holder).__name__
    return {f"{kind}.{n}": None for n in names if not hasattr(holder, n) and n not in declared}

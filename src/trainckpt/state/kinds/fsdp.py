"""What FSDP2 (`fully_shard`, `replicate`) keeps of an open window outside the parameters' `.grad`.

Without gradient sync every rank holds whole, unreduced gradients: on the unsharded parameters
or, with a wider reduce type, beside them. Without all-reduce a group holds what it has
reduce-scattered so far. And a script may say what the next backward is to do only where that
changes, so those flags belong to the window too.

Only tensors and flags are kept, by path: torch itself numbers nothing before the first forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import strict
from trainckpt.state import values
from trainckpt.state.kinds.fsdp_units import (
    FLAGS,
    gathered,
    groups,
    held_by_path,
    parameters,
    paths,
    plain_path,
    rest,
    rest_group,
    self_test,
    units,
)

if TYPE_CHECKING:
    from torch import nn

    from trainckpt.state.captured import Captured, Saved

__all__ = ["apply", "capture", "differences", "gradient_bytes", "parameters", "plain_path", "rest",
           "self_test"]  # fmt: skip


def capture(module: nn.Module, name: str, out: Captured) -> dict[str, Any] | None:
    """FSDP2's part of the open window, or None without FSDP2. After `rest`.

    Raises:
        values.UnknownValue: a gradient lies over the ranks in an unknown way; by path.
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
    """What was sharded otherwise than it is now, one sentence each.

    Raises:
        UnusableSnapshot: `tree` is not what `capture` makes.
    """
    then = _held_then(tree or {})
    known = paths(module)
    now = {
        path: [sorted(held_by_path(group, known)) for group in groups(unit)]
        for path, unit in units(module).items()
    }
    full = {path: f"{name}/{path}" if path else name for path in then.keys() | now.keys()}
    found = [f"{full[path]} was sharded by itself, is not now" for path in then.keys() - now]
    found += [f"{full[path]} is sharded by itself now, was not" for path in now.keys() - then]
    found += [
        f"{full[path]} was sharded together with other parameters than now"
        for path in then.keys() & now.keys()
        if then[path] != now[path]
    ]
    return sorted(found)


def _held_then(tree: Any) -> dict[str, list[list[str]]]:
    """Unit -> of each group, the parameters in it."""
    what = "the state of FSDP2"
    if not isinstance(tree, dict):
        raise UnusableSnapshot(f"{what} is no object")
    return {
        path: [
            sorted(strict.field(group, "gradients", dict, what))
            for group in strict.field(unit, "groups", list, what)
        ]
        for path, unit in tree.items()
    }


def apply(module: nn.Module, tree: dict[str, Any] | None, saved: Saved) -> None:
    """Put the open window back, absent gradients included; leaves all sharded. Collective.

    What had been gathered is gathered once, for unsharded parameters to exist; and only that:
    by their absence torch tells what no forward has used.
    """
    here = units(module)
    for path, then in (tree or {}).items():
        for group in groups(here[path]):
            group.wait_for_unshard()  # a gather that is under way has the parameters of before
            rest_group(group)
        if then["gathered"] and not gathered(here[path]):
            here[path].unshard()
            here[path].reshard()
    known = paths(module)
    for path, then in (tree or {}).items():
        here[path]._get_fsdp_state()._state_ctx.is_last_backward = then["last_backward"]
        for group, group_then in zip(groups(here[path]), then["groups"], strict=True):
            _apply_group(group, known, group_then, saved)


def gradient_bytes(module: nn.Module) -> tuple[int, int]:
    """Bytes that `capture` will add on this rank at the next boundary, and at most. Any thread.

    Told from flags and sizes alone: to read `.grad` while another thread is in a backward
    corrupts torch's memory.
    """
    coming = possible = 0
    for unit in units(module).values():
        for group in groups(unit):
            policy = group.mp_policy
            for held in group.fsdp_params:
                if not held.sharded_param.requires_grad:
                    continue
                dtype = policy.reduce_dtype or policy.param_dtype or held.sharded_param.dtype
                whole = held._orig_size.numel() * dtype.itemsize
                possible += whole
                if not group.reduce_grads:
                    coming += whole
                elif not group.all_reduce_grads and group.mesh_info.replicate_mesh_dim is not None:
                    coming += held.padded_sharded_param_size.numel() * dtype.itemsize
    return coming, possible


def _capture_group(group: Any, known: dict[int, str], prefix: str, out: Captured) -> dict[str, Any]:
    held, partial = held_by_path(group, known), group._partial_reduce_output
    name = f"{prefix}/{next(iter(held), '')}#partial"  # by its first parameter
    return {
        "flags": {flag: bool(getattr(group, flag)) for flag in FLAGS},
        "gradients": {
            path: {
                kind: _capture_gradient(gradient, f"{prefix}/{path}#{kind}", out)
                for kind, gradient in _gradients(one).items()
                if gradient is not None
            }
            for path, one in held.items()
        },
        "partial": None if partial is None else out.add(name, partial),
    }


def _apply_group(group: Any, known: dict[int, str], then: dict[str, Any], saved: Saved) -> None:
    for flag in FLAGS:
        setattr(group, flag, then["flags"][flag])
    node = then["partial"]
    group._partial_reduce_output = None if node is None else saved.tensor(node, group.device)
    for path, held in held_by_path(group, known).items():
        nodes = then["gradients"][path]
        unsharded = getattr(held, "_unsharded_param", None)
        made = {kind: _saved_gradient(node, unsharded, saved) for kind, node in nodes.items()}
        if unsharded is not None:
            unsharded.grad = made.get("unsharded")
        held.unsharded_accumulated_grad = made.get("accumulated")


def _gradients(held: Any) -> dict[str, torch.Tensor | None]:
    unsharded = getattr(held, "_unsharded_param", None)
    return {
        "unsharded": None if unsharded is None else unsharded.grad,
        "accumulated": held.unsharded_accumulated_grad,
    }


def _local(gradient: Any) -> torch.Tensor:
    """This rank's part; with tensor parallelism underneath, gradients are DTensors."""
    local = getattr(gradient, "_local_tensor", gradient)
    wait = getattr(local, "wait", None)  # of one that is still being communicated
    found: torch.Tensor = local if wait is None else wait()
    return found


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
    """A gradient as it was, on the device and the ranks of the unsharded parameter."""
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
    """A DTensor's placement along one dimension of its mesh: a word, and what it is said of."""
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

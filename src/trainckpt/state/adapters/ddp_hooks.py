"""Restore the state of DDP's communication hooks.

Torch's own PowerSGD and post-local SGD are restored: the number of backwards, the generator, and
the bucketwise errors and starting points. Other hooks are unknown: the script must track their
state, or a resume reports that it is not bitwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trainckpt.state.captured import Captured, Saved

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_KEPT = {
    f"{_HOOKS}powerSGD_hook.PowerSGDState": (
        "rng",
        "error_dict",
        "p_memory_dict",
        "q_memory_dict",
        "iter",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "next_stats_report",
    ),
    f"{_HOOKS}post_localSGD_hook.PostLocalSGDState": ("iter",),
}
_RNG = "rng"  # a numpy.random.RandomState, stored as its state
_NOT_KEPT = ("weakref", f"{_HOOKS}mixed_precision_hooks")  # a DDP itself; state of one backward
_STATELESS = (type(None), bool, int, float, str, torch.device, torch.dtype)


def capture(module: nn.Module, path: str, out: Captured) -> list[dict[str, Any]]:
    """Return each known hook state of a DDP, encoded; its tensors are added under `path`."""
    return [
        {
            "kind": kind,
            "state": {
                name: out.encode(_read(state, name), f"{path}/{number}.{name}")
                for name in _KEPT[kind]
            },
        }
        for number, (kind, state) in enumerate(_known(module))
    ]


def apply(module: nn.Module, hooks: list[dict[str, Any]], saved: Saved) -> bool:
    """Restore hook states; False if the DDP has other hooks than then."""
    known = _known(module)
    if [kind for kind, _ in known] != [then["kind"] for then in hooks]:
        return False
    device = next((parameter.device for parameter in module.parameters()), None)
    for (kind, state), then in zip(known, hooks, strict=True):
        for name in _KEPT[kind]:
            _write(state, name, saved.decode(then["state"][name], device))
    return True


def problems(module: nn.Module, name: str, tracks: Callable[[object], bool]) -> list[str]:
    """Return a sentence for each untracked hook state; `tracks`: True for tracked objects."""
    return [
        f"{name} is in a DDP whose communication hook has a state, a {type(state).__qualname__}, "
        "that is not kept; give it state_dict and load_state_dict, and track it as well"
        for state in _states(module)
        if not (_kind(state) in _KEPT or _is_stateless(state) or tracks(state))
    ]


def _known(module: nn.Module) -> list[tuple[str, Any]]:
    return [(kind, state) for state in _states(module) if (kind := _kind(state)) in _KEPT]


def _states(module: nn.Module) -> list[Any]:
    """Return each state once: several hooks may share one."""
    hooks = getattr(module, "_comm_hooks", None) or ()
    return list({id(state): state for _, state in hooks}.values())


def _kind(state: object) -> str:
    return f"{type(state).__module__}.{type(state).__qualname__}"


def _is_stateless(state: object) -> bool:
    known = isinstance(state, (*_STATELESS, torch.distributed.ProcessGroup))
    return known or type(state).__module__ in _NOT_KEPT


def _read(state: Any, name: str) -> Any:
    value = getattr(state, name)
    return value.get_state() if name == _RNG else value


def _write(state: Any, name: str, value: Any) -> None:
    if name == _RNG:
        state.rng.set_state(value)
    else:
        setattr(state, name, value)

"""Capture and restore this rank's random generators: Python, NumPy, torch on CPU and devices.

Devices are stored by role, since their numbers depend on the devices visible to a process:

    cuda          the first device with tracked state, or else the current one
    cuda_1, ...   further devices with tracked state, in the order of their first parameter
    cuda:3        another visible device, by its number, if the process has drawn from it

Older releases stored every visible device by its number. Generators are restored last of all, after
anything with possible draws. trainckpt never draws from or reseeds a global generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainckpt.data import randomness

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.state.captured import Captured, Saved

PART = "rng"
KINDS = ("cuda", "xpu")


class _Plan(NamedTuple):
    """The states to set by device, and a sentence for each saved state without one."""

    targets: dict[torch.device, torch.Tensor]
    lost: list[str]


def capture(
    out: Captured,
    devices: Callable[[], Sequence[torch.device]],
    modules: Mapping[str, Any] | None = None,
) -> None:
    """Add the state of every generator of this process.

    `devices` returns those with tracked state, in the order of the first parameter on each.
    `modules`: kind of device -> `torch.cuda` or its like; None: torch's own.
    """
    state: dict[str, Any] = dict(randomness.main_rng())
    for kind, module in (_modules() if modules is None else modules).items():
        if not module.is_initialized():
            continue
        visible = [torch.device(kind, index) for index in range(module.device_count())]
        states = {device: module.get_rng_state(device) for device in visible}
        drawn = [device for device in visible if _was_drawn_from(states[device])]
        held = [device for device in devices() if device.type == kind]
        if held or drawn:
            own = _own(kind, module, held)
            state |= {_role(kind, at): states[device] for at, device in enumerate(own)}
            state |= {str(device): states[device] for device in drawn if device not in own}
    out.values[PART] = {key: out.encode(value, f"{PART}/{key}") for key, value in state.items()}


def apply(
    saved: Saved, devices: Sequence[torch.device], modules: Mapping[str, Any] | None = None
) -> None:
    """Restore every generator with a device here; `not_put_back` names the others."""
    main, of_devices = _stored(saved)
    for kind, module in (_modules() if modules is None else modules).items():
        plan = _plan(kind, module, of_devices[kind], devices)
        for device, state in plan.targets.items():
            module.set_rng_state(state, device)
    randomness.set_main_rng(main)


def not_put_back(
    saved: Saved, devices: Sequence[torch.device], modules: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a sentence for each generator not restorable by `apply`."""
    modules = _modules() if modules is None else modules
    lost: list[str] = []
    for kind, stored in _stored(saved)[1].items():
        if kind in modules:
            lost += _plan(kind, modules[kind], stored, devices).lost
        elif stored:
            lost.append(f"the {kind} random generator was saved, and no {kind} device is here")
    return lost


def _stored(saved: Saved) -> tuple[dict[str, Any], dict[str, dict[str, torch.Tensor]]]:
    """Return the states of the main generators, and those of each kind of device, by key."""
    state = {key: saved.decode(tree) for key, tree in saved.values[PART].items()}
    of_devices = {
        kind: {key: state.pop(key) for key in tuple(state) if key.startswith(kind)}
        for kind in KINDS
    }
    return state, of_devices


def _plan(
    kind: str, module: Any, stored: dict[str, torch.Tensor], devices: Sequence[torch.device]
) -> _Plan:
    if not stored:
        return _Plan({}, [])
    own = _own(kind, module, [device for device in devices if device.type == kind])
    visible = [torch.device(kind, index) for index in range(module.device_count())]
    numbered = {torch.device(key): state for key, state in stored.items() if ":" in key}
    if kind not in stored:
        return _plan_of_old(kind, numbered, own, visible)
    roles = (_role(kind, at) for at in range(len(stored)))
    states = [stored[role] for role in roles if role in stored]
    plan = _Plan(dict(zip(own, states, strict=False)), [])
    if len(states) != len(own):
        plan.lost.append(
            f"this rank trained on {len(states)} {kind} devices, and now on "
            f"{len(own)}: not each has its random generator back"
        )
    for device, state in numbered.items():
        if device in visible and device not in own:
            plan.targets[device] = state
        else:
            plan.lost.append(
                f"the random generator of {device}, which holds no tracked state, was "
                "drawn from, and there is no such other device here"
            )
    return plan


def _plan_of_old(
    kind: str,
    stored: dict[torch.device, torch.Tensor],
    own: Sequence[torch.device],
    visible: Sequence[torch.device],
) -> _Plan:
    """Assign by number if as many devices are visible as then; else assign those drawn from."""
    if len(stored) == len(visible):
        return _Plan(stored, [])
    states = list(stored.values())
    drawn = [state for state in states if _was_drawn_from(state)]
    if not drawn and all(torch.equal(state, states[0]) for state in states):
        drawn = states[:1] * len(own)  # equal seeds, as by torch.manual_seed
    if len(drawn) == len(own):
        return _Plan(dict(zip(own, drawn, strict=True)), [])
    why = f"which of {len(stored)} saved {kind} random generators was this rank's is not known"
    return _Plan({}, [why])


def _own(kind: str, module: Any, held: Sequence[torch.device]) -> list[torch.device]:
    """Return the devices with a role, at least one.

    Before the first use by the script it has no number: it will be the current device.
    """
    own = list(held) or [torch.device(kind)]
    if module.is_initialized():
        current = module.current_device()
        own = [torch.device(kind, current if d.index is None else d.index) for d in own]
    return list(dict.fromkeys(own))


def _role(kind: str, at: int) -> str:
    return f"{kind}_{at}" if at else kind


def _was_drawn_from(state: torch.Tensor) -> bool:
    """Return True if a Philox state was used: 8 bytes of seed, then 8 of draws since."""
    return bool(state[-8:].any())


def _modules() -> dict[str, Any]:
    found = {kind: getattr(torch, kind, None) for kind in KINDS}
    return {kind: m for kind, m in found.items() if m is not None and m.is_available()}

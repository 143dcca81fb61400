"""Random number generators of this rank: Python, NumPy, torch on the CPU and every device.

Restored last of all, after everything that may draw from them. trainckpt never draws from or
reseeds a global generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data import randomness

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved

PART = "rng"


def capture(out: Captured) -> None:
    """Add the state of every generator that this process has used or could use."""
    state: dict[str, Any] = dict(randomness.main_rng())
    for kind, module in _device_modules():
        for index, value in enumerate(module.get_rng_state_all()):
            state[f"{kind}:{index}"] = value
    out.values[PART] = {key: out.encode(value, f"{PART}/{key}") for key, value in state.items()}


def apply(saved: Saved) -> None:
    """Put every generator back."""
    stored = saved.values[PART]
    main = {key: saved.decode(tree) for key, tree in stored.items() if ":" not in key}
    for kind, module in _device_modules():
        for key in stored:
            if key.startswith(f"{kind}:"):
                module.set_rng_state(saved.decode(stored[key]), int(key.split(":")[1]))
    randomness.set_main_rng(main)


def _device_modules() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            found.append((kind, module))
    return found

"""Ways to break a resume: each leaves one kind of state as the fresh process has it.

What is saved and what the proof records is left alone; only the way back is cut. Each function
runs in the process to be broken, before its Checkpointer is made.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainckpt.data import sampler, worker
from trainckpt.state import apply
from trainckpt.state.adapters import rng

if TYPE_CHECKING:
    from collections.abc import Callable


def without(name: str) -> None:
    """Leave one step of the restore out."""
    assert name in [step[0] for step in apply.STEPS]
    apply.STEPS = tuple(step for step in apply.STEPS if step[0] != name)


def after(name: str, more: Callable[[Any, Any], None]) -> None:
    """Do something more right after one step."""

    def both(then: Callable[[Any, Any], None], registry: Any, saved: Any) -> None:
        then(registry, saved)
        more(registry, saved)

    apply.STEPS = tuple(
        (step[0], partial(both, step[1]), *step[2:]) if step[0] == name else step
        for step in apply.STEPS
    )


def without_main_rng(kind: str) -> None:
    """All generators of the main process but one."""
    original = rng.apply

    def but_one(saved: Any, devices: Any) -> None:
        kept = {key: tree for key, tree in saved.values[rng.PART].items() if key != kind}
        original(replace(saved, values={**saved.values, rng.PART: kept}), devices)

    rng.apply = but_one


def without_worker_rng(kind: str) -> None:
    """All generators of the workers but one; they are forked, so they see this."""
    original = worker.set_main_rng
    worker.set_main_rng = lambda state: original({k: v for k, v in state.items() if k != kind})


def rng_first() -> None:
    """The generators come back before everything else, and not again right before the batch."""
    original = rng.apply
    came_back: list[bool] = []

    def on_entering(registry: Any, saved: Any) -> None:
        if not came_back:
            came_back.append(True)
            original(saved, registry.devices())

    apply.STEPS = (("RNG", on_entering), *apply.STEPS)
    rng.apply = lambda saved, devices: None


def moments_as_torch_loads_them() -> None:
    """What `Optimizer.load_state_dict` does: state takes the type of its parameter."""

    def reload(registry: Any, saved: Any) -> None:
        for optimizer in registry.optimizers:
            optimizer.optimizer.load_state_dict(optimizer.optimizer.state_dict())

    after("optimizers", reload)


def buffers_of_rank_0() -> None:
    """What wrapping in DDP after loading does: every rank gets the buffers of rank 0."""

    def broadcast(registry: Any, saved: Any) -> None:
        for model in registry.models:
            for _, buffer in model.module.named_buffers():
                dist.broadcast(buffer, 0)

    after("buffers", broadcast)


def without_sampler(integer: str) -> None:
    """A sampler keeps its own seed or epoch."""
    original = sampler.restore

    def but_one(loader: Any, saved: Any) -> None:
        kept = {k: v for k, v in saved["integers"].items() if not k.endswith(f".{integer}")}
        original(loader, {**saved, "integers": kept})

    sampler.restore = but_one


KINDS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    **{name: partial(without, name) for name, *_ in apply.STEPS},
    **{f"{kind} RNG": partial(without_main_rng, kind) for kind in ("python", "numpy", "torch")},
    **{
        f"{kind} RNG of workers": partial(without_worker_rng, kind)
        for kind in ("python", "numpy", "torch")
    },
    "RNG last": rng_first,
    "moments' type": moments_as_torch_loads_them,
    "rank-local buffers": buffers_of_rank_0,
    "sampler seed": partial(without_sampler, "seed"),
}

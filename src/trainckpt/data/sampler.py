"""What decides the order of a DataLoader's data: its samplers and its own generator.

Kept of them: the state of each distinct torch.Generator, the integers `seed` and `epoch` of each
sampler, and the state_dict of samplers that have one. With the main process's randomness from just
before the iterator was made this fixes the order, for torch's samplers and for every sampler that
is a pure function of these. What else `unproven` ones hold is looked at (carried.py, own_random.py)
and the order that they draw again is compared (sources.py). A state_dict may be
what the sampler works with, and what it is given it may work on: both ways it is copied.

Used by: sources.py, dealing.py; `set_epoch` by whoever runs the epochs.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from trainckpt.data.own_state import has_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

_INTEGERS = ("seed", "epoch", "initial_seed")
# Of frameworks: read, and seen to be pure functions of what is kept here.
_PURE = frozenset(
    {
        "accelerate.data_loader.BatchSamplerShard",
        "accelerate.data_loader.SeedableRandomSampler",
        "transformers.trainer_pt_utils.LengthGroupedSampler",
    }
)


def capture(loader: DataLoader[Any], *, stateful: bool = True) -> dict[str, Any]:
    """Return what decides the order of the next pass.

    Args:
        loader: The user's loader; nothing of it is changed.
        stateful: False leaves out state_dicts: read in mid-pass they hold a position, and loading
            that would shift the next pass.
    """
    samplers = dict(samplers_of(loader))
    return {
        "generators": {name: g.get_state() for name, g in _generators(loader)},
        "integers": {
            f"{name}.{key}": value
            for name, sampler in samplers.items()
            for key, value in _integers(sampler)
        },
        "samplers": {
            name: copy.deepcopy(sampler.state_dict())
            for name, sampler in samplers.items()
            if stateful and has_state(sampler)
        },
    }


def restore(loader: DataLoader[Any], saved: dict[str, Any]) -> None:
    """Put back what `capture` returned; what this loader lacks is left to `differences`."""
    for name, generator in _generators(loader):
        if name in saved["generators"]:
            generator.set_state(saved["generators"][name])
    for name, sampler in samplers_of(loader):
        for key, now in _integers(sampler):
            value = saved["integers"].get(f"{name}.{key}", now)
            if value != now:
                setattr(sampler, key, value)
        if name in saved["samplers"] and has_state(sampler):
            sampler.load_state_dict(copy.deepcopy(saved["samplers"][name]))


def samplers_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Return the samplers a loader's order can depend on, each once, by name."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    own = getattr(loader, "sampler", None) if batch_sampler is None or inner is not None else None
    named = {"sampler": own, "batch sampler's sampler": inner, "batch sampler": batch_sampler}
    if isinstance(own, BatchSampler):  # batch_size=None: whole index lists go to the dataset
        named["sampler's sampler"] = getattr(own, "sampler", None)
        batch_sampler = own
    dealt = getattr(batch_sampler, "batch_sampler", None)  # one that deals another's over ranks
    if dealt is not None:
        named["dealt batch sampler"] = dealt
        named["dealt batch sampler's sampler"] = getattr(dealt, "sampler", None)
    return _distinct(named)


def parts(saved: dict[str, Any]) -> set[str]:
    """Return the names of what a capture holds."""
    return {name for group in saved.values() for name in group}


def unproven(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the samplers of kinds that are not known and that have no state_dict, by name."""
    return {
        name: sampler
        for name, sampler in samplers_of(loader)
        if not _is_known(type(sampler)) and not has_state(sampler)
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the attributes that differ, of those that `capture` does not hold."""
    return sorted(
        path
        for path, value in after.items()
        if before.get(path, value) != value and not _is_captured(path)
    )


def _is_captured(path: str) -> bool:
    root, _, attribute = path.partition(".")
    return root != "dataset" and attribute in _INTEGERS


def _is_known(kind: type[Any]) -> bool:
    if kind in (list, tuple, range) or kind.__module__ == "numpy":  # the same in every pass
        return True
    module = kind.__module__
    return module.startswith("torch.") or f"{module}.{kind.__qualname__}" in _PURE


def length(thing: Any) -> int | None:
    """Return len(thing), None where it has no length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _generators(loader: DataLoader[Any]) -> Iterator[tuple[str, torch.Generator]]:
    named = {"loader": loader.generator}
    named.update(
        {name: getattr(sampler, "generator", None) for name, sampler in samplers_of(loader)}
    )
    return ((n, g) for n, g in _distinct(named) if isinstance(g, torch.Generator))


def _distinct(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name, thing in named.items():
        if thing is not None and id(thing) not in seen:
            seen.add(id(thing))
            yield name, thing


def _integers(sampler: Any) -> Iterator[tuple[str, int]]:
    for key in _INTEGERS:
        value = getattr(sampler, key, None)
        if isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the loader's samplers the epoch, those that want to know."""
    batch_sampler, own = getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)
    samplers = (
        own,
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(own, "sampler", None) if isinstance(own, BatchSampler) else None,
    )
    told: set[int] = set()
    for sampler in samplers:
        tell = getattr(sampler, "set_epoch", None)
        if callable(tell) and id(sampler) not in told:
            told.add(id(sampler))
            tell(epoch)

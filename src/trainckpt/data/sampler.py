"""Capture and restore the inputs of a DataLoader's order: its samplers and its own generator.

A capture has the state of each distinct torch.Generator, the integers `seed` and `epoch` of each
sampler, and the samplers' state_dicts. Together with the main randomness from just before the
iterator was made, a capture fixes the order for torch's samplers, and for every sampler that is a
pure function of these. Other attributes of such samplers are inspected (carried_state.py,
randomness.py), and the order drawn again is compared (sources.py). A state_dict may be a
sampler's working data, and a loaded one may become that: both ways it is copied.
"""

from __future__ import annotations

import copy
import types
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler

from trainckpt.data import carried_state
from trainckpt.data.known_streams import is_pass_number
from trainckpt.data.state_dict_methods import has_state

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import DataLoader

_INTEGERS = ("seed", "epoch", "initial_seed")
# Frameworks' samplers known, from their source, to be pure functions of a capture.
_PURE = frozenset(
    {
        "accelerate.data_loader.BatchSamplerShard",
        "accelerate.data_loader.SeedableRandomSampler",
        "transformers.trainer_pt_utils.LengthGroupedSampler",
    }
)


def capture(loader: DataLoader[Any], *, stateful: bool = True) -> dict[str, Any]:
    """Return the inputs of the next pass's order.

    Args:
        loader: The user's loader; nothing in it is changed.
        stateful: False leaves out state_dicts: in mid-pass they hold a position, and loading it
            would shift the next pass.
    """
    samplers = dict(samplers_of(loader))
    return {
        "generators": {name: g.get_state() for name, g in _generators(loader)},
        "integers": {
            f"{name}.{key}": value
            for name, sampler in samplers.items()
            for key, value in _integers(sampler)
        },
        "samplers": states(loader) if stateful else {},
    }


def states(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the state_dicts of the samplers that have one, by name."""
    return {
        name: copy.deepcopy(sampler.state_dict())
        for name, sampler in samplers_of(loader)
        if has_state(sampler)
    }


def load_states(loader: DataLoader[Any], saved: dict[str, Any]) -> None:
    """Load the result of `states`."""
    for name, sampler in samplers_of(loader):
        if name in saved and has_state(sampler):
            sampler.load_state_dict(copy.deepcopy(saved[name]))


def restore(loader: DataLoader[Any], saved: dict[str, Any]) -> None:
    """Put back the result of `capture`; parts missing in this loader are left to `differences`."""
    for name, generator in _generators(loader):
        if name in saved["generators"]:
            generator.set_state(saved["generators"][name])
    for name, sampler in samplers_of(loader):
        for key, now in _integers(sampler):
            value = saved["integers"].get(f"{name}.{key}", now)
            if value != now:
                setattr(sampler, key, value)
    load_states(loader, saved["samplers"])


def is_stateless(iterator: Any) -> bool:
    """Return True for a sampler's generator that keeps only numbers from one yield to the next."""
    if not isinstance(iterator, types.GeneratorType):
        return False
    frame = iterator.gi_frame
    if frame is None:
        return True
    values = [value for name, value in frame.f_locals.items() if name != "self"]
    if str(frame.f_globals.get("__name__")).startswith("torch."):  # holds the batch it has yielded
        return all(is_stateless(value) for value in values if hasattr(value, "__next__"))
    return all(value is None or type(value) in (bool, int, float, str) for value in values)


def samplers_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield each sampler that can affect a loader's order once, with its name."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner = getattr(batch_sampler, "sampler", None)
    named: dict[str, Any] = {"batch sampler's sampler": inner, "batch sampler": batch_sampler}
    if batch_sampler is None or inner is not None:
        named = {"sampler": getattr(loader, "sampler", None), **named}
    if isinstance(named.get("sampler"), BatchSampler):  # batch_size=None: index lists are samples
        batch_sampler = named["sampler"]
        named["sampler's sampler"] = batch_sampler.sampler
    # a wrapper that shares another one's batches among ranks
    wrapped = getattr(batch_sampler, "batch_sampler", None)
    if wrapped is not None:
        named["dealt batch sampler"] = wrapped
        named["dealt batch sampler's sampler"] = getattr(wrapped, "sampler", None)
    return _distinct(named)


def part_names(saved: dict[str, Any]) -> set[str]:
    """Return the names of all parts in a capture."""
    return {name for group in saved.values() for name in group}


def unknown_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the samplers of unknown kinds without a state_dict, by name."""
    return {
        name: sampler
        for name, sampler in samplers_of(loader)
        if not _is_known(type(sampler)) and not has_state(sampler)
    }


def inputs(loader: Any) -> dict[str, Any]:
    """Return the plain attributes of the samplers without a state_dict, such as `weights`.

    A script may assign them as it trains; what it assigned is not in a capture.
    """
    samplers = {name: one for name, one in samplers_of(loader) if not has_state(one)}
    found = carried_state.plain_attributes(samplers)
    return {path: value for path, value in found.items() if not _is_captured(path, None)}


def changed(before: dict[str, tuple[type, Any]], after: dict[str, tuple[type, Any]]) -> list[str]:
    """Return the attributes that differ, except those restored; path -> type and digest."""
    return sorted(
        path
        for path, value in after.items()
        if before.get(path, value) != value and not _is_captured(path, value[0])
    )


def _is_captured(path: str, kind: type | None) -> bool:
    root, _, attribute = path.partition(".")
    if root.startswith("dataset"):
        return is_pass_number(path, kind)
    return attribute in _INTEGERS


def _is_known(kind: type[Any]) -> bool:
    if kind in (list, tuple, range) or kind.__module__ == "numpy":  # the same in every pass
        return True
    module = kind.__module__
    return module.startswith("torch.") or f"{module}.{kind.__qualname__}" in _PURE


def length(thing: Any) -> int | None:
    """Return len(thing), or None without a length."""
    try:
        return len(thing)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _generators(loader: DataLoader[Any]) -> Iterator[tuple[str, torch.Generator]]:
    samplers = {name: getattr(one, "generator", None) for name, one in samplers_of(loader)}
    generators = _distinct({"loader": loader.generator, **samplers})
    return ((name, one) for name, one in generators if isinstance(one, torch.Generator))


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
    """Call `set_epoch` of each of the loader's samplers that has it."""
    for name, sampler in samplers_of(loader):
        set_sampler_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_sampler_epoch) and not name.startswith("dealt"):  # by its wrapper
            set_sampler_epoch(epoch)

"""Read the script's values at a start, besides its optimizers' options, and put them in place.

given_by_script     before anything is restored: JSON values, for the comparison and the record
with_commit         once a snapshot is chosen, where another commit is refused
without_progress    once a snapshot is chosen: what training has moved is the script's no more
take_from_script    before the snapshot is applied: the script's values replace saved ones
set_dropouts        the reverse for dropout, which is in no `state_dict`
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.attempt import git_commit, launch
from trainckpt.errors import TrainckptError
from trainckpt.format import changes as kinds
from trainckpt.format.changes import SCRIPT
from trainckpt.state import values
from trainckpt.state.adapters.fsdp import plain_path
from trainckpt.state.adapters.optimizer import scaled
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.attempt.options import Options
    from trainckpt.state.adapters.optimizer import OptimizerState
    from trainckpt.state.adapters.stateful import GenericState
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry

CLASS = " (class)"
GIT_WAIT_S = 0.1  # at a start: git names most commits in less
_RATES = ("base_lrs", "_last_lr")  # of a schedule: they follow the optimizer's learning rate
_COUNTS = ("last_epoch", "_step_count")
_INDEX = re.compile(r"\.\d+(?=\.|$)")


def given_by_script(
    registry: Registry, options: Options, commit: GitCommit | None
) -> dict[str, Any]:
    """Return what the script gives, as JSON values. Call it before anything is restored.

    Args:
        registry: The tracked state.
        options: Of the user.
        commit: Rank 0's; left out if git has not named it yet.
    """
    given: dict[str, Any] = {
        kinds.ACCUMULATION: options.accumulate,
        kinds.DROPOUT: {name: _one_or_all(found) for name, found in _dropouts(registry).items()},
        kinds.SCHEDULE: _schedule_numbers(registry),
    }
    if commit is not None:
        given[kinds.ARGUMENTS] = launch.script_arguments()
        if commit.is_known_within(GIT_WAIT_S):
            given[kinds.GIT_COMMIT] = commit.value
    return given


def with_commit(given: Mapping[str, Any], commit: GitCommit) -> dict[str, Any]:
    """Wait for git as long as git may take, and return what the script gives with its commit."""
    if kinds.GIT_COMMIT not in given:
        commit.is_known_within(git_commit.TIMEOUT_S)
    return {**given, kinds.GIT_COMMIT: commit.value}


def mapping(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the table of this name among recorded facts; empty if there is none."""
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value; of a schedule of another class, the class alone."""
    names = [name for name in then if name in now and then[name] != now[name]]
    others = tuple(f"{name.removesuffix(CLASS)}." for name in names if name.endswith(CLASS))
    for name in names:
        if not (others and name.startswith(others)):
            yield name, then[name], now[name]


def without_progress(
    registry: Registry, saved: Saved, then: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers of the schedules as given, those that training moves as they were then.

    They differ where a second attempt in one process has the objects of the first.
    """
    numbers = dict(given)
    for generic in _schedules(registry):
        if not _innermost(_scheduler(generic).optimizer).state or generic.name not in saved.values:
            continue
        for path, holder, key in _leaves(saved.values, generic.name, generic.name):
            if path in then and (path.endswith(_COUNTS) or holder[key] != then[path]):
                numbers[path] = then[path]
    return numbers


def take_from_script(
    registry: Registry, saved: Saved, then: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Put the script's options and schedule numbers into `saved`, where they count."""
    for optimizer in registry.optimizers:
        rates = optimizer.take_from_script(saved, registry.choices)
        if rates:
            _move_base_rates(registry, saved, optimizer, rates)
    if registry.choices[kinds.SCHEDULE] != SCRIPT:
        return
    numbers = {
        name: new
        for name, _, new in differing(mapping(then, kinds.SCHEDULE), given[kinds.SCHEDULE])
    }
    for generic in _schedules(registry):
        if generic.name in saved.values:
            for path, holder, key in list(_leaves(saved.values, generic.name, generic.name)):
                if path in numbers:
                    holder[key] = numbers[path]


def _move_base_rates(
    registry: Registry,
    saved: Saved,
    optimizer: OptimizerState,
    rates: Mapping[int, tuple[float, float]],
) -> None:
    """Let the schedules of this optimizer begin from the script's learning rates."""
    for generic in _schedules(registry):
        driven = _innermost(_scheduler(generic).optimizer)
        if driven is not _innermost(optimizer.optimizer) or generic.name not in saved.values:
            continue
        for path, holder, key in list(_leaves(saved.values, generic.name, generic.name)):
            if not path.endswith(_RATES):
                continue
            listed = saved.decode(holder[key])
            for group, (old, new) in rates.items():
                if isinstance(listed, list) and group < len(listed):
                    listed[group] = scaled(listed[group], old, new)
            holder[key] = values.encode(listed, path, lambda name, _: name)


def _innermost(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


# ---- schedules: the numbers in the state_dict of a schedule just made are those of the script


def _schedules(registry: Registry) -> list[GenericState]:
    return [each for each in registry.generics if _scheduler(each) is not None]


def _scheduler(generic: GenericState) -> Any:
    """Return torch's scheduler, also the one inside a wrapper such as accelerate's."""
    for target in (generic.target, getattr(generic.target, "scheduler", None)):
        if isinstance(target, torch.optim.lr_scheduler.LRScheduler):
            return target
    return None


def _schedule_numbers(registry: Registry) -> dict[str, Any]:
    """Return path -> encoded value, and the class of each schedule."""
    found: dict[str, Any] = {}
    for generic in _schedules(registry):
        live = Captured()
        with suppress(TrainckptError):  # named by the first save
            generic.capture(live)
            found[f"{generic.name}{CLASS}"] = type(_scheduler(generic)).__name__
            found |= {
                path: holder[key]
                for path, holder, key in _leaves(live.values, generic.name, generic.name)
                if not path.endswith(_RATES)
            }
    return found


def _leaves(holder: Any, key: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, container and key of each encoded value without names in it, and no tensor."""
    node = holder[key]
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        for number in range(len(node)):
            yield from _leaves(node, number, f"{path}.{number}")
    elif isinstance(node, dict) and "$" not in node and "$tensor" not in node:
        for name in node:  # "plain" and "live" parts of a state_dict with objects
            yield from _leaves(node, name, path if name in ("plain", "live") else f"{path}.{name}")
    elif isinstance(node, dict) and node.get("$") == "dict" and _has_names(node["of"]):
        for pair in node["of"]:
            yield from _leaves(pair, 1, f"{path}.{pair[0]}")
    elif "$tensor" not in str(node):
        yield path, holder, key


def _has_names(pairs: list[Any]) -> bool:
    return bool(pairs) and all(isinstance(pair[0], str) for pair in pairs)


# ---- dropout: in no state_dict, so the script's counts by itself


def _dropouts(registry: Registry) -> dict[str, list[float]]:
    """Return name -> rates, with "*" for the numbers of layers: few names, however many layers."""
    found: dict[str, list[float]] = {}
    for name, part, key in _dropout_places(registry):
        found.setdefault(name, []).append(vars(part)[key])
    return found


def _dropout_places(registry: Registry) -> Iterator[tuple[str, nn.Module, str]]:
    for model in registry.models:
        for path, part in model.module.named_modules():
            is_layer = "drop" in type(part).__name__.lower()
            for key in ("p", "dropout"):
                value = vars(part).get(key)
                if type(value) in (int, float) and (is_layer or key == "dropout"):
                    name = ".".join(filter(None, (model.name, plain_path(path), key)))
                    yield _INDEX.sub(".*", name), part, key


def set_dropouts(registry: Registry, then: Mapping[str, Any]) -> None:
    """Set the rates that the script gave then, by the names of `given_by_script`."""
    seen: dict[str, int] = {}
    for name, part, key in list(_dropout_places(registry)):
        number = seen[name] = seen.get(name, -1) + 1
        rates = then.get(name)
        rate = rates[number] if isinstance(rates, list) and number < len(rates) else rates
        if type(rate) in (int, float):
            setattr(part, key, rate)


def _one_or_all(rates: list[float]) -> float | list[float]:
    return rates[0] if len(set(rates)) == 1 else rates

"""Refuse what no save could store; warn about tracked objects that a save cannot be useful for.

`check_storable` runs at the first boundary, and at the first one after a step.

`TrackedNamesCheck` warns at the first save whose names or parameter groups differ from those at the
start: a later resume of the script may not find them.

`StaleModelCheck` warns if a model does not change between saves although its optimizer takes some
steps. A script that tracks a copy, or wraps the model anew after tracking it, trains one model and
saves the other.

`UntrackedOptimizers` reports an optimizer that trains and is not tracked, as after a script has
made its model or optimizer anew: no save holds what it trains.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError
from trainckpt.format.digest import compact
from trainckpt.format.exactness import How, Restored
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.save.estimates import weigh
from trainckpt.state.adapters.optimizer import cannot_be_added, inner_optimizers
from trainckpt.state.capture import must_be_storable
from trainckpt.state.step_hooks import counted_optimizer, untraced
from trainckpt.storage.fs_probe import free_bytes
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.attempt.save_handle import CommitEvent
    from trainckpt.format.shard_file import ShardHeader
    from trainckpt.ranks.store import RankStore
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import RunTier


def check_storable(
    channel: RankStore,
    registry: Registry,
    tier: RunTier,
    *,
    at_first: bool,
    is_resumed: bool,
    excludes: bool,
) -> None:
    """Refuse a state that no save could store, and warn if the disk lacks room for it.

    All ranks pass the first boundary and refuse together. After it only the affected rank logs an
    error, since the others might wait for it in vain; the next save then fails on all, with the
    reason.

    `at_first`: this is the first boundary; `is_resumed`: of a resume. `excludes`: tensors are left
    out of saves, so their size is not known here.

    Raises:
        ConfigurationError: a tracked object's state cannot be stored; named in the message.
    """
    if at_first or channel.world.size == 1:
        check = partial(must_be_storable, registry, optimizers=not (at_first and is_resumed))
        gather_or_raise(channel, f"storable/{int(at_first)}", check, RANKS_TIMEOUT_S)
    else:
        try:
            must_be_storable(registry)
        except ConfigurationError as error:
            logger.error("no checkpoint can be saved: %s; next: %s", error.message, error.hint)
    if channel.world.rank != 0 or not isinstance(tier, LocalTier) or excludes:
        return
    with contextlib.suppress(OSError):
        needed, free = weigh(registry, gradients=False).state, free_bytes(tier.root)
        if 0 <= free < needed:
            logger.error(
                "%s has %.1f MB left, and a checkpoint needs %.1f MB: unless space is freed, "
                "nothing can be saved there",
                tier.url,
                free / 1e6,
                needed / 1e6,
            )


STALE_STEPS = 8  # of its optimizer: a warm-up may begin with a learning rate of 0
_TRAINS_AFTER, _REPLACES_AFTER = 2, 16  # micro-batches in which an untracked optimizer steps
CHECK_EVERY = 16  # saves: a walk over all modules takes milliseconds, and training waits


class TrackedNamesCheck:
    """Check of one rank's tracked names, attributes and parameter groups."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names = {m.name: {name for name, _ in m.parameters()} for m in registry.models}
        self._groups = {o.name: len(o.optimizer.param_groups) for o in registry.optimizers}
        self._logged: set[str] = set()
        self._num_checks = 0

    def check(self) -> None:
        """Check at the beginning of a save; log each difference once."""
        if self._num_checks % CHECK_EVERY == 0:
            self._check_names()
            self._check_attributes()
        self._num_checks += 1
        self._check_groups()

    def _check_names(self) -> None:
        for model in self._registry.models:
            begun, now = self._names[model.name], {name for name, _ in model.parameters()}
            if begun != now:
                changed = min(begun ^ now)
                how = "is new" if changed in now else "is gone"
                self._warn_once(
                    model.name,
                    f"the parameter names of {model.name} have changed since the run began "
                    f"({changed} {how}). A resume is refused unless the script builds the model "
                    "with the present names",
                )

    def _check_attributes(self) -> None:
        lost = set(self._registry.watched.changed_in_training())
        changed = sorted(lost - self._registry.callback_values.names() - self._logged)
        if changed:
            self._logged.update(changed)
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            logger.warning(
                "%s%s: changed since the run began, and in no state_dict, so a resume does not "
                "restore the present value: %s",
                ", ".join(changed[:3]),
                more,
                self._registry.watched.hint(changed),
            )

    def _check_groups(self) -> None:
        for optimizer in self._registry.optimizers:
            begun, live = self._groups[optimizer.name], optimizer.optimizer.param_groups
            if len(live) <= begun or optimizer.name in self._logged:
                continue
            names = self._registry.parameter_names()
            known = {id(p): name for p, name in optimizer.named(names)}
            added = [[known[id(p)] for p in group["params"]] for group in live[begun:]]
            why = cannot_be_added(live[:begun], added, names)
            if why:
                self._warn_once(
                    optimizer.name,
                    f"{optimizer.name} has {len(live)} parameter groups, and had {begun} when the "
                    f"run began: a resume cannot add them, since {why}. It is refused unless the "
                    "script adds them before it makes the Checkpointer",
                )

    def _warn_once(self, name: str, sentence: str) -> None:
        if name not in self._logged:
            self._logged.add(name)
            logger.warning("%s", sentence)


class StaleModelCheck:
    """Compares each save of this rank with the one before."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._before: tuple[int, dict[str, str]] | None = None
        self._logged: set[str] = set()
        self._steps: Counter[int] = Counter()  # of each optimizer that counts its steps
        self._steps_at: dict[int, dict[str, int]] = {}  # step of the run -> those of each model
        self._changed_at: dict[str, int] = {}  # model -> its steps at the last save that changed it
        for tracked in registry.optimizers:
            if (counted := counted_optimizer(tracked.optimizer)) is not None:
                counted.register_step_post_hook(untraced(partial(self._count, id(tracked))))

    def _count(self, optimizer: int, *_: object) -> None:
        self._steps[optimizer] += 1

    def note(self, step: int) -> None:
        """Note how often the optimizer of each model has stepped, as a save begins."""
        steps: dict[str, int] = {}
        for tracked in self._registry.optimizers:
            counts = counted_optimizer(tracked.optimizer) is not None
            taken = self._steps[id(tracked)] if counts else step
            for model in self._registry.models_of(tracked):
                steps[model] = max(taken, steps.get(model, 0))
        self._steps_at[step] = steps

    def on_commit(self, event: CommitEvent) -> None:
        """Check the committed save."""
        self.check(event.manifest.cursor.step, event.shard.header)

    def check(self, step: int, header: ShardHeader) -> list[str]:
        """Compare a committed save with the one before; return models newly found unchanged."""
        before, digests = self._before, self._trained(header)
        if before is not None:
            digests = {**{k: d for k, d in before[1].items() if k in header.references}, **digests}
        self._before = step, digests
        steps = self._steps_at.pop(step, {})
        for older in [at for at in self._steps_at if at < step]:
            del self._steps_at[older]
        if before is None or step <= before[0]:
            self._changed_at = steps if before is None else self._changed_at
            return []
        same = unchanged(before[1], digests)
        self._changed_at |= {name: taken for name, taken in steps.items() if name not in same}
        idle = {name: steps.get(name, 0) - self._changed_at.get(name, 0) for name in same}
        stale = [name for name in same if idle[name] >= STALE_STEPS and name not in self._logged]
        self._logged.update(stale)
        for name in stale:
            logger.warning(
                "%s has not changed in %d steps of its optimizer, not by one bit. Is the trained "
                "model another object?",
                name,
                idle[name],
            )
        return stale

    def _trained(self, header: ShardHeader) -> dict[str, str]:
        """Return region -> digest, for parameters that some tracked optimizer should change."""
        stepped = self._registry.stepped_parameters()
        names = {name for name, parameter in stepped.items() if parameter.requires_grad}
        return {r.key: compact(header.digests_of(r)) for r in header.regions if r.tensor in names}


class UntrackedOptimizers:
    """Reports the first optimizer that trains and is not tracked.

    Torch calls a hook after each step of any optimizer. One without state, such as plain SGD, has
    nothing to save, and one that steps within a single micro-batch is taken for part of an
    evaluation.
    """

    def __init__(
        self, registry: Registry, position: ProgressCounter, report: Callable[[Restored], None]
    ) -> None:
        """Watch until `close`. `report`: takes a fault."""
        self._registry, self._position, self._report = registry, position, report
        self._has_reported = False
        self._tracked: set[int] = {id(each.optimizer) for each in registry.optimizers}
        self._stepped_in: WeakKeyDictionary[torch.optim.Optimizer, set[int]] = WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(untraced(self._after_step))

    def close(self) -> None:
        """Stop watching."""
        self._hook.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._has_reported:
            return
        if id(optimizer) in self._tracked:
            self._stepped_in.clear()
        elif optimizer.state and not self._is_inner(optimizer):
            in_batches = self._stepped_in.setdefault(optimizer, set())
            if (number := self._position.cursor.micro_batches) in in_batches:
                return
            in_batches.add(number)
            if len(in_batches) == _TRAINS_AFTER:
                self._look_at(optimizer)
            elif len(in_batches) == _REPLACES_AFTER:
                self._say(
                    f"a {type(optimizer).__name__} that is not tracked takes the steps, and no "
                    "tracked optimizer does: the saves do not hold what it trains"
                )

    def _is_inner(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True for an optimizer inside a tracked one, which is kept with it."""
        tracked = (each.optimizer for each in self._registry.optimizers)
        inside = any(inner is optimizer for one in tracked for _, inner in inner_optimizers(one))
        if inside:
            self._tracked.add(id(optimizer))
        return inside

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        known = self._registry.parameter_names()
        names = [known.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]
        if found := sorted(filter(None, names)):
            more = f" and {len(found) - 2} more" if len(found) > 2 else ""
            self._say(
                f"a {type(optimizer).__name__} that is not tracked steps {', '.join(found[:2])}"
                f"{more}: no save holds its state"
            )

    def _say(self, fault: str) -> None:
        self._has_reported = True  # a hook cannot be removed while torch calls it
        advice = "make model and optimizer before the Checkpointer, once, and pass both"
        self._report(Restored("optimizers", How.NOT_KEPT, f"{fault} ({advice})"))


def unchanged(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return tracked names, sorted, with every region the same in both saves."""
    same: dict[str, bool] = {}
    for key in before.keys() & now.keys():
        name = key.partition("/")[0]
        same[name] = same.get(name, True) and before[key] == now[key]
    return sorted(name for name, is_same in same.items() if is_same)

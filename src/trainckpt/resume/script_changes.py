"""Compare what the script gives with what the snapshot had, and let the chosen values count.

    start of an attempt   what the script gives is read, before a resume overwrites it
    attempt's record      holds it under `script`, for the resumes from its snapshots
    resume                compares both, once a snapshot is chosen, on every rank. A difference of a
                          kind that is refused ends the attempt. Where the script's value counts, it
                          replaces the saved one in the state about to be applied: the first
                          application and the second, at the boundary, give the same
    rank 0                logs all differences as one table

The snapshot itself holds the options that the script gave its optimizers, and facts of its loaders
(`state.adapters`). A record of an older release has no `script`: that part is then not compared.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.attempt import git_commit, launch
from trainckpt.attempt.log import logger
from trainckpt.errors import StateMismatch, TrainckptError
from trainckpt.format import changes as kinds
from trainckpt.format.changes import (
    REFUSE,
    SCRIPT,
    SNAPSHOT,
    Change,
    table,
)
from trainckpt.format.exactness import How, Restored
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.snapshot import attempt_history
from trainckpt.state import values
from trainckpt.state.adapters.fsdp import plain_path
from trainckpt.state.adapters.optimizer import scaled
from trainckpt.state.captured import Captured

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.attempt.options import Options
    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.resume.report import ResumeReport
    from trainckpt.state.adapters.optimizer import OptimizerState
    from trainckpt.state.adapters.stateful import GenericState
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

FACT = "script"  # in the attempt's record
_RATES = ("base_lrs", "_last_lr")  # of a schedule: they follow the optimizer's learning rate
_CLASS = " (class)"
_LONGEST = 60  # characters of a value in the table
GIT_WAIT_S = 0.1  # at a start: git names most commits in less
_WINDOWS = 3  # trained until those of a window are known
_INDEX = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class ScriptChanges:
    """Differences between the script and its snapshot.

    Attributes:
        script: What the script gives, as it counts in this attempt, for its record.
        changes: The differences, of all ranks.
        accumulation: Micro-batches of a window in the attempt of the snapshot; None if unknown.
        commit: Git commit of the script in that attempt; None if unknown.
    """

    script: Mapping[str, Any]
    changes: tuple[Change, ...] = ()
    accumulation: Any = None
    commit: Any = None


def given_by_script(
    registry: Registry, options: Options, commit: GitCommit | None
) -> dict[str, Any]:
    """Return what the script gives, as JSON values. Call it before anything is restored.

    Args:
        registry: The tracked state.
        options: Of the user.
        commit: Rank 0's; left out if git has not named it yet, and its difference is not refused.
    """
    given: dict[str, Any] = {
        kinds.ACCUMULATION: options.accumulate,
        kinds.DROPOUT: {name: _one_or_all(found) for name, found in _dropouts(registry).items()},
        kinds.SCHEDULE: _schedule_numbers(registry),
    }
    if commit is not None:
        given[kinds.ARGUMENTS] = launch.script_arguments()
        refuses = registry.choices[kinds.GIT_COMMIT] == REFUSE
        if commit.is_known_within(git_commit.TIMEOUT_S if refuses else GIT_WAIT_S):
            given[kinds.GIT_COMMIT] = commit.value
    return given


def settle(
    *,
    tier: Tier,
    channel: RankStore,
    registry: Registry,
    saved: Saved,
    name: SnapshotName,
    given: Mapping[str, Any],
) -> ScriptChanges:
    """Compare the script with a snapshot, and let the chosen values count in `saved`.

    Every rank calls it, before anything is applied.

    Raises:
        StateMismatch: A difference is of a kind that is refused; lists all, on every rank alike.
    """
    recorded: Any = {}
    if channel.world.rank == 0:
        with suppress(TrainckptError):
            record = attempt_history.read_attempt(tier, name.attempt)
            recorded = record.facts.get(FACT) if record is not None else {}
    recorded = channel.gather("script then", recorded, RANKS_TIMEOUT_S)[0]
    then: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    own = _compare(registry, saved, then, given)
    everyone = channel.gather("changes", [each.to_json() for each in own], RANKS_TIMEOUT_S)
    found = tuple(dict.fromkeys(Change.from_json(each) for rank in everyone for each in rank))
    if any(change.used == REFUSE for change in found):
        refused = list(dict.fromkeys(each.kind for each in found if each.used == REFUSE))
        raise StateMismatch(
            f"the script differs from snapshot {name}, and {', '.join(refused)} may not",
            [change.sentence for change in found],
            hint="run the script as it was, or let its values count, where they can "
            f'(docs/options.md#changed): changed="{refused[0]}: script"',
        )
    _take_from_script(registry, saved, then, given)
    if registry.choices[kinds.DROPOUT] == SNAPSHOT:
        _set_dropouts(registry, _mapping(then, kinds.DROPOUT))
    script = dict(given)
    for kind in (kinds.DROPOUT, kinds.SCHEDULE):  # the next resume compares with what counts
        if registry.choices[kind] == SNAPSHOT:
            script[kind] = {**given[kind], **_mapping(then, kind)}
    return ScriptChanges(script, found, then.get(kinds.ACCUMULATION), then.get(kinds.GIT_COMMIT))


def restored(changes: Iterable[Change]) -> list[Restored]:
    """Return the changes by which the training differs from the uninterrupted one."""
    return [
        Restored(each.kind, How.NOT_KEPT, f"{each.sentence}, and the script's value counts")
        for each in changes
        if each.trains_otherwise
    ]


def log(changes: Sequence[Change]) -> None:
    """Log all changes as one table; as a warning unless none has to do with the training."""
    if not changes:
        return
    concerns_training = any(each.used == SNAPSHOT or each.trains_otherwise for each in changes)
    kept = list(dict.fromkeys(each.kind for each in changes if each.used == SNAPSHOT))
    hint = f'; to use the script\'s, pass changed="{kept[0]}: script"' if kept else ""
    logger.log(
        logging.WARNING if concerns_training else logging.INFO,
        "the script has changed since the snapshot; the last column says which value is used%s\n%s",
        hint,
        table(changes),
    )


class ObservedWindows:
    """Micro-batches of a window, as trained, where no option says them. Rank 0, training thread.

    Taken from the second and the third window of an attempt: the first may be the rest of one, and
    one of two in a row may be cut short by the end of an epoch.

    Attributes:
        is_over: They are known, and compared with those of the snapshot's attempt.
    """

    def __init__(
        self, script: ScriptChanges, record_writer: RecordWriter, report: ResumeReport, step: int
    ) -> None:
        self.is_over = script.script.get(kinds.ACCUMULATION) is not None
        self._script, self._record_writer, self._report = script, record_writer, report
        self._begun = self._step = step
        self._longest = 0

    def reach(self, step: int, window: int | None) -> None:
        """Note the window that ended with this step."""
        if step == self._step or window is None:
            return
        self._step = step
        if step > self._begun + 1:
            self._longest = max(self._longest, window)
        if step < self._begun + _WINDOWS:
            return
        self.is_over = True
        self._record_writer.keep_fact(FACT, kinds.ACCUMULATION, self._longest)
        then = self._script.accumulation
        if then is not None and then != self._longest:
            texts = _text(then), _text(self._longest)
            change = Change(kinds.ACCUMULATION, "micro-batches of a window", *texts, SCRIPT)
            log([change])
            self._report.note(restored([change]))


class ObservedCommit:
    """The git commit, where git named it after the start. Rank 0, training thread.

    Attributes:
        is_over: It is known, and compared with that of the snapshot's attempt.
    """

    def __init__(
        self, script: ScriptChanges, record_writer: RecordWriter, commit: GitCommit
    ) -> None:
        self.is_over = kinds.GIT_COMMIT in script.script
        self._script, self._record_writer, self._commit = script, record_writer, commit

    def reach(self, *_: object) -> None:
        """Compare the commit once it is known. At the end of a window."""
        if not self._commit.is_known_within(0):
            return
        self.is_over = True
        then, now = self._script.commit, self._commit.value
        self._record_writer.keep_fact(FACT, kinds.GIT_COMMIT, now)
        log(_commit_changes(then, now, SCRIPT))


# ---- the comparison


def _compare(
    registry: Registry, saved: Saved, then: Mapping[str, Any], given: Mapping[str, Any]
) -> list[Change]:
    choices = registry.choices
    found = [each for one in registry.optimizers for each in one.changes(saved, choices)]
    for kind in (kinds.SCHEDULE, kinds.DROPOUT):
        for name, old, new in _differing(_mapping(then, kind), given[kind]):
            used = REFUSE if name.endswith(_CLASS) else choices[kind]  # no class loads another's
            found.append(Change(kind, name, _text(old), _text(new), used))
    found += [each for loader in registry.loaders for each in loader.changes(saved)]
    old, new = then.get(kinds.ACCUMULATION), given[kinds.ACCUMULATION]
    if None not in (old, new) and old != new:
        used = choices[kinds.ACCUMULATION]
        found.append(Change(kinds.ACCUMULATION, "accumulate", _text(old), _text(new), used))
    old, new = then.get(kinds.ARGUMENTS), given.get(kinds.ARGUMENTS)
    if isinstance(old, list) and isinstance(new, list) and old != new:
        gone, added = _other_arguments(old, new)
        used = choices[kinds.ARGUMENTS]
        found.append(Change(kinds.ARGUMENTS, "script", gone, added, used))
    old, new = then.get(kinds.GIT_COMMIT), given.get(kinds.GIT_COMMIT)
    return [*found, *_commit_changes(old, new, choices[kinds.GIT_COMMIT])]


def _commit_changes(then: Any, now: Any, used: str) -> list[Change]:
    if None in (then, now) or then == now:
        return []
    return [Change(kinds.GIT_COMMIT, "script", _commit(then), _commit(now), used)]


def _mapping(facts: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = facts.get(key)
    return found if isinstance(found, dict) else {}


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value; of a schedule of another class, the class alone."""
    names = [name for name in then if name in now and then[name] != now[name]]
    others = tuple(f"{name.removesuffix(_CLASS)}." for name in names if name.endswith(_CLASS))
    for name in names:
        if not (others and name.startswith(others)):
            yield name, then[name], now[name]


def _other_arguments(then: list[Any], now: list[Any]) -> tuple[str, str]:
    """Return the arguments that only one of the two has, each option with its values."""
    old, new = (_by_option(list(map(str, arguments))) for arguments in (then, now))
    gone = " ".join(each for each in old if each not in new)
    added = " ".join(each for each in new if each not in old)
    if not gone and not added:
        return "another order", "another order"
    return _shortened(gone or "-"), _shortened(added or "-")


def _by_option(arguments: list[str]) -> list[str]:
    found: list[str] = []
    for argument in arguments:
        if argument.startswith("-") or not found:
            found.append(argument)
        else:
            found[-1] += f" {argument}"
    return found


def _commit(commit: Any) -> str:
    name, dash, dirty = str(commit).partition("-")
    return f"{name[:10]}{dash}{dirty}"


def _text(value: Any) -> str:
    with suppress(TrainckptError):
        value = values.decode(value, values.no_tensor)
    return _shortened(str(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


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
            found[f"{generic.name}{_CLASS}"] = type(_scheduler(generic)).__name__
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


# ---- the script's values, put into the saved state


def _take_from_script(
    registry: Registry, saved: Saved, then: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    for optimizer in registry.optimizers:
        rates = optimizer.take_from_script(saved, registry.choices)
        if rates:
            _move_base_rates(registry, saved, optimizer, rates)
    if registry.choices[kinds.SCHEDULE] != SCRIPT:
        return
    numbers = {
        name: new
        for name, _, new in _differing(_mapping(then, kinds.SCHEDULE), given[kinds.SCHEDULE])
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


def _set_dropouts(registry: Registry, then: Mapping[str, Any]) -> None:
    seen: dict[str, int] = {}
    for name, part, key in list(_dropout_places(registry)):
        number = seen[name] = seen.get(name, -1) + 1
        rates = then.get(name)
        rate = rates[number] if isinstance(rates, list) and number < len(rates) else rates
        if type(rate) in (int, float):
            setattr(part, key, rate)


def _one_or_all(rates: list[float]) -> float | list[float]:
    return rates[0] if len(set(rates)) == 1 else rates

"""Compare what the script gives with what the snapshot had, and let the chosen values count.

    start of an attempt   what the script gives is read, before a resume overwrites it
    attempt's record      holds it under `script`, for the resumes from its snapshots
    resume                compares both, once a snapshot is chosen, on every rank. A difference of a
                          kind that is refused ends the attempt. Where the script's value counts, it
                          replaces the saved one in the state about to be applied: the first
                          application and the second, at the boundary, give the same
    rank 0                logs all differences as one table

`resume.script_values` reads and puts them, `resume.late_changes` finds what only training shows.
The snapshot itself holds the options that the script gave its optimizers, and facts of its loaders
(`state.adapters`). A record of an older release has no `script`: that part is then not compared.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError, StateMismatch, TrainckptError
from trainckpt.format import changes as kinds
from trainckpt.format.changes import (
    REFUSE,
    SNAPSHOT,
    Change,
    table,
)
from trainckpt.format.exactness import How, Restored
from trainckpt.ranks.store import RANKS_TIMEOUT_S, gather_or_raise
from trainckpt.resume.script_values import (
    CLASS,
    differing,
    mapping,
    set_dropouts,
    take_from_script,
    with_commit,
    without_progress,
)
from trainckpt.snapshot import attempt_history
from trainckpt.state import values

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.format.names import SnapshotName
    from trainckpt.ranks.store import RankStore
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry
    from trainckpt.storage.base import Tier

FACT = "script"  # in the attempt's record
_LONGEST = 60  # characters of a value in the table


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


def settle(
    *,
    tier: Tier,
    channel: RankStore,
    registry: Registry,
    saved: Saved,
    name: SnapshotName,
    given: Mapping[str, Any],
    commit: GitCommit | None = None,
) -> ScriptChanges:
    """Compare the script with a snapshot, and let the chosen values count in `saved`.

    Every rank calls it, before anything is applied. `commit`: rank 0's; it is waited for where
    another one is refused.

    Raises:
        ConfigurationError: The ranks have made different choices; on every rank alike.
        StateMismatch: A difference is of a kind that is refused; lists all, on every rank alike.
    """
    _must_choose_alike(channel, registry.choices)
    recorded: Any = {}
    if channel.world.rank == 0:
        with suppress(TrainckptError):
            record = attempt_history.read_attempt(tier, name.attempt)
            recorded = record.facts.get(FACT) if record is not None else {}
    recorded = channel.gather("script then", recorded, RANKS_TIMEOUT_S)[0]
    then: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    must_be = then.get(kinds.GIT_COMMIT) if registry.choices[kinds.GIT_COMMIT] == REFUSE else None
    if commit is not None and must_be is not None:
        given = with_commit(given, commit)
    numbers = mapping(then, kinds.SCHEDULE), given[kinds.SCHEDULE]
    given = {**given, kinds.SCHEDULE: without_progress(registry, saved, *numbers)}
    everyone = gather_or_raise(
        channel,
        "changes",
        lambda: [each.to_json() for each in _compare(registry, saved, then, given, commit)],
        RANKS_TIMEOUT_S,
    )
    found = tuple(dict.fromkeys(Change.from_json(each) for rank in everyone for each in rank))
    if any(change.used == REFUSE for change in found):
        refused = list(dict.fromkeys(each.kind for each in found if each.used == REFUSE))
        raise StateMismatch(
            f"the script differs from snapshot {name}, and {', '.join(refused)} may not",
            [change.sentence for change in found],
            hint="run the script as it was, or let its values count, where they can "
            f'(docs/options.md#changed): changed="{refused[0]}: script"',
        )
    take_from_script(registry, saved, then, given)
    if registry.choices[kinds.DROPOUT] == SNAPSHOT:
        set_dropouts(registry, mapping(then, kinds.DROPOUT))
    script = dict(given)
    for kind in (kinds.DROPOUT, kinds.SCHEDULE):  # the next resume compares with what counts
        if registry.choices[kind] == SNAPSHOT:
            script[kind] = {**given[kind], **mapping(then, kind)}
    return ScriptChanges(script, found, then.get(kinds.ACCUMULATION), then.get(kinds.GIT_COMMIT))


def _must_choose_alike(channel: RankStore, choices: Mapping[str, str]) -> None:
    """Refuse ranks with different options `changed`: they would train with different values.

    Raises:
        ConfigurationError: On every rank alike.
    """
    everyone = channel.gather("choices", dict(choices), RANKS_TIMEOUT_S)
    for kind in kinds.KINDS:
        chosen = [each[kind] for each in everyone]
        if len(set(chosen)) > 1:
            other = next(rank for rank, choice in enumerate(chosen) if choice != chosen[0])
            raise ConfigurationError(
                f'changed="{kind}: {chosen[0]}" on rank 0, "{kind}: {chosen[other]}" on rank '
                f"{other}: the ranks would train with different values",
                hint="pass the same changed= (or TRAINCKPT_CHANGED) on every rank",
            )


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


# ---- the comparison


def _compare(
    registry: Registry,
    saved: Saved,
    then: Mapping[str, Any],
    given: Mapping[str, Any],
    commit: GitCommit | None,
) -> list[Change]:
    choices = registry.choices
    found = [each for one in registry.optimizers for each in one.changes(saved, choices)]
    for kind in (kinds.SCHEDULE, kinds.DROPOUT):
        for name, old, new in differing(mapping(then, kind), given[kind]):
            used = REFUSE if name.endswith(CLASS) else choices[kind]  # no class loads another's
            found.append(Change(kind, name, as_text(old), as_text(new), used))
    found += [each for loader in registry.loaders for each in loader.changes(saved)]
    old, new = then.get(kinds.ACCUMULATION), given[kinds.ACCUMULATION]
    if None not in (old, new) and old != new:
        used = choices[kinds.ACCUMULATION]
        found.append(Change(kinds.ACCUMULATION, "accumulate", as_text(old), as_text(new), used))
    old, new = then.get(kinds.ARGUMENTS), given.get(kinds.ARGUMENTS)
    if isinstance(old, list) and isinstance(new, list) and old != new:
        gone, added = _other_arguments(old, new)
        used = choices[kinds.ARGUMENTS]
        found.append(Change(kinds.ARGUMENTS, "script", gone, added, used))
    old, new, used = (
        then.get(kinds.GIT_COMMIT),
        given.get(kinds.GIT_COMMIT),
        choices[kinds.GIT_COMMIT],
    )
    if commit is not None and used == REFUSE and old is not None and new is None:
        unknown = f"not known: {commit.why_unknown}"
        return [*found, Change(kinds.GIT_COMMIT, "script", _commit(old), unknown, used)]
    return [*found, *commit_changes(old, new, used)]


def commit_changes(then: Any, now: Any, used: str) -> list[Change]:
    """Return the difference of two git commits, if both are known."""
    if None in (then, now) or then == now:
        return []
    return [Change(kinds.GIT_COMMIT, "script", _commit(then), _commit(now), used)]


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


def as_text(value: Any) -> str:
    """Return an encoded value as in a table."""
    with suppress(TrainckptError):
        value = values.decode(value, values.no_tensor)
    return _shortened(str(value))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."

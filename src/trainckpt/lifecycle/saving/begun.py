"""Begun: what is tracked, by name, as it was when the run began. A resume finds it like that again.

What a script changes since, a save holds and no resume may find: that is said at the first save
that holds it, not by the refusal of a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.run.log import logger
from trainckpt.state.kinds.added_groups import cannot_be_added

if TYPE_CHECKING:
    from trainckpt.state.registry import Registry


SELDOM = 16  # saves: a walk over all modules takes milliseconds, and training waits


class Begun:
    """Of one rank."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names = {m.name: {name for name, _ in m.parameters()} for m in registry.models}
        self._groups = {o.name: len(o.optimizer.param_groups) for o in registry.optimizers}
        self._said: set[str] = set()
        self._looks = 0

    def look(self) -> None:
        """A save is begun: say what a resume will not find, each once."""
        if self._looks % SELDOM == 0:
            self._look_at_names()
            self._look_at_attributes()
        self._looks += 1
        self._look_at_groups()

    def _look_at_names(self) -> None:
        for model in self._registry.models:
            begun, now = self._names[model.name], {name for name, _ in model.parameters()}
            if begun != now:
                changed = min(begun ^ now)
                how = "is new" if changed in now else "is gone"
                self._say(
                    model.name,
                    f"{model.name}'s parameters are named otherwise than when the run began "
                    f"({changed} {how}): a resume is refused unless the script's model is then as "
                    "it is now",
                )

    def _look_at_attributes(self) -> None:
        changed = sorted(set(self._registry.watched.changed_in_training()) - self._said)
        if changed:
            self._said.update(changed)
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            logger.warning(
                "%s%s: changed since the run began, and in no state_dict, so a resume has not what "
                "it is now: %s", ", ".join(changed[:3]), more,
                self._registry.watched.hint(changed),
            )  # fmt: skip

    def _look_at_groups(self) -> None:
        for optimizer in self._registry.optimizers:
            begun, live = self._groups[optimizer.name], optimizer.optimizer.param_groups
            if len(live) <= begun or optimizer.name in self._said:
                continue
            names = self._registry.parameter_names()
            known = {id(p): name for p, name in optimizer.named(names)}
            added = [[known[id(p)] for p in group["params"]] for group in live[begun:]]
            why = cannot_be_added(live[:begun], added, names)
            if why:
                self._say(
                    optimizer.name,
                    f"{optimizer.name} has {len(live)} parameter groups, and had {begun} when the "
                    f"run began: a resume cannot add them, since {why}, and is refused unless the "
                    "script does before the Checkpointer is made",
                )

    def _say(self, name: str, sentence: str) -> None:
        if name not in self._said:
            self._said.add(name)
            logger.warning("%s", sentence)

"""Compare variables of the script, to name those that a resume does not have as they were saved.

A training loop may carry a value from batch to batch in a variable, as in `out, hidden =
model(x, hidden)`. No snapshot holds it. At the first boundary of an attempt the variables that the
code may read again are noted (`live_names`), but for those that only reach the output
(`output_names`). A save stores a sketch of each of them that has tensors, and of each other one
that has changed since. After a resume, at the boundary of the snapshot, those with another sketch
are named.

Tensors, modules, optimizers and schedulers make a resume inexact, and numbers that reach a loss or
count steps. Other numbers and texts are worth a hint alone, such as a best score. A generator of
the script, such as its own stream of data, makes it inexact if it stands again where it stood at
the first boundary.

Modules in attributes of a trainer or callback, such as a teacher, count as variables.

In runs of one rank, plain attributes of objects in variables are restored (`script_objects`); ranks
that decide alone what to restore could part. They are not if something else that makes a resume
inexact has changed: they may only hold together, as the fill of a replay buffer does with its
samples.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from trainckpt.data import randomness
from trainckpt.ranks.world import current_world
from trainckpt.state import script_objects, script_randomness
from trainckpt.state.live_names import live_names
from trainckpt.state.object_values import ObjectValues
from trainckpt.state.output_names import what_names_reach
from trainckpt.state.sketches import Sketch, Sketcher

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry

PART = "script variables"  # no keyword can be spelled so
_MOST = 64  # variables compared


class Differing(NamedTuple):
    """Names of variables, and of attributes of objects in variables.

    Attributes:
        tensors: Those with tensors, modules, optimizers and schedulers, generators, and numbers
            that reach a loss or count steps.
        numbers: All others.
    """

    tensors: list[str]
    numbers: list[str]


class ScriptVariables:
    """The variables of one rank's script that its loop may carry a value in."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._begun: dict[str, dict[str, Sketch]] = {}
        self._training: set[str] = set()  # that reach a loss, or count steps
        self._always: set[str] = set()  # in the snapshot that the attempt began from
        self._is_alone = False  # the only rank; known at the first boundary
        self._from_others: set[int] = set()  # ids of objects that trained in another run
        self._objects = ObjectValues(
            script_objects.PART, partial(script_objects.find, registry), is_strict=True
        )

    def begin(self, run: str) -> None:
        """Note the variables at the first boundary of an attempt at this run."""
        self._is_alone = current_world().size == 1
        if self._is_alone:
            objects = [owner.value for owner in script_objects.find(self._registry)]
            self._from_others = script_objects.note_trained(objects, run)
            self._objects.begin()
        sketcher = Sketcher(self._registry)
        for scope, frame in script_randomness.frames():
            reached = what_names_reach(frame)
            self._training.update(f"{scope}.{name}" for name in reached.training)
            for name in sorted(live_names(frame) - reached.output):
                if name in frame.f_locals and len(self._begun) < _MOST:
                    sketches = sketcher.of(frame.f_locals[name])
                    if sketches is not None:
                        self._begun[f"{scope}.{name}"] = sketches
        for scope, modules in self._registry.watched.modules_of_callbacks():
            for name, module in modules.items():
                if (sketches := sketcher.of(module)) is not None:
                    self._begun[f"{scope}.{name}"] = sketches

    def capture(self, out: Captured) -> None:
        """Add the sketches of those with tensors, and of those that have changed.

        And the plain attributes of objects, if no other part that matters has changed.
        """
        changed, is_lost = self._objects.changed(), False
        kept = {(id(value), key) for _, value, attributes in changed for key in attributes}
        sketcher = Sketcher(self._registry)
        tensors: dict[str, dict[str, str]] = {}
        numbers: dict[str, dict[str, str]] = {}
        positions: dict[str, dict[str, str]] = {}  # where the generators stood that have advanced
        for variable, value in self._values(self._begun):
            begun = self._begun[variable]
            for attribute, sketch in (sketcher.of(value) or {}).items():
                reaches = not attribute and variable in self._training
                if (sketch.has_state or reaches) and sketch != begun.get(attribute):
                    is_lost |= (id(value), attribute) not in kept
                if sketch.is_position:
                    first = begun.get(attribute)
                    if first is not None and first != sketch:
                        positions.setdefault(variable, {})[attribute] = first.digest
                elif sketch.has_state:
                    tensors.setdefault(variable, {})[attribute] = sketch.digest
                elif variable in self._always or sketch != begun.get(attribute):
                    kind = tensors if reaches else numbers
                    kind.setdefault(variable, {})[attribute] = sketch.digest
        if not is_lost:
            self._objects.add(changed, out)
        if tensors or numbers:
            out.values[PART] = {"tensors": tensors, "numbers": numbers}
        if positions:
            out.values.setdefault(PART, {"tensors": {}, "numbers": {}})["positions"] = positions

    def restore(self, saved: Saved) -> None:
        """Restore the plain attributes of objects in variables."""
        if saved.is_own and self._is_alone:
            self._objects.restore(saved, left_alone=self._from_others)

    def differing(self, saved: Saved) -> Differing:
        """Return the variables that are not as they were when the snapshot was saved."""
        stored = saved.values.get(PART)
        if stored is None or not saved.is_own:
            return Differing([], [])
        positions = stored.get("positions", {})
        variables = {*stored["tensors"], *stored["numbers"], *positions}
        self._always |= variables - positions.keys()
        sketcher = Sketcher(self._registry)
        live = dict[str, dict[str, Sketch]]()
        for name, value in self._values(variables):
            live[name] = sketcher.of(value) or {}
        found = Differing(*(_others(stored[kind], live) for kind in Differing._fields))
        again = _others(positions, live, equal=True)
        return found._replace(tensors=sorted({*found.tensors, *again}))

    def places(self, names: Collection[str]) -> dict[str, tuple[object, str]]:
        """Return name, as in `differing` -> object and attribute, for those of own classes."""
        found = {}
        for _, values in script_randomness.scopes():
            for name in names:
                variable, _, key = name.partition(".")
                holder = values.get(variable)
                if key and randomness.names_of(holder) is not None and _is_own(holder):
                    found[name] = holder, key
        return found

    def _values(self, variables: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of each of these variables that there is."""
        scopes = dict(script_randomness.scopes())
        scopes |= dict(self._registry.watched.modules_of_callbacks())
        for variable in variables:
            scope, _, name = variable.rpartition(".")
            if name in (names := scopes.get(scope, {})):
                yield variable, names[name]


def hint(numbers: Collection[str]) -> str:
    """Return a sentence on numbers that differ; a resume is no less exact if they are printed."""
    names = sorted(numbers)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        "variables of the script are not restored, and these are not as when it was saved: "
        f"{', '.join(names[:3])}{more}. If training depends on one, keep it on an object, and "
        "track it with trainckpt.Attributes"
    )


def _is_own(value: object) -> bool:
    kind = type(value)
    return randomness.is_own_module(kind.__module__) and not isinstance(value, nn.Module)


def _others(
    stored: dict[str, dict[str, str]], live: dict[str, dict[str, Sketch]], *, equal: bool = False
) -> list[str]:
    """Return the names whose live sketch is another one, or missing; with `equal`, the same one."""
    found = []
    for variable, sketches in stored.items():
        name, now = variable.rpartition(".")[2], live.get(variable)
        if now is None:  # not there, in another script
            continue
        for attribute, saved in sketches.items():
            if (attribute in now and now[attribute].digest == saved) == equal:
                found.append(f"{name}.{attribute}" if attribute else name)
    return sorted(found)

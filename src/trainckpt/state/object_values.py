"""Restore plain attributes of objects without a state: callbacks, trainers, the script's own.

A best score, a counter or a list of losses goes on from its value at the snapshot's boundary, if it
has changed since the first boundary of the attempt. Plain are numbers, texts, containers of them,
and small tensors and arrays on the CPU.

An object that has made another one since then, such as an open file, is left as the script makes
it: its numbers may only hold together with that one. `attributes` and `script_variables` name the
loss.

Of the script's own objects less is known, so more is left alone (`is_strict`): all of them if one
has made another object; and tensors, arrays and paths, which may be shared with others, or belong
to a process.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainckpt.data import randomness
from trainckpt.errors import TrainckptError
from trainckpt.state import attributes
from trainckpt.state.clock_readings import is_reading, is_wall_time

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from trainckpt.state.captured import Captured, Saved

PART = "callback values"  # no keyword can be spelled so
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, tuple, set, frozenset, deque, *_MAPPINGS)
_NUMPY_KINDS = "biufc"  # numbers
_STORED_FACTORIES = (None, list, dict, int, float)  # a snapshot can hold
_MOST = 4096  # values in one attribute
_BYTES = 1 << 20  # of its tensors and texts


class Changed(NamedTuple):
    """An object that a resume can restore, and its attributes that have changed."""

    name: str
    value: object
    attributes: dict[str, Any]


class ObjectValues:
    """The plain attributes of some objects of one rank."""

    def __init__(
        self,
        part: str,
        owners: Callable[[], list[attributes.WatchedObject]],
        *,
        is_strict: bool = False,
    ) -> None:
        """Note nothing yet.

        Args:
            part: The part of the snapshot that holds the values.
            owners: Returns the objects.
            is_strict: Leave more alone, as above.
        """
        self._part, self._owners, self._is_strict = part, owners, is_strict
        self._begun: dict[str, dict[str, object]] = {}  # owner -> attribute -> mark
        self._clocks: set[tuple[str, str]] = set()  # owner and attribute with a clock's reading

    def begin(self) -> None:
        """Note the values at the first boundary: the script sets these again in each attempt."""
        for owner in self._owners():
            values = owner.own_attributes()
            self._begun[owner.name] = {key: self._mark(value) for key, value in values}
            self._clocks.update((owner.name, key) for key, value in values if is_reading(value))

    def capture(self, out: Captured) -> None:
        """Add the values that have changed."""
        self.add(self.changed(), out)

    def add(self, changed: Iterable[Changed], out: Captured) -> None:
        """Add the values found by `changed`."""
        kept = {}
        for name, _, values in changed:
            with suppress(RuntimeError):  # a thread of the script changes a container meanwhile
                kept[name] = {
                    key: out.encode(_without_factories(value), f"{self._part}/{name}.{key}")
                    for key, value in values.items()
                }
        if kept:
            out.values[self._part] = kept

    def restore(self, saved: Saved, *, left_alone: Container[int] = ()) -> None:
        """Set the saved values in objects of the same name, but for those with these ids."""
        stored = saved.values.get(self._part, {})
        owners = self._owners() if stored else []
        live = {owner.name: owner.value for owner in owners if id(owner.value) not in left_alone}
        for name, trees in stored.items():
            for key, tree in trees.items() if name in live else ():
                names = randomness.names_of(live[name]) or {}
                names[key] = _filled(names.get(key), saved.decode(tree))

    def names(self) -> set[str]:
        """Return the full name of each attribute that a save keeps now."""
        return {f"{name}.{key}" for name, _, values in self.changed() for key in values}

    def changed(self) -> list[Changed]:
        """Return the objects with changed attributes, unless they have made another object."""
        found = []
        for owner in self._owners():
            begun, changed = self._begun.get(owner.name), dict[str, Any]()
            if begun is None:
                continue
            for key, value in owner.own_attributes():
                if begun.get(key) == (mark := self._mark(value)) or self._is_of_process(value):
                    continue
                if isinstance(mark, _Identity):
                    if self._is_strict:
                        return []
                    break
                if (owner.name, key) not in self._clocks:
                    changed[key] = value
            else:
                found += [Changed(owner.name, owner.value, changed)] if changed else []
        return found

    def _is_of_process(self, value: Any) -> bool:
        """Return True for a time, and for a path: another process has others."""
        is_path = self._is_strict and isinstance(value, str) and os.sep in value
        return is_path or is_wall_time(value)

    def _mark(self, value: Any) -> object:
        """Return a mark that is another one once the value has changed."""
        length = len(value) if type(value) in _CONTAINERS else None
        other = _Identity(id(value), length)
        try:
            if _size(value, 0, has_arrays=not self._is_strict) is None:
                return other
            if type(value) in _ATOMS:
                return type(value).__name__, repr(value)
            return attributes.digest_of(_without_factories(value)) or other
        except (TrainckptError, RuntimeError):  # a thread of the script changes it meanwhile
            return other


class _Identity(NamedTuple):
    """The mark of a value that is not plain, with the length of a container."""

    id: int
    length: int | None


def _size(value: Any, depth: int, *, has_arrays: bool) -> int | None:
    """Return the number of values in a plain one; None if it is not plain, or too large."""
    kind = type(value)
    if kind in _ATOMS:
        return None if kind in (str, bytes) and len(value) > _BYTES else 1
    if kind is torch.Tensor:
        if not has_arrays or value.layout is not torch.strided or value.device.type != "cpu":
            return None
        return 1 if value.nbytes <= _BYTES and not value.requires_grad else None
    if kind.__module__ == "numpy":
        is_small = getattr(value, "nbytes", _BYTES + 1) <= _BYTES
        is_small = is_small and (has_arrays or not value.shape)
        return 1 if is_small and value.dtype.kind in _NUMPY_KINDS else None
    if kind not in _CONTAINERS or len(value) > _MOST or depth > attributes.MAX_DEPTH:
        return None
    total = 1
    items = [*value.keys(), *value.values()] if kind in _MAPPINGS else list(value)
    for item in items:
        size = _size(item, depth + 1, has_arrays=has_arrays)
        if size is None or (total := total + size) > _MOST:
            return None
    return total


def _without_factories(value: Any) -> Any:
    """Return a `dict` for a `defaultdict` with a factory of the script's, which no file can hold.

    So it is for those that such a factory has made.
    """
    if type(value) is not defaultdict or value.default_factory in _STORED_FACTORIES:
        return value
    return {key: _without_factories(item) for key, item in value.items()}


def _filled(live: Any, value: Any) -> Any:
    """Return the value, in the live container if it is of that kind: others may hold it."""
    if type(live) is defaultdict and type(value) is dict and live.default_factory is not None:
        live.clear()
        for key, item in value.items():  # the factory makes the nested ones again
            live[key] = _filled(live.default_factory(), item)
        return live
    if type(live) is not type(value) or isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, (*_MAPPINGS, set)):
        live.clear()
        live.update(value)
        return live
    if isinstance(value, (list, deque)):
        live.clear()
        live.extend(value)
        return live
    return value

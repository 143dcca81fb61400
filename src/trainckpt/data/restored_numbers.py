"""Restore numbers and texts in a loader's data, such as `dataset.level`, also in its transforms.

set by the loop       `LoopNumbers` tells them from those that reading a sample changes: a loop sets
                      a number between two batches, and reading one sets it while a batch is
                      loaded. A number that only the loop sets is restored before the first batch
                      after a resume. One that reading sets too may belong to an open file or a
                      cache, which a resume lacks; `carried_state` names those
known to workers      as they were when the workers started: these do not see what the script sets
                      later. A resume starts its workers with the old values (`numbers`,
                      `replaced`), and then puts the script's back

Lists, tensors and cached samples are not restored but compared, by `compared_content`.
"""

from __future__ import annotations

import functools
import itertools
import types
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from trainckpt.data import randomness
from trainckpt.data.carried_state import children
from trainckpt.data.state_dict_methods import has_usable_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.utils.data import DataLoader

_KINDS = (bool, int, float, str)
_LONGEST = 256  # characters of a text
_OBJECTS = 16  # inside each other
_ATTRIBUTES = 256  # of one object; one with more is left out
_METHODS = (types.BuiltinFunctionType, types.MethodType, functools.partial)
_MODE = "training"  # of a module: `train()` and `eval()` set it


class RestoredNumbers:
    """The numbers and texts of one loader's data, for a snapshot and after a resume.

    Attributes:
        of_loop: Those set by the loop; None for a stream.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        self.of_loop = None if is_stream else LoopNumbers(self._roots)
        self._as_workers_started: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}  # a state whose numbers are not restored yet

    def state(self, *, has_workers: bool) -> dict[str, Any]:
        """Return the numbers for a snapshot; `has_workers`: workers may know other ones."""
        return {
            "workers' numbers": self._known_to_workers() if has_workers else {},
            "loop numbers": {} if self.of_loop is None else self.of_loop.values(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load a result of `state`: its numbers are restored as the next workers start."""
        names = ("workers' numbers", "loop numbers")
        self._loaded = {name: saved[name] for name in names if name in saved}

    def restore_of_loop(self) -> None:
        """Restore the loaded numbers that the loop had set."""
        numbers = self._loaded.pop("loop numbers", {})
        if self.of_loop is not None:
            self.of_loop.restore(numbers)

    @contextmanager
    def as_workers_start(self) -> Iterator[None]:
        """Return a context in which the data has the numbers to start workers with."""
        with replaced(self._roots, self._loaded.get("workers' numbers", {})):
            if self._loader.num_workers:
                self._as_workers_started = numbers(self._roots)
            yield
        self._loaded.pop("workers' numbers", None)  # not before: a start that failed is repeated

    def _known_to_workers(self) -> dict[str, Any]:
        """Return the numbers in the dataset that changed since the workers started."""
        if not self._as_workers_started:
            return {}
        now = numbers(self._roots)
        then = self._as_workers_started.items()
        return {path: value for path, value in then if now.get(path, value) != value}

    @property
    def _roots(self) -> dict[str, Any]:
        """The dataset, and the collate_fn if it is an object: their numbers may be set."""
        dataset, collate_fn = self._loader.dataset, self._loader.collate_fn
        is_object = is_callable_object(collate_fn)
        return {"dataset": dataset, **({"collate_fn": collate_fn} if is_object else {})}


class LoopNumbers:
    """The numbers and texts in the attributes of a loader's data."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        """`roots`: the dataset, and the collate_fn, by these names."""
        self._spaces = dict(data_namespaces(roots))
        self._ids: list[int] | None = None  # of all values of all objects at the last call
        self._last: dict[str, dict[str, Any]] | None = None  # None: no batch was loaded yet
        self._set_by_loop: set[str] = set()
        self._set_by_reading: set[str] = set()

    def before_batch(self) -> None:
        """Note the numbers that the loop has set since the last batch."""
        self._set_by_loop |= self._changed()

    def after_batch(self) -> None:
        """Note the numbers that loading a batch in this process has set."""
        self._set_by_reading |= self._changed()

    @property
    def kept(self) -> set[str]:
        """Paths of the numbers that only the loop has set."""
        return self._set_by_loop - self._set_by_reading

    def values(self) -> dict[str, Any]:
        """Return path -> value of the numbers that only the loop has set in this run."""
        self.before_batch()
        kept = self.kept
        return {
            path: value
            for space, names in (self._last or {}).items()
            for name, value in names.items()
            if (path := f"{space}.{name}") in kept
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the result of `values`."""
        for path, value in saved.items():
            space, _, name = path.rpartition(".")
            if space in self._spaces:
                self._spaces[space][name] = value
                self._set_by_loop.add(path)

    def _changed(self) -> set[str]:
        """Return the paths whose value is another than at the last call, or new."""
        values = itertools.chain.from_iterable(map(dict.values, self._spaces.values()))
        ids = list(map(id, values))  # the very same objects mean the same numbers
        if ids == self._ids:
            return set()
        self._ids = ids
        last, self._last = self._last, {p: _numbers(n) for p, n in self._spaces.items()}
        if last is None or last == self._last:
            return set()
        return {
            f"{space}.{name}"
            for space, names in self._last.items()
            for name, value in names.items()
            if name not in last[space] or last[space][name] != value
        }


def _numbers(names: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in names.items()
        if type(value) in _KINDS
        and name != _MODE
        and not (type(value) is str and len(value) > _LONGEST)
    }


def is_callable_object(value: Any) -> bool:
    """Return True for an object with `__call__`, such as a transform or a collator, and with no
    parameters."""
    if isinstance(value, (types.FunctionType, type, *_METHODS)) or not callable(value):
        return False
    return not (isinstance(value, nn.Module) and any(True for _ in value.parameters()))


def is_function_or_object(value: Any) -> bool:
    """Return True for a function of Python, and for what `is_callable_object` names."""
    return isinstance(value, types.FunctionType) or is_callable_object(value)


def data_namespaces(roots: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and attributes of each object, nearest first: datasets, transforms, collators."""
    queue = list(roots.items())
    for path, holder in queue:
        names = randomness.names_of(holder)
        keeps_own = has_usable_state(holder) and not isinstance(holder, nn.Module)
        if names is None or len(names) > _ATTRIBUTES or keeps_own:
            continue
        yield path, names
        for name, value in names.items():
            parts = enumerate(value) if type(value) in (list, tuple) else ()
            inner = [(f"{path}.{name}[{index}]", part) for index, part in parts]
            inner = [(f"{path}.{name}", value), *inner[:_OBJECTS]]
            queue += [
                each
                for each in inner
                if isinstance(each[1], Dataset) or is_callable_object(each[1])
            ]
        del queue[_OBJECTS:]


# ---- numbers that the workers know


def numbers(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return path -> value of the numbers and texts inside a dataset and a collate_fn."""
    return {
        path: value
        for path, _, _, value in attributes_inside(roots)
        if type(value) in _KINDS and len(str(value)) <= _LONGEST
    }


@contextmanager
def replaced(roots: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """Return a context in which the numbers and texts have these values."""
    changed = []
    for path, names, key, value in attributes_inside(roots) if values else ():
        if path in values and type(value) in _KINDS:
            changed.append((names, key, key in names, value))
            names[key] = values[path]
    try:
        yield
    finally:
        for names, key, was_there, value in changed:
            if was_there:
                names[key] = value
            else:
                del names[key]


def attributes_inside(roots: Mapping[str, Any]) -> Iterator[tuple[str, dict[Any, Any], Any, Any]]:
    """Yield the path of each attribute and item, its namespace and name there, and its value."""
    for path, holder in list(randomness.walk(roots)):
        names = holder if isinstance(holder, dict) else randomness.names_of(holder)
        if names is None or len(names) > _ATTRIBUTES or randomness.is_generator(holder):
            continue
        for child_path, key, value in list(children(path, holder)):
            yield child_path, names, key, value

"""Save the data that a dataset or collate_fn carries from batch to batch: a remainder, a counter.

Workers hold copies of both, and a resume makes new ones. If they have state_dict and
load_state_dict, their states go with each batch, like that worker's randomness (worker.py). If not,
their attributes are compared before and after the first batches. Numbers, texts, lists and tensors
that change in two of them are named in a warning and at a resume. A single first change is a file
being opened, say; a dictionary that grows is a cache.
"""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe, MapDataPipe

from trainckpt.data import randomness
from trainckpt.data.iterable import are_equal
from trainckpt.data.pass_history import fingerprint
from trainckpt.data.state_dict_methods import has_usable_state, is_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

_POLLS = 4  # number of first batches after which attributes are compared
_PLAIN = (int, float, str, bytes)
_SEQUENCES = (list, tuple, deque)
_COUNTER = itertools.count
_OF_MODULES = ("._parameters", "._buffers")  # of a model that training changes
_WHOLE = 4096  # items of a sequence that are all compared
_ENDS = 8  # compared items at each end of a sequence, besides its length


class Carried:
    """States by name, sent by a worker; pin_memory leaves such an object alone."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states


class DataState(NamedTuple):
    """State inside the dataset, the collate_fn and unknown samplers, by path.

    Attributes:
        generators: Of random generators.
        carried: Of objects with a state_dict.
    """

    generators: dict[str, bytes] = {}  # noqa: RUF012 - never changed
    carried: dict[str, Any] = {}  # noqa: RUF012 - never changed

    @classmethod
    def saved_as(cls, saved: dict[str, Any], when: str) -> DataState:
        """Return it from a source's state; `when`: "before" the pass, or "now"."""
        return cls(saved.get(f"data {when}", {}), saved.get(f"carried {when}", {}))


def capture(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the states of all roots with state_dict and load_state_dict."""
    return {name: copy.deepcopy(root.state_dict()) for name, root in _stateful(roots)}


def restore(roots: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load the result of `capture`.

    A dataset of Hugging Face draws otherwise in workers once any state was loaded into it. So it
    keeps a state that it has already.
    """
    for name, root in _stateful(roots):
        is_there = is_of(root, "datasets") and are_equal(root.state_dict(), saved.get(name))
        if name in saved and not is_there:
            root.load_state_dict(copy.deepcopy(saved[name]))


class Seen(NamedTuple):
    """Attributes that change from batch to batch; not certain after the first batch alone."""

    is_certain: bool
    paths: list[str]


class Changing:
    """Attributes of a loader's data that change from batch to batch and are not saved."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: set[str] = set()
        # worker -> attributes changed by its first batch
        self._suspected: dict[int, list[str]] = {}

    @property
    def paths(self) -> list[str]:
        """Paths of the attributes seen so far."""
        return sorted(self._known.union(*self._suspected.values()))

    def record(self, worker: int, seen: Seen) -> None:
        """Record the changes seen after a batch; warn of each attribute once."""
        self._suspected[worker] = [] if seen.is_certain else seen.paths
        if seen.is_certain:
            self._warn_of_new(seen.paths)

    def _warn_of_new(self, paths: list[str]) -> None:
        new = sorted(set(paths) - self._known)
        if not new:
            return
        self._known.update(new)
        roots = sorted({path.partition(".")[0].partition("[")[0] for path in new})
        warnings.warn(
            f"{self._name}: {', '.join(new)[:200]} changes from batch to batch, and is not kept: "
            "after a resume it is as the script makes it, and data may differ from the "
            f"uninterrupted run. Give the {' and the '.join(roots)} state_dict and "
            "load_state_dict; if no sample depends on it, nothing is lost",
            stacklevel=2,
        )


class Watch:
    """Detects attributes that change from batch to batch, in data without a state of its own."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        kept = {name for name, _ in _stateful(roots)}
        self._roots = {name: root for name, root in roots.items() if name not in kept}
        self._values = dict(plain_values(self._roots))
        self._changes = Counter[str]()
        self._polls = 0

    def forget_changes(self) -> None:
        """Leave out what has changed since the last poll."""
        if self._polls < _POLLS:
            self._values = dict(plain_values(self._roots))

    def poll_changes(self, kept: Collection[str] = ()) -> Seen | None:
        """Return the changing attributes after one of the first batches; None after later ones.

        `kept`: attributes that a snapshot holds.
        """
        if self._polls == _POLLS:
            return None
        self._polls += 1
        old, self._values = self._values, dict(plain_values(self._roots))
        self._changes.update(
            path for path, now in self._values.items() if old.get(path, now) != now
        )
        least = min(self._polls, 2)
        changing = {path for path, number in self._changes.items() if number >= least}
        paths = sorted(changing.difference(kept))
        return Seen(self._polls > 1, paths)


def _stateful(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, root in roots.items():
        if not isinstance(root, (type, torch.nn.Module)) and has_usable_state(root):
            yield name, root


def plain_attributes(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return path -> type and digest of the plain attributes of the roots themselves."""
    return {
        f"{path}.{key}": [type(value).__name__, _whole(value)]
        for path, root in roots.items()
        for key, value in (randomness.names_of(root) or {}).items()
        if _is_compared(value)
    }


def plain_values(roots: Mapping[str, Any]) -> Iterator[tuple[str, tuple[type, Any]]]:
    """Yield each attribute and item with a plain value: its path, and its type and digest."""
    for path, holder in randomness.walk(roots):
        if randomness.is_generator(holder):
            continue
        if _is_compared(holder) and not path.endswith("]"):  # in a closure, say
            yield path, (type(holder), _digest(holder))
        for child_path, key, value in children(path, holder):
            is_state = path.endswith(_OF_MODULES) or _is_of_datapipe(holder, key)
            if _is_compared(value) and not is_state:
                yield child_path, (type(value), _digest(value))


def _is_of_datapipe(holder: Any, key: Any) -> bool:
    """Return True for a datapipe's seed and counters, which torch sets anew in each pass."""
    if not isinstance(holder, (IterDataPipe, MapDataPipe)):
        return False
    set_seed = getattr(getattr(type(holder), "set_seed", None), "__code__", None)
    return key in vars(IterDataPipe) or key in getattr(set_seed, "co_names", ())


def children(path: str, holder: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, key and value of each item of a dict, or of each attribute of an object."""
    if isinstance(holder, dict):
        items = [(key, value) for key, value in holder.items() if not is_tensor(key)]
        yield from ((f"{path}[{key!r}]", key, value) for key, value in items)
    else:
        names = {**_class_defaults(type(holder)), **(randomness.names_of(holder) or {})}
        yield from ((f"{path}.{key}", key, value) for key, value in names.items())


def _class_defaults(kind: type) -> dict[str, Any]:
    """Return the class attributes of a script's class: defaults for its objects' attributes."""
    defaults: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "collections", "typing"):
            named = {key: value for key, value in vars(base).items() if not key.startswith("__")}
            defaults = {**named, **defaults}
    return defaults


def _is_compared(value: Any) -> bool:
    kind = type(value)
    return kind in (*_PLAIN, *_SEQUENCES, _COUNTER) or is_tensor(value)


def is_tensor(value: Any) -> bool:
    """Return True for a tensor or a NumPy array; does not import NumPy."""
    numpy: Any = sys.modules.get("numpy")
    return isinstance(value, torch.Tensor if numpy is None else (torch.Tensor, numpy.ndarray))


def _whole(value: Any) -> str:
    """Return the digest of a value, of all its items if they are few."""
    if type(value) in _SEQUENCES and len(value) <= _WHOLE:
        return str([_digest(item, 1) for item in value])
    return str(_digest(value))


def _digest(value: Any, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        return value
    if type(value) is _COUNTER:
        return repr(value)  # has the next number, and draws none
    if is_tensor(value):
        return fingerprint(value)
    if type(value) in _SEQUENCES and depth < 2:
        ends = [*_first_items(value, _ENDS), *_first_items(reversed(value), _ENDS)]
        return len(value), [_digest(item, depth + 1) for item in ends]
    return type(value)


def _first_items(items: Any, count: int) -> list[Any]:
    return [item for _, item in zip(range(count), items, strict=False)]

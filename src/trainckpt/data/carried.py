"""Keep what a dataset or collate_fn carries from batch to batch: a remainder, a counter.

Workers hold copies of both, and a resume makes them anew. So what is carried is kept where they
have state_dict and load_state_dict: with each batch, as that worker's randomness is (worker.py).
Where they have not, their attributes are looked at before and after the first batches: numbers,
texts, lists and tensors that change in two of them are named in a warning, and when a run is
resumed. A first change alone is a file being opened, say; a dictionary that grows is a cache.

Used by: iterators.py, worker.py, sources.py.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainckpt.data import own_random
from trainckpt.data.fingerprint import fingerprint
from trainckpt.data.own_state import asks_nothing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LOOKS = 4  # batches after which attributes are compared
_PLAIN = (int, float, str, bytes)
_SEQUENCES = (list, tuple, deque)
_ENDS = 8  # items at each end of a sequence that are compared, beside its length


class Carried:
    """States by name, on their way home from a worker; pin_memory leaves an object alone."""

    def __init__(self, states: dict[str, Any]) -> None:
        self.states = states


def capture(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the states of those that have state_dict and load_state_dict."""
    return {name: copy.deepcopy(root.state_dict()) for name, root in _stateful(roots)}


def restore(roots: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Hand back what `capture` returned."""
    for name, root in _stateful(roots):
        if name in saved:
            root.load_state_dict(copy.deepcopy(saved[name]))


class Seen(NamedTuple):
    """Attributes that change from batch to batch; not sure after the first batch alone."""

    sure: bool
    paths: list[str]


class Changing:
    """Attributes of a loader's data that change from batch to batch and are not kept."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: set[str] = set()
        self._suspected: dict[int, list[str]] = {}  # worker -> those that its first batch changed

    @property
    def paths(self) -> list[str]:
        """Those seen so far."""
        return sorted(self._known.union(*self._suspected.values()))

    def note(self, worker: int, seen: Seen) -> None:
        """Take what was seen after a batch; warn of each attribute once."""
        self._suspected[worker] = [] if seen.sure else seen.paths
        if seen.sure:
            self._add(seen.paths)

    def _add(self, paths: list[str]) -> None:
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
    """Sees which attributes of data without a state of its own change from batch to batch."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        kept = {name for name, _ in _stateful(roots)}
        self._roots = {name: root for name, root in roots.items() if name not in kept}
        self._values = dict(values(self._roots))
        self._changes = Counter[str]()
        self._looks = 0

    def look(self) -> Seen | None:
        """Return, after one of the first batches, what is seen to change; None after later ones."""
        if self._looks == _LOOKS:
            return None
        self._looks += 1
        old, self._values = self._values, dict(values(self._roots))
        self._changes.update(
            path for path, now in self._values.items() if old.get(path, now) != now
        )
        least = min(self._looks, 2)
        paths = sorted(path for path, number in self._changes.items() if number >= least)
        return Seen(self._looks > 1, paths)


def _stateful(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, root in roots.items():
        if not isinstance(root, (type, torch.nn.Module)) and asks_nothing(root):
            yield name, root


def values(roots: Mapping[str, Any]) -> Iterator[tuple[str, tuple[type, Any]]]:
    """Return the attributes and items with plain values: path, type, and what tells a change."""
    for path, holder in own_random.walk(roots):
        if own_random.is_generator(holder):
            continue
        if _is_compared(holder) and not path.endswith("]"):  # in a closure, say
            yield path, (type(holder), _brief(holder))
        if isinstance(holder, dict):
            named = [(f"{path}[{key!r}]", value) for key, value in holder.items()]
        else:
            names = {**_defaults(type(holder)), **(own_random.names_of(holder) or {})}
            named = [(f"{path}.{key}", value) for key, value in names.items()]
        for at, value in named:
            if _is_compared(value):
                yield at, (type(value), _brief(value))


def _defaults(kind: type) -> dict[str, Any]:
    """Return the attributes of a script's class, which its objects may have one of their own of."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "torch", "collections", "typing"):
            named = {key: value for key, value in vars(base).items() if not key.startswith("__")}
            found = {**named, **found}
    return found


def _is_compared(value: Any) -> bool:
    kind = type(value)
    return kind in (*_PLAIN, *_SEQUENCES) or isinstance(value, torch.Tensor) or _is_array(value)


def _is_array(value: Any) -> bool:
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def _brief(value: Any, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor) or _is_array(value):
        return fingerprint(value)
    if type(value) in _SEQUENCES and depth < 2:
        ends = [*_some(value, _ENDS), *_some(reversed(value), _ENDS)]
        return len(value), [_brief(item, depth + 1) for item in ends]
    return type(value)


def _some(items: Any, number: int) -> list[Any]:
    return [item for _, item in zip(range(number), items, strict=False)]

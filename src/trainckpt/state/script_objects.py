"""Find the objects of the script's own classes in its variables, whose values are restored.

An early stopping counts the epochs without progress, a meter sums losses, a schedule of the
script's own counts its calls. No snapshot tracks these objects. Their plain attributes are stored
and restored, as those of callbacks are (`object_values`), also in objects that they hold.

Left out are what the Checkpointer tracks and the data of loaders, which have ways of their own. An
object that trained in another run last, in this process, is left as it is: its values are newer
than the snapshot's, such as the results of a script that trains several times.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Sampler

from trainckpt.data import randomness
from trainckpt.data.restored_numbers import data_namespaces
from trainckpt.state import script_randomness
from trainckpt.state.sketches import Sketcher, is_own_object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.state.attributes import WatchedObject
    from trainckpt.state.registry import Registry

PART = "script objects"  # no keyword can be spelled so
_MOST = 64  # objects
_ATTRIBUTES = 256  # of one object; one with more is left out
_LEFT_OUT = (nn.Module, optim.Optimizer, optim.lr_scheduler.LRScheduler)
_DATA = (DataLoader, Dataset, Sampler)
# Objects that have trained in this process, by id, and the run in which they did last.
_trained: dict[int, tuple[weakref.ref[object], str]] = {}


def find(registry: Registry) -> list[WatchedObject]:
    """Return the objects, each once, under the name of its outermost variable."""
    is_tracked = Sketcher(registry).is_tracked
    seen = {id(names) for state in registry.loaders for names in _data_of(state.loader.underlying)}
    queue = [
        (f"{scope}.{name}", value)
        for scope, names in script_randomness.scopes()
        for name, value in list(names.items())
        if not name.startswith("__")
    ]
    found: list[WatchedObject] = []
    for path, value in queue:
        if not is_own_object(value) or isinstance(value, (*_LEFT_OUT, *_DATA)):
            continue
        names: dict[str, Any] | None = randomness.names_of(value)
        if names is None or len(names) > _ATTRIBUTES or id(names) in seen or is_tracked(value):
            continue
        seen.add(id(names))
        # an object of another class under the same name is another object
        found.append(registry.watched.owner(f"{path}:{type(value).__qualname__}", value))
        if len(found) == _MOST:
            break
        queue += [(f"{path}.{name}", part) for name, part in list(names.items())]
    return found


def note_trained(objects: Iterable[object], run: str) -> set[int]:
    """Note that these objects train in this run; return the ids of those from another run."""
    from_others = set()
    for value in objects:
        known, last_run = _trained.get(id(value), (None, run))
        if known is not None and known() is value and last_run != run:
            from_others.add(id(value))
        with suppress(TypeError):  # its class has no place for a weak reference
            _trained[id(value)] = weakref.ref(value), run
    return from_others


def _data_of(loader: Any) -> list[dict[str, Any]]:
    """Return the attributes of a loader's dataset, transforms and collate_fn."""
    parts = ("dataset", "collate_fn")
    roots = {name: getattr(loader, name) for name in parts if hasattr(loader, name)}
    return [names for _, names in data_namespaces(roots)]

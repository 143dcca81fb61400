"""Anything with `state_dict` and `load_state_dict`: schedulers, scalers, metrics, the user's own.

A value of a type that cannot be stored without pickling it is refused when it is registered,
with the path to it. Functions held by LambdaLR and its like are not in a state_dict: the script
makes them again. A state_dict may hold live objects, as that of a scheduler around another one:
their own state is stored in their place, and a restore hands over those that are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from trainckpt.state.captured import Captured, Saved


class GenericState:
    """One tracked object that knows its own state.

    Attributes:
        implied: Tracked because it belongs to another tracked object. Snapshots of older releases
            lack it.
    """

    def __init__(self, name: str, target: Any, *, implied: bool = False) -> None:
        self.name = name
        self.target = target
        self.implied = implied

    def capture(self, out: Captured) -> None:
        """Add the object's `state_dict()`."""
        out.values[self.name] = _capture(self.target.state_dict(), self.name, self.name, out)

    def is_empty_in(self, out: Captured) -> bool:
        """Return True if nothing of the object was captured."""
        tree = out.values[self.name]
        return tree is None or tree == [] or (isinstance(tree, dict) and tree.get("of") == [])

    def restored(self, saved: Saved) -> list[Restored]:
        """Return what the object finds missing in its saved state."""
        return [Restored(self.name, How.NOT_KEPT, sentence) for sentence in self._lost(saved)]

    def _lost(self, saved: Saved) -> list[str]:
        if self.name not in saved.values:
            return [f"the state of {self.name} is not in the snapshot"]
        say = getattr(type(self.target), "__trainckpt_problems__", None)
        state = saved.values[self.name]
        return [] if say is None else list(say(self.target, saved.decode(state)))

    def apply(self, saved: Saved) -> None:
        """Hand the decoded state to the object's `load_state_dict`."""
        if self.implied and self.name not in saved.values:
            return
        _load(self.target, saved.values[self.name], saved)


def _capture(state: Any, path: str, group: str, out: Captured) -> Any:
    live = live_objects(state)
    if not live:
        return out.encode(state, path, group)
    plain = {key: value for key, value in state.items() if key not in live}
    states = {
        # of an optimizer nothing: it is tracked by itself, or kept by nobody
        key: None
        if isinstance(value, torch.optim.Optimizer)
        else _capture(value.state_dict(), f"{path}.{key}", group, out)
        for key, value in live.items()
    }
    return {"plain": out.encode(plain, path, group), "live": states}


def _load(target: Any, tree: Any, saved: Saved) -> None:
    target.load_state_dict(_decode(target, tree, saved))


def _decode(target: Any, tree: Any, saved: Saved) -> Any:
    if not (isinstance(tree, dict) and tree.keys() == {"plain", "live"}):
        return saved.decode(tree)
    there = live_objects(target.state_dict())
    if there.keys() != tree["live"].keys():
        raise UnusableSnapshot(
            f"a {type(target).__name__} held {sorted(tree['live'])} when it was saved, and holds "
            f"{sorted(there)} now"
        )
    for key, value in there.items():
        if tree["live"][key] is not None:
            _load(value, tree["live"][key], saved)
    return {**saved.decode(tree["plain"]), **there}


def live_objects(state: Any) -> dict[str, Any]:
    """Return key -> object of a state_dict that is no value, but knows its own state."""
    if type(state) is not dict:
        return {}
    return {
        key: value
        for key, value in state.items()
        if type(key) is str
        and not isinstance(value, (torch.Tensor, torch.nn.Module))
        and all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    }

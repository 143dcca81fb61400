"""Anything with `state_dict` and `load_state_dict`: schedulers, scalers, metrics, the user's own.

A value of a type that cannot be stored without pickling it is refused when it is registered,
with the path to it. Functions held by LambdaLR and its like are not in a state_dict: the script
makes them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
        out.values[self.name] = out.encode(self.target.state_dict(), self.name, self.name)

    def is_empty_in(self, out: Captured) -> bool:
        """Return True if nothing of the object was captured."""
        tree = out.values[self.name]
        return tree is None or tree == [] or (isinstance(tree, dict) and tree.get("of") == [])

    def lost(self, saved: Saved) -> list[str]:
        """What the object finds missing in its saved state, one sentence each."""
        if self.name not in saved.values:
            return [f"the state of {self.name} is not in the snapshot"]
        say = getattr(type(self.target), "__trainckpt_problems__", None)
        state = saved.values[self.name]
        return [] if say is None else list(say(self.target, saved.decode(state)))

    def apply(self, saved: Saved) -> None:
        """Hand the decoded state to the object's `load_state_dict`."""
        if self.implied and self.name not in saved.values:
            return
        self.target.load_state_dict(saved.decode(saved.values[self.name]))

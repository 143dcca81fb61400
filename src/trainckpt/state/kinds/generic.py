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
    """One tracked object that knows its own state."""

    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self.target = target

    def capture(self, out: Captured) -> None:
        """Add the object's `state_dict()`."""
        out.values[self.name] = out.encode(self.target.state_dict(), self.name, self.name)

    def apply(self, saved: Saved) -> None:
        """Hand the decoded state to the object's `load_state_dict`."""
        self.target.load_state_dict(saved.decode(saved.values[self.name]))

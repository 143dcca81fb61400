"""Capture and restore data loaders: the next batch, and every worker's randomness. See `data`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.state.captured import Captured, Saved


class LoaderState:
    """One tracked loader; its state is this rank's own."""

    def __init__(self, name: str, loader: TrackedLoader) -> None:
        self.name = name
        self.loader = loader

    def capture(self, out: Captured) -> None:
        """Add the loader's cursor and its workers' randomness."""
        out.values[self.name] = out.encode(self.loader.state(), self.name)

    def differences(self, saved: Saved) -> list[str]:
        """Return the reasons against the saved cursor for this loader."""
        state = saved.decode(saved.values[self.name])
        if saved.exact:
            return self.loader.differences(state)
        return self.loader.differences_in_other_world(state, saved.worlds)

    def apply(self, saved: Saved) -> None:
        """Move the loader to the saved position, or to the start of its window."""
        state = saved.decode(saved.values[self.name])
        if saved.exact:
            self.loader.load_state(state)
        else:
            self.loader.load_in_other_world(state)

"""Data loaders: which batch comes next, and the randomness of every worker. See `data`."""

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
        """What makes the saved cursor unusable for this loader."""
        state = saved.decode(saved.values[self.name])
        if saved.exact:
            return self.loader.differences(state)
        return self.loader.differences_elsewhere(state, saved.worlds)

    def apply(self, saved: Saved) -> None:
        """Make the loader go on where the saved one was, or at the start of its window."""
        state = saved.decode(saved.values[self.name])
        if saved.exact:
            self.loader.load_state(state)
        else:
            self.loader.load_elsewhere(state)

"""Capture and restore data loaders: the next batch, and every worker's randomness. See `data`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.format.changes import BATCH_SIZE, DATASET_LENGTH, SAMPLER, SCRIPT, Change

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.state.captured import Captured, Saved

# fact of a loader -> kind of change
_KINDS = {
    "batch_size": BATCH_SIZE,
    "dataset length": DATASET_LENGTH,
    "sampler": SAMPLER,
    "index sampler": SAMPLER,
}
_OF_WORLD = ("sampler", "index sampler")  # another number of ranks may need another one


class LoaderState:
    """One tracked loader; its state is this rank's own.

    Args:
        name: The loader's name.
        loader: The loader.
        choices: Kind of change -> the value that counts, for loaders made otherwise now.
    """

    def __init__(self, name: str, loader: TrackedLoader, choices: Mapping[str, str]) -> None:
        self.name = name
        self.loader = loader
        self._choices = choices

    def capture(self, out: Captured) -> None:
        """Add the loader's cursor and its workers' randomness."""
        out.values[self.name] = out.encode(self.loader.state(), self.name)

    def changes(self, saved: Saved) -> list[Change]:
        """Return what the script gives the loader otherwise now.

        The rest of an epoch is dealt in batches of any size over another number of ranks.
        """
        if self.name not in saved.values:
            return []
        changed = self.loader.changed_facts(saved.decode(saved.values[self.name]))
        return [
            Change(
                kind,
                self.name,
                str(changed[fact][0]),
                str(changed[fact][1]),
                self._choices[kind] if saved.exact else SCRIPT,
            )
            for fact, kind in _KINDS.items()
            if fact in changed and (saved.exact or fact not in _OF_WORLD)
        ]

    def differences(self, saved: Saved) -> list[str]:
        """Return the reasons against the saved cursor for this loader."""
        state = saved.decode(saved.values[self.name])
        if not saved.exact:
            return self.loader.differences_in_other_world(state, saved.worlds)
        accepted = self._accepted(state)
        if not accepted:
            return self.loader.differences(state)
        found = self.loader.differences(state, {*accepted, "sampler length"})
        if not state["in_pass"]:
            return found
        if accepted != {"batch_size"}:
            reason = "the snapshot lies inside an epoch, where another order cannot go on"
            return [*found, f"{self.name}: {reason}; resume from one at an epoch's end"]
        window = state.get("window")
        if window is not None and window["batches"] != state["batches"]:
            reason = "the snapshot lies inside an accumulation window, whose batches had one size"
            return [*found, f"{self.name}: {reason}; resume from one at a window's end"]
        return found + self.loader.differences_in_other_world(state, saved.worlds)

    def apply(self, saved: Saved) -> None:
        """Move the loader to the saved position, or to the start of its window."""
        state = saved.decode(saved.values[self.name])
        if saved.exact and not (state["in_pass"] and self._accepted(state)):
            self.loader.load_state(state)
        else:
            self.loader.load_in_other_world(state)

    def _accepted(self, state: dict[str, Any]) -> set[str]:
        """Return the changed facts for which the script's value counts."""
        changed = self.loader.changed_facts(state)
        return {
            fact
            for fact, kind in _KINDS.items()
            if fact in changed and self._choices[kind] == SCRIPT
        }

"""Check that a loader's samplers draw after a resume what they drew before, and report it if not.

A pure function of a capture (`sampler.capture`) draws the same order again. For the other samplers:

    states in mid-pass    of a sampler with a state_dict, such as priorities that the loop changes:
                          saved with each state, without workers, and loaded if not as saved
    plain attributes      of a sampler without one: a warning after a pass that changed some, and a
                          report if a resumed process has others than the saved one
    the order             is drawn again and compared by `LoaderSource`; the reports are made here
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainckpt.data import carried_state, sampler
from trainckpt.data.iterable import are_equal
from trainckpt.data.state_dict_methods import has_state, has_usable_state
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.data import DataLoader

    from trainckpt.format.exactness import Report


class SamplerChecks:
    """The checks of one loader's samplers.

    Args:
        tracked_places: Returns the id of each object with tracked attributes, and their names.
        with_dataset: Compare those of dataset and collate_fn, too: of a stream without a state.

    Attributes:
        changed: Paths of the attributes that changed over a pass.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        name: str,
        report: Report,
        *,
        tracked_places: Callable[[], Iterable[tuple[int, str]]],
        with_dataset: bool,
    ) -> None:
        self._loader = loader
        self._name = name
        self._report = report
        self._tracked_places = tracked_places
        self._with_dataset = with_dataset
        self._values_before: dict[str, Any] | None = None  # as the running pass began
        self.changed: set[str] = set()

    def begin_pass(self) -> None:
        """Take the values that `end_pass` compares."""
        self._values_before = self.values()

    def end_pass(self, changed_in_workers: Iterable[str] = ()) -> None:
        """Warn of attributes of unknown samplers and of a stream that changed over the pass."""
        before, self._values_before = self._values_before, None
        changed = [] if before is None else sampler.changed(before, self.values())
        self._warn_of_new(changed, "Give it state_dict and load_state_dict")
        self._warn_of_new(
            (f"{path} in workers that persist" for path in changed_in_workers),
            "Count passes in an integer named epoch, or leave out persistent_workers",
        )

    def _warn_of_new(self, changed: Iterable[str], advice: str) -> None:
        new = sorted(set(changed) - self.changed)
        self.changed.update(new)
        if new:
            warnings.warn(
                f"{self._name}: {', '.join(new)[:200]} changed over a pass, and is not kept: a "
                f"resume in a later one may bring other data. {advice}; if no order depends on "
                "it, nothing is lost",
                stacklevel=6,
            )

    def values(self) -> dict[str, Any]:
        """Return path -> value of the attributes of unknown samplers."""
        roots = sampler.unknown_samplers(self._loader)
        if self._with_dataset:
            data = {"dataset": self._loader.dataset, "collate_fn": self._loader.collate_fn}
            roots.update({name: one for name, one in data.items() if not has_usable_state(one)})
        tracked = tuple(
            f"{name}.{key}"
            for owner, key in self._tracked_places()
            for name, root in roots.items()
            if id(root) == owner
        )
        values = dict(carried_state.plain_values(roots))
        return {path: value for path, value in values.items() if path not in tracked}

    def states(self) -> dict[str, Any]:
        """Return the states of samplers; without workers, which draw ahead of the loop."""
        with suppress(Exception):  # not every sampler has one in mid-pass
            return {} if self._loader.num_workers else sampler.states(self._loader)
        return {}

    def load_states(self, saved: dict[str, Any]) -> bool:
        """Load states of samplers that are not as saved; return True if there were any."""
        now = self.states() if saved else {}
        if not saved or are_equal(now, saved):
            return False
        sampler.load_states(self._loader, saved)
        if not are_equal(self.states(), saved):  # it takes effect later, if at all
            sampler.load_states(self._loader, now)
            return False
        samplers = dict(sampler.samplers_of(self._loader))
        owners = " and ".join(type(samplers[name]).__qualname__ for name in saved)
        self._report(Restored(self._name, How.OWN_STATE, f"{owners}'s own state"))
        return True

    def compare_inputs(self, saved: dict[str, Any]) -> None:
        """Report attributes of the samplers that are not what they were at the save."""
        now = sampler.inputs(self._loader)
        paths = sorted(path for path, value in saved.items() if now.get(path, value) != value)
        if paths:
            self._report_not_kept(
                f"{', '.join(paths)[:200]} is not what it was at the save, and no order is kept "
                "that depends on it; give the sampler state_dict and load_state_dict, or set it "
                "between passes only and track it by trainckpt.Attributes. Data may differ from "
                "the uninterrupted run"
            )

    def report_order(self, batches: int, *, is_shorter: bool) -> None:
        """Report that the order drawn again is not the one these batches were trained in."""
        names = self._suspected_names()
        difference = (
            f"{batches} batches were trained, and the order of {names} has fewer now"
            if is_shorter
            else f"the order that {names} begins with is not the one that {batches} batches were "
            "trained in"
        )
        if any(has_state(one) for one in self._suspects().values()):
            advice = (
                "it depends on what the loop changes after the pass has begun; draw the whole "
                "order at the head of __iter__"
            )
        else:
            advice = (
                "it depends on more than seed, epoch and generators, or reading a sample draws "
                "from the sampler's generator too; give the sampler state_dict "
                "and load_state_dict"
            )
        self._report_not_kept(f"{difference}: {advice}. Data may differ from the uninterrupted run")

    def report_drawn_ahead(self, batches: int) -> None:
        """Report that the lists drawn ahead for the workers are not those before the stop."""
        self._report_not_kept(
            f"{self._suspected_names()} had drawn the next {batches} batches ahead for the "
            "workers, and draws others now: the loop draws from the same generator. Draw the whole "
            "order at the head of __iter__, or from a generator of the sampler's own. Data differs "
            "from the uninterrupted run"
        )

    def _report_not_kept(self, reason: str) -> None:
        self._report(Restored(self._name, How.NOT_KEPT, f"{self._name}: {reason}"))

    def _suspects(self) -> dict[str, Any]:
        """Return the samplers whose order may depend on more than is kept."""
        return sampler.unknown_samplers(self._loader) or dict(sampler.samplers_of(self._loader))

    def _suspected_names(self) -> str:
        return " and ".join(type(one).__qualname__ for one in self._suspects().values())

"""Arrival: puts a snapshot's state back, at the moments where that is exact.

on resuming         everything but the random generators, so the script sees it at once
a loader that is    its position, when the script registers it
  registered late
first boundary      the random generators; and, if the snapshot was taken at the entry of an
                    evaluation, everything once more at that entry: what the script did on its
                    way there (a scheduler's step, say) was in the snapshot already
before the first    the random generators once more, after the loader's iterator was built,
  batch             which draws from them: now they are restored, last of all
boundary after it   which parameters are frozen is the script's own doing: it is said where that is
                    not as it was saved here and at the first boundary; some loops set it anew in
                    each micro-batch. So is wrapping a model in DDP: one that was made since does
                    not add gradients as the saved one did
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.cursor import Cursor
from trainckpt.lifecycle.run.log import logger
from trainckpt.lifecycle.run.slips import NO_BOUNDARY
from trainckpt.ranks import talking
from trainckpt.state import apply, attributes
from trainckpt.state.capture import LOADERS
from trainckpt.state.kinds import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.lifecycle.run.position import Position
    from trainckpt.state.captured import Saved
    from trainckpt.state.kinds.loader import LoaderState
    from trainckpt.state.registry import Registry


FREED_FROM_BYTES = 64 << 20  # what is less is given back in no time
_FREED_AFTER_S = 0.005  # whoever is still in a call with it has left that


class Otherwise(NamedTuple):
    """How training has gone on otherwise than it was saved.

    Attributes:
        gradients: Parameter that was frozen and is not, or vice versa -> whether it was then.
        wrappers: Models in a DDP that knows nothing of what the saved one kept to itself.
        attributes: Of callbacks, that no state_dict holds, each with its values.
    """

    gradients: dict[str, bool]
    wrappers: list[str]
    attributes: Sequence[str] = ()


AS_SAVED = Otherwise({}, [])


class Arrival:
    """One resume on its way to the boundary where its snapshot was taken.

    Attributes:
        under_way: Something has still to be restored, or looked at.
        to_come: The boundary at which the snapshot was taken has not been reached; until then
            nothing can be saved.
    """

    def __init__(self, registry: Registry, position: Position) -> None:
        self.under_way = self.to_come = False
        self._registry = registry
        self._position = position
        self._saved: Saved | None = None
        self._at = Cursor()
        self._window: Cursor | None = None
        self._skipping: TrackedLoader | None = None  # a pass that was over when it was saved
        self._otherwise: dict[str, bool] = {}  # frozen then and not now, or vice versa
        self._attributes: list[str] = []  # of callbacks, otherwise than saved
        self._hidden: list[str] = []  # models whose DDP is to be the one that it was given to

    def begin(
        self, saved: Saved, at: Cursor, window: Cursor | None, loader: TrackedLoader | None
    ) -> None:
        """Apply everything but the random generators. Collective under DDP and FSDP2.

        Args:
            saved: What was read.
            at: Where the run goes on.
            window: Where the window began that is open there.
            loader: The one that the boundary is in.
        """
        apply.apply(self._registry, saved)
        self._saved, self._at, self._window = saved, at, window
        self.under_way = self.to_come = True
        self._continue_at(loader)

    def register_late(self, state: LoaderState, loader: TrackedLoader | None) -> None:
        """A loader was registered after resuming; `loader` if the boundary is inside it."""
        saved = self._saved
        if saved is None or state.name not in saved.values.get(LOADERS, ()):
            return
        differences = state.differences(saved)
        if differences:
            raise StateMismatch(
                f"{state.name} is not the loader of the snapshot at {self._at}",
                differences,
                hint=apply.OTHER_DATA,
            )
        state.apply(saved)
        self._continue_at(loader)

    def reach(self, *, evaluation: int, has_loader: bool) -> Otherwise:
        """A boundary was reached: the entry of so many evaluations, or 0 where training goes on.

        Returns what was seen once it has.
        """
        saved, wanted = self._saved, self._at.evaluations
        if saved is None or not self.to_come:
            return self._look_again()  # training went on
        self._check_loaders(saved)
        if evaluation and evaluation != wanted:
            return AS_SAVED  # one that lies before the snapshot's boundary is repeated
        if wanted and not evaluation:
            logger.warning("the evaluation that the snapshot was taken at was not entered")
        # A loader's own boundary lies inside it: there it has its position already.
        apply.apply(self._registry, saved, again=True, loaders=bool(evaluation))
        self._position.restore(self._at, window=self._window, arrived=True)
        apply.apply_rng(self._registry, saved)
        self._otherwise = frozen.changed(self._registry, saved)
        self._hidden = apply.hidden_in_ddp(saved)
        self._attributes = attributes.not_restored(self._registry.watched, saved, of_callbacks=True)
        self.to_come = False
        if evaluation or not has_loader:
            self._end()
        return AS_SAVED

    def must_not_undo(self, steps: int) -> None:
        """The script is done, and has taken so many steps since the resume.

        On the way to the snapshot's boundary a script repeats what it did after the pass before;
        else it has trained past it, and the snapshot would be put over what it trained.

        Raises:
            ConfigurationError: it has trained, and never came to that boundary.
        """
        was_on_its_way = self._skipping is not None and not self._skipping.skips_next_pass
        if self.to_come and steps and not was_on_its_way:
            raise ConfigurationError(
                f"the resumed run took {steps} optimizer steps and never reached the boundary that "
                f"its snapshot was taken at ({self._at}): what they trained is not saved, since it "
                "does not go on from there exactly; the snapshot stands",
                hint=f"{NO_BOUNDARY}; steps that only warm the script up belong before the "
                "Checkpointer is made",
            )

    def before_first_fetch(self) -> bool:
        """The loader's iterator has been built, and nothing was fetched yet.

        Returns whether the random generators were put back.
        """
        if self._saved is None:
            return False
        apply.apply_rng(self._registry, self._saved)
        self._end()
        return True

    def _look_again(self) -> Otherwise:
        if self._saved is not None:
            self._end()  # without the loader that the boundary is in
        if self._position.cursor.micro_batches == self._at.micro_batches:
            return AS_SAVED  # an epoch's end
        otherwise, self._otherwise, self.under_way = self._otherwise, {}, False
        return Otherwise(
            frozen.still(self._registry, otherwise),
            apply.in_another_ddp(self._registry, self._hidden),
            self._attributes,
        )

    def _continue_at(self, loader: TrackedLoader | None) -> None:
        self._position.restore(self._at, window=self._window)
        if loader is not None and self._position.pass_is_over:
            loader.skip_next_pass()
            self._skipping = loader

    def _check_loaders(self, saved: Saved) -> None:
        missing = sorted(apply.loaders_to_come(self._registry, saved))
        if missing:
            raise StateMismatch(
                "the script trains without a loader that the snapshot has",
                [f"{name} is in the snapshot, and not tracked now" for name in missing],
                hint="pass it as loader=, or wrap it with ckpt.loader(...) before training",
            )

    def _end(self) -> None:
        apply.settled(self._registry)
        saved, self._saved, self.to_come = self._saved, None, False
        self.under_way = bool(self._otherwise or self._hidden or self._attributes)
        if saved is not None and sum(t.nbytes for t in saved.tensors.values()) > FREED_FROM_BYTES:
            free([saved])


def free(last: list[Any]) -> None:
    """Give back the memory of tensors beside training: a large state takes a tenth of a second.

    The process waits for it when it ends: a thread that is ended there would abort it.

    Args:
        last: Has the last references; it is empty then.
    """
    freeing = talking.thread(_free, "trainckpt-free", last)
    try:
        freeing.start()
    except RuntimeError:  # no thread: then it is given back here
        last.clear()


def _free(last: list[Any]) -> None:
    time.sleep(_FREED_AFTER_S)
    last.clear()

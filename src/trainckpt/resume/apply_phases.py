"""Put a snapshot's state back in phases, each at the moment where it is exact.

on resuming         everything but the random generators, visible to the script at once
a loader registered its position, on registration
  later
first boundary      the random generators, and the training mode of each module: modes set after
                    this boundary count, in each batch, say. For a snapshot taken at the entry of an
                    evaluation, everything once more at that entry: the script's actions on the way
                    there (a scheduler's step, say) are in the snapshot already. Attributes that are
                    not restored are compared: the script sets some at the head of an epoch.
                    From there on, the first access to one that differs is observed
before the first    the random generators once more, last of all: the construction of the
  batch             loader's iterator draws from them
boundary after it   differences caused by the script are reported, not undone: parameters whose
                    requires_grad differs from the saved value, here and at the first boundary
                    (some loops set it in each micro-batch); attributes that the batch did not
                    set before it read them; and a model wrapped in DDP since the resume, whose
                    gradients add up differently. All is compared by then
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from trainckpt.attempt.log import logger
from trainckpt.attempt.progress_counter import NO_BOUNDARY
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.format.cursor import Cursor
from trainckpt.ranks import threads
from trainckpt.state import apply, attributes
from trainckpt.state.capture import LOADERS
from trainckpt.state.first_access import FirstAccesses
from trainckpt.state.script_variables import Differing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.attempt.progress_counter import ProgressCounter
    from trainckpt.data.loader import TrackedLoader
    from trainckpt.format.changes import Change
    from trainckpt.state.adapters.loader import LoaderState
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry


FREED_FROM_BYTES = 64 << 20  # freeing less takes no noticeable time
_FREED_AFTER_S = 0.005  # time for calls that still use it to return


class ResumeDrift(NamedTuple):
    """Differences between the resumed training and the saved one.

    Attributes:
        gradients: Parameter whose requires_grad changed -> True if it was frozen when saved.
        wrappers: Models in a DDP without the internal state of the saved DDP.
        attributes: Attributes outside every state_dict, each with its values.
        of_callbacks: The same of callbacks.
        tensors: Attributes with tensors too large for the snapshot.
        generators: Variables and attributes whose random generator was not restored.
        loaders: Untracked loaders that are not where they were, each with its position.
        variables: Variables of the script with tensors, and modules in them, that are otherwise.
        numbers: All other variables of the script that are otherwise: often only printed.
    """

    gradients: dict[str, bool]
    wrappers: list[str]
    attributes: Sequence[str] = ()
    of_callbacks: Sequence[str] = ()
    tensors: Sequence[str] = ()
    generators: Sequence[str] = ()
    loaders: Sequence[str] = ()
    variables: Sequence[str] = ()
    numbers: Sequence[str] = ()


AS_SAVED = ResumeDrift({}, [])


class PhasedRestore:
    """One resume on its way to the boundary of its snapshot.

    Attributes:
        under_way: Something has still to be restored or compared.
        to_come: The snapshot's boundary has not been reached; nothing can be saved before it.
    """

    def __init__(self, registry: Registry, position: ProgressCounter) -> None:
        self.under_way = self.to_come = False
        self._registry = registry
        self._position = position
        self._saved: Saved | None = None
        self._at = Cursor()
        self._window: Cursor | None = None
        self._skipping: TrackedLoader | None = None  # loader with passes of the epoch to skip
        self._otherwise: dict[str, bool] = {}  # frozen then and not now, or vice versa
        self._attributes: list[str] = []  # that differ, and may be set before they are read
        self._of_callbacks: list[str] = []
        self._variables = Differing([], [])  # that differ, and may be set before they are read
        self._accesses = FirstAccesses({})  # to these
        self._hidden: list[str] = []  # models that must be wrapped in the same DDP again

    def begin(
        self, saved: Saved, at: Cursor, window: Cursor | None, loader: TrackedLoader | None
    ) -> None:
        """Apply everything but the random generators. Collective under DDP and FSDP2.

        Args:
            saved: The state read from the snapshot.
            at: Cursor of the snapshot.
            window: Cursor at the start of the open window.
            loader: The loader that contains the boundary.
        """
        apply.apply(self._registry, saved)
        self._saved, self._at, self._window = saved, at, window
        self.under_way = self.to_come = True
        self._continue_at(loader)

    def register_late(self, state: LoaderState, loader: TrackedLoader | None) -> list[Change]:
        """Continue a loader registered after resuming; `loader` if the boundary is inside it.

        Returns what the script gives it otherwise than when it was saved.
        """
        saved = self._saved
        if saved is None or state.name not in saved.values.get(LOADERS, ()):
            return []
        differences = state.differences(saved)
        if differences:
            raise StateMismatch(
                f"{state.name} differs from the loader of the snapshot at {self._at}",
                differences,
                hint=apply.OTHER_DATA,
            )
        changes = state.changes(saved)
        state.apply(saved)
        self._continue_at(loader)
        return changes

    def reach(self, *, evaluation: int, has_loader: bool) -> ResumeDrift:
        """Handle a boundary: the entry of evaluation number `evaluation`, or 0 for training.

        Returns the differences seen once training has gone on.
        """
        saved, wanted = self._saved, self._at.evaluations
        if saved is None or not self.to_come:
            return self._look_again()  # training went on
        self._check_loaders(saved)
        if evaluation and evaluation != wanted:
            return AS_SAVED  # an earlier evaluation is repeated
        if wanted and not evaluation:
            logger.warning(
                "the script did not enter the evaluation in which the snapshot was taken"
            )
        # At a loader's own boundary the loader has its position already.
        apply.apply(self._registry, saved, again=True, loaders=bool(evaluation))
        if not evaluation and self._skipping is None:  # else the script only repeats its work
            self._say_undone()
        self._position.restore(self._at, window=self._window, arrived=True)
        with self._registry.unchanged():
            if bool(evaluation) == bool(wanted) and not self._registry.is_over:
                apply.apply_modes(self._registry, saved)
            apply.apply_rng(self._registry, saved)
            self._otherwise = {
                name: was
                for model in self._registry.models
                for name, was in model.frozen_otherwise(saved).items()
            }
        self._hidden = apply.hidden_in_ddp(saved)
        self._registry.callback_values.restore(saved)
        self._registry.script_variables.restore(saved)
        watched = self._registry.watched
        variables = self._registry.script_variables.differing(saved)
        self._attributes = attributes.not_restored(watched, saved)
        self._of_callbacks = attributes.not_restored(watched, saved, of_callbacks=True)
        self._variables = variables
        if not self._registry.is_over:
            places = watched.places([*self._attributes, *self._of_callbacks])
            of_variables = [*variables.tensors, *variables.numbers]
            places |= self._registry.script_variables.places(of_variables)
            self._accesses = FirstAccesses(places)
        later = self._accesses.names
        drift = ResumeDrift(
            {},
            [],
            attributes=[name for name in self._attributes if name not in later],
            of_callbacks=[name for name in self._of_callbacks if name not in later],
            tensors=self._registry.plain_tensors.differing(saved),
            generators=apply.generators_not_restored(self._registry, saved),
            loaders=self._registry.open_loaders.lost(saved),
            variables=[name for name in variables.tensors if name not in later],
            numbers=[name for name in variables.numbers if name not in later],
        )
        self.to_come = False
        if evaluation or not has_loader:
            self._end()
        return drift

    def enter_epoch(self, epoch: int) -> None:
        """Restore the generators of the beginning of the epoch that the run resumes in."""
        if self._saved is not None and self.to_come:
            self._registry.epoch_head.restore(self._saved, epoch)

    def must_not_undo(self, steps: int) -> None:
        """Refuse to finish if the script trained `steps` steps and never reached the snapshot's
        boundary.

        On the way to that boundary a script repeats its work after the preceding pass. Otherwise it
        has trained past it, and applying the snapshot would overwrite that training.

        Raises:
            ConfigurationError: the script trained and never came to that boundary.
        """
        was_on_its_way = self._skipping is not None and not self._skipping.skips_next_pass
        if self.to_come and steps and not was_on_its_way:
            raise ConfigurationError(
                f"the resumed run took {steps} optimizer steps without reaching the boundary of "
                f"its snapshot ({self._at}). Their work is not saved, since it is not an exact "
                "continuation; the snapshot stands",
                hint=f"{NO_BOUNDARY}; take warm-up steps before the Checkpointer is made",
            )

    def before_first_fetch(self) -> bool:
        """Restore the random generators after the loader's iterator is built and before its
        first fetch.

        Returns True if the random generators were restored.
        """
        if self._saved is None:
            return False
        apply.apply_rng(self._registry, self._saved)
        self._end()
        return True

    def _say_undone(self) -> None:
        """Warn of optimizer options that the script set since the resume, and that are as saved
        again."""
        for optimizer in self._registry.optimizers:
            if optimizer.undone:
                logger.warning(
                    "%s: %s. It was set between the resume and the first batch, and is as saved "
                    "again. For another value, set it in the loop, once a batch is there",
                    optimizer.name,
                    ", ".join(optimizer.undone[:5]),
                )

    def _look_again(self) -> ResumeDrift:
        if self._saved is not None:
            self._end()  # the boundary's loader is missing
        if self._position.cursor.micro_batches == self._at.micro_batches:
            if self._registry.is_over:
                self._accesses.end()
            return AS_SAVED  # an epoch's end
        not_set = self._accesses.end()
        otherwise, self._otherwise, self.under_way = self._otherwise, {}, False
        now = self._registry.model_parameters()
        still = {n: was for n, was in otherwise.items() if n in now and now[n].requires_grad == was}
        return ResumeDrift(
            still,
            apply.in_another_ddp(self._registry, self._hidden),
            attributes=[name for name in self._attributes if name in not_set],
            of_callbacks=[name for name in self._of_callbacks if name in not_set],
            variables=[name for name in self._variables.tensors if name in not_set],
            numbers=[name for name in self._variables.numbers if name in not_set],
        )

    def _continue_at(self, loader: TrackedLoader | None) -> None:
        self._position.restore(self._at, window=self._window)
        if loader is None:
            return
        passes = max(loader.earlier_passes, self._position.pass_is_over)
        if passes:
            loader.skip_passes(passes)
            self._skipping = loader

    def _check_loaders(self, saved: Saved) -> None:
        missing = sorted(apply.loaders_to_come(self._registry, saved))
        if missing:
            raise StateMismatch(
                "the script lacks a loader of the snapshot",
                [f"{name} is in the snapshot, but not tracked now" for name in missing],
                hint="pass it as loader=, or wrap it with ckpt.loader(...) before training",
            )

    def _end(self) -> None:
        apply.settled(self._registry)
        saved, self._saved, self.to_come = self._saved, None, False
        if saved is not None and sum(t.nbytes for t in saved.tensors.values()) > FREED_FROM_BYTES:
            free([saved])


def free(last: list[Any]) -> None:
    """Free the tensors' memory on a thread beside training: a large state takes a tenth of a
    second.

    The process waits for this thread at exit: ending it there would abort the process.

    Args:
        last: List with the last references; empty afterwards.
    """
    freeing = threads.thread(_free, "trainckpt-free", last)
    try:
        freeing.start()
    except RuntimeError:  # no thread can start: free it on this one
        last.clear()


def _free(last: list[Any]) -> None:
    time.sleep(_FREED_AFTER_S)
    last.clear()

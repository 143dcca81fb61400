"""Keep the randomness of the script itself: its generators, and draws outside of the loaders.

`EpochHead` and `EarlyDraws`, below, see draws between two batches. The rest of this file is about
generators in variables.

A training loop may draw from `rng = numpy.random.default_rng(0)` at the top of the script or in its
main function. No tracked object holds it, so a snapshot saves its state under the variable's name:
`script.rng` or `script.main.rng`. The resume restores it with the global generators, last of all.
So it is for those inside a variable's object, if its class or function belongs to the script:
`script.settings.rng`.

Variables are those of the `__main__` module and of its functions on the call stack. Only the main
thread has that stack. Generators that tracked loaders, models and callbacks hold are left to them.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from trainckpt.data import randomness
from trainckpt.format.exactness import How, Restored
from trainckpt.state.live_names import live_names

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from trainckpt.format.exactness import Report
    from trainckpt.state.captured import Captured, Saved
    from trainckpt.state.registry import Registry


GENERATORS_PART = "script generators"  # no keyword can be spelled so
SCRIPT = "script"  # the name of its own variables
_TRAINERS = frozenset(("lightning", "pytorch_lightning", "transformers"))  # with loops of their own


def capture(registry: Registry, out: Captured) -> None:
    """Add the state of every generator in a variable of the script."""
    if states := randomness.capture(variables(registry)):
        out.values[GENERATORS_PART] = out.encode(states, GENERATORS_PART)


def restore(registry: Registry, saved: Saved) -> None:
    """Restore the generators in the script's variables; `lost` names the others."""
    randomness.restore(variables(registry), _states(saved), "the script")


def lost(registry: Registry, saved: Saved) -> list[str]:
    """Return the saved names whose generator is missing or of another kind, after `restore`.

    A variable that is not set yet, and will be before it is read, needs none.
    """
    live = randomness.capture(variables(registry))
    found = sorted(name for name, state in _states(saved).items() if live.get(name) != state)
    return [name for name in found if not _is_set_anew(name)] if found else []


def _is_set_anew(path: str) -> bool:
    """Return True if the variable is unset, and the running code sets it before it reads it."""
    innermost_first = reversed(frames())
    scope, frame = next(
        (each for each in innermost_first if path.startswith(f"{each[0]}.")), ("", None)
    )
    name = re.split(r"[.\[]", path[len(scope) + 1 :])[0]
    return frame is not None and name not in frame.f_locals and name not in live_names(frame)


def _states(saved: Saved) -> dict[str, bytes]:
    tree = saved.values.get(GENERATORS_PART)
    return {} if tree is None or not saved.is_own else saved.decode(tree)


def scopes() -> list[tuple[str, dict[str, Any]]]:
    """Return name and variables of the script, and of its functions on the main thread's stack."""
    if threading.current_thread() is not threading.main_thread():
        return []
    functions = [(name, frame.f_locals) for name, frame in frames() if name != SCRIPT]
    return [(SCRIPT, vars(sys.modules["__main__"])), *functions]


def frames() -> list[tuple[str, FrameType]]:
    """Return name and frame of the script's code on the main thread's stack, outermost first."""
    if threading.current_thread() is not threading.main_thread():
        return []
    script, stack = vars(sys.modules["__main__"]), []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals is script:
            stack.append(frame)
        frame = frame.f_back
    found, calls = [], Counter[str]()
    for each in reversed(stack):
        function = each.f_code.co_name
        again = calls[function] or ""  # a function that calls itself
        calls[function] += 1
        name = SCRIPT if function == "<module>" else f"{SCRIPT}.{function}{again}"
        found.append((name, each))
    return found


def is_plain_loop() -> bool:
    """Return True unless the loop is a trainer's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _TRAINERS:
            return False
        frame = frame.f_back
    return True


def variables(registry: Registry) -> dict[str, Any]:
    """Return name -> generator; one object has one name, that of the outermost variable."""
    named = randomness.find_own(
        {
            f"{scope}.{name}": value
            for scope, names in scopes()
            for name, value in list(names.items())
            if not name.startswith("__")
        }
    )
    if not named:
        return {}
    seen = {id(generator) for generator in registry.watched.generators().values()}
    seen.update(map(id, randomness.find(_roots(registry))))
    return {name: generator for name, generator in named.items() if id(generator) not in seen}


def _roots(registry: Registry) -> dict[str, Any]:
    return {state.name: state.loader.underlying for state in registry.loaders}


# ---- draws at the head of an epoch
#
# Keep the random generators as they were when the running epoch began, if its head draws.
#
# A script may draw at the head of an epoch, before the first batch: a permutation, a size, a mask.
# A resume in the middle of that epoch runs the head again. Order of events:
#
#     ckpt.epochs()    record the generators before each epoch; put back the saved ones before the
#                      epoch resumed in
#     first boundary   drop the record if they are unchanged: the head drew nothing, and snapshots
#                      need not hold it. A resume then restores the generators of the snapshot


EPOCH_HEAD_PART = "epoch head"  # no keyword can be spelled so


class EpochHead:
    """The generators of one rank before the running epoch.

    Attributes:
        is_open: The epoch's first training boundary has not been reached.
    """

    def __init__(self, registry: Registry) -> None:
        self.is_open = False
        self._registry = registry
        self._recorded: dict[str, Any] | None = None

    def begin(self, epoch: int) -> None:
        """Record the generators before the head of this epoch runs."""
        self._recorded = {"epoch": epoch, **generator_states(self._registry)}
        self.is_open = True

    def end(self) -> None:
        """Drop the record if the head drew nothing."""
        self.is_open = False
        if self._recorded is not None and unchanged(self._registry, self._recorded):
            self._recorded = None

    def capture(self, out: Captured) -> None:
        """Add the record, if there is one."""
        if self._recorded is not None:
            out.values[EPOCH_HEAD_PART] = out.encode(self._recorded, EPOCH_HEAD_PART)

    def restore(self, saved: Saved, epoch: int) -> None:
        """Restore the generators if the snapshot was taken in this epoch, by this rank."""
        tree = saved.values.get(EPOCH_HEAD_PART)
        if tree is None or not saved.is_own:
            return
        head = saved.decode(tree)
        if head["epoch"] == epoch:
            randomness.restore(self._registry.watched.generators(), head["objects"], "")
            randomness.restore(variables(self._registry), head["script"], "")
            randomness.set_main_rng(head["main"])


def generator_states(registry: Registry) -> dict[str, Any]:
    """Return the states of the global generators, of those in objects, and of the script's."""
    return {
        "main": randomness.packed_rng(),
        "objects": randomness.capture(registry.watched.generators()),
        "script": randomness.capture(variables(registry)),
    }


def unchanged(registry: Registry, before: dict[str, Any]) -> bool:
    """Return True if no generator of an earlier result of `generator_states` has drawn since."""
    now = generator_states(registry)
    # names may have come: those of functions that run by now
    return all(before[part].items() <= now[part].items() for part in now)


# ---- draws before each batch
#
# Detect scripts that draw random numbers before they ask for each batch.
#
# As in `random.choice(loaders)` before `next(iterator)`. The snapshot is taken inside that `next`,
# so a resumed script draws again, from the generators as it seeded them. A for-loop runs no line of
# the script between `iter()` and its first batch. So the generators are compared
#
#     from iter() to the first batch     if they have changed, the script calls `next` itself
#     from an optimizer's step to the    if they have changed after each of the first steps too, it
#     next batch                         draws before each batch, and not once at the beginning
#
# Afterwards nothing is compared.


_STEPS = 3
REASON = (
    "random numbers are drawn before each batch is asked for, as in random.choice(loaders) before "
    "next(iterator): a resume draws them again, from the generators as the script seeds them, and "
    "trains with other numbers. Draw them once the batch is there, those for the next batch too"
)


class EarlyDraws:
    """Compares the generators of one attempt at its first steps.

    Attributes:
        is_over: Nothing is compared any more.
    """

    def __init__(self, registry: Registry, report: Report) -> None:
        self.is_over = False
        self._registry, self._report = registry, report
        self._before: dict[str, Any] | None = None  # generators at the last iter() or step
        self._steps = 0
        self._hook: RemovableHandle | None = None

    def on_iter(self) -> None:
        """Note that the script asks a tracked loader for an iterator."""
        if self._hook is None:
            self._record()

    def before_batch(self, *, is_leader: bool) -> None:
        """Note that the script asks for a batch; `is_leader`: of the loader with the boundaries."""
        before, self._before = self._before, None
        drew = before is not None and not unchanged(self._registry, before)
        if self._hook is None:
            if drew:
                self._hook = register_optimizer_step_post_hook(self._record)
            elif is_leader:
                self.is_over = True
        elif drew:
            self._steps += 1
            if self._steps == _STEPS:
                self._end()
                self._report(Restored("random numbers", How.NOT_KEPT, REASON))
        elif before is not None:
            self._end()

    def _record(self, *_: Any) -> None:
        self._before = generator_states(self._registry)

    def _end(self) -> None:
        self.is_over = True
        if self._hook is not None:
            self._hook.remove()

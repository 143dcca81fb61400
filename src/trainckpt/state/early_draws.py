"""Detect scripts that draw random numbers before they ask for each batch.

As in `random.choice(loaders)` before `next(iterator)`. The snapshot is taken inside that `next`, so
a resumed script draws again, from the generators as it seeded them. A for-loop runs no line of the
script between `iter()` and its first batch. So the generators are compared

    from iter() to the first batch     if they have changed, the script calls `next` itself
    from an optimizer's step to the    if they have changed after each of the first steps too, it
    next batch                         draws before each batch, and not once at the beginning

Afterwards nothing is compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from trainckpt.format.exactness import How, Restored
from trainckpt.state import epoch_head

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from trainckpt.format.exactness import Report
    from trainckpt.state.registry import Registry

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
        drew = before is not None and not epoch_head.unchanged(self._registry, before)
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
        self._before = epoch_head.generators(self._registry)

    def _end(self) -> None:
        self.is_over = True
        if self._hook is not None:
            self._hook.remove()

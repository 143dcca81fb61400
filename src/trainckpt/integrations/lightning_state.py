"""Lightning's loops as one tracked object: counters, flags, and what self.log has summed up.

The boundary lies inside the fetch of a training batch, so both ends of a resume are the same place
in Lightning's code: there every counter is simply put back to what it was. The new process gets
there as a new fit does, not through Lightning's own restart stages; all it needs on the way is the
right epoch. Hence two loads:

    enter    before the fit loop runs: the counters; epochs as they are between two of them
    arrive   at the first boundary: all of it. Of a snapshot taken when the fit was over nothing,
             since what follows is a new epoch
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import StateMismatch
from trainckpt.integrations.lightning_needs import is_a, part_of
from trainckpt.integrations.lightning_results import read_results, write_results

if TYPE_CHECKING:
    from collections.abc import Iterator

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class LoopState:
    """Where the Trainer's fit loop is; tracked under the name "trainer"."""

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._accumulate = _accumulation(trainer)
        self._loads = 0
        self._progress = part_of(trainer, "loops.progress")._BaseProgress
        self._loop = part_of(trainer, "loops.loop")._Loop

    def state_dict(self) -> dict[str, Any]:
        """All counters and logged values, as they are at a boundary."""
        trainer, fit = self._trainer, self._trainer.fit_loop
        connector = trainer._logger_connector
        return {
            "world": trainer.world_size,
            "progress": {path: p.state_dict() for path, p in self._counters(fit, "fit")},
            "batches_that_stepped": fit.epoch_loop._batches_that_stepped,
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "accumulate_configured": self._accumulate,
            "first_iteration": connector._first_loop_iter,
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "results": read_results(fit.epoch_loop._results),
        }

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        if self._accumulates_as(saved):
            return []
        then, now = _shown(saved["accumulate_configured"]), _shown(self._accumulate)
        return [f"accumulate_grad_batches was {then}, is {now}"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Enter, at the first call; arrive, at the second.

        Raises:
            StateMismatch: another number of ranks: Lightning's counters are those of one rank.
        """
        if state["world"] != self._trainer.world_size:
            raise StateMismatch(
                "a fit of Lightning cannot go on with another number of ranks",
                [f"it had {state['world']} ranks, and has {self._trainer.world_size}"],
                hint=f"start it with {state['world']} ranks, or begin a new run from its weights: "
                "init_from",
            )
        self._loads += 1
        if self._loads == 1:
            self._enter(state)
        elif _inside_an_epoch(state):
            self._arrive(state)

    def _enter(self, state: dict[str, Any]) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        self._put_counters(state)
        for part in (fit.epoch_progress.total, fit.epoch_progress.current):
            part.ready = part.started = part.completed = part.processed
        fit.epoch_loop._batches_that_stepped = state["batches_that_stepped"]
        trainer.should_stop = state["should_stop"]
        self._put_metrics(state)

    def _arrive(self, state: dict[str, Any]) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        self._put_counters(state)
        fit.epoch_loop._batches_that_stepped = state["batches_that_stepped"]
        trainer.should_stop = state["should_stop"]
        if self._accumulates_as(state):  # else the script wants another from here on
            trainer.accumulate_grad_batches = state["accumulate"]
        trainer._logger_connector._first_loop_iter = state["first_iteration"]
        self._put_metrics(state)
        write_results(trainer, fit.epoch_loop._results, state["results"])
        fetched = fit.epoch_loop.batch_progress.current.ready
        fit._data_fetcher.fetched = fetched
        fit._combined_loader._iterator._idx = fetched

    def _accumulates_as(self, state: dict[str, Any]) -> bool:
        """Whether it was configured so then; an older snapshot does not know it."""
        return bool(state.get("accumulate_configured", self._accumulate) == self._accumulate)

    def _put_counters(self, state: dict[str, Any]) -> None:
        for path, progress in self._counters(self._trainer.fit_loop, "fit"):
            if path in state["progress"]:
                progress.load_state_dict(state["progress"][path])

    def _put_metrics(self, state: dict[str, Any]) -> None:
        for name in _METRICS:
            setattr(self._trainer._logger_connector, name, dict(state["metrics"][name]))

    def _counters(self, loop: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Every counter of a loop and of the loops inside it, by path."""
        for name, value in vars(loop).items():
            if isinstance(value, self._progress):
                yield f"{path}.{name}", value
            elif isinstance(value, self._loop):
                yield from self._counters(value, f"{path}.{name}")


def _accumulation(trainer: Any) -> dict[str, int]:
    """Epoch -> micro-batches a window from there on, as configured: before anything is trained.

    A GradientAccumulationScheduler changes the Trainer's own number as epochs begin.
    """
    plans = [c for c in trainer.callbacks if is_a(c, "GradientAccumulationScheduler")]
    plan = plans[-1].scheduling if plans else {0: trainer.accumulate_grad_batches}
    return {str(epoch): int(plan[epoch]) for epoch in sorted(plan)}


def _shown(plan: dict[str, int]) -> str:
    if plan.keys() == {"0"}:
        return str(plan["0"])
    return str({epoch: plan[str(epoch)] for epoch in sorted(map(int, plan))})


def _inside_an_epoch(state: dict[str, Any]) -> bool:
    epochs = state["progress"]["fit.epoch_progress"]["current"]
    return bool(epochs["ready"] != epochs["processed"])

"""State of a Trainer besides model, optimizer and schedule, as one object to track."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.trainer_callback import ExportableState

from trainckpt.attempt.log import logger
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainckpt.format.cursor import Cursor

_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
_SUMS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
# Arguments reported by a resume if changed. The script's new value applies in the first and third
# kind; in the second the snapshot's does, as its optimizer and random generators are restored.
# Only the first kind changes the training.
_COUNT_NOW = (
    "gradient_accumulation_steps",
    "max_grad_norm",
    "bf16",
    "fp16",
    "label_smoothing_factor",
    "lr_scheduler_type",
    "warmup_steps",
    "warmup_ratio",
    "optim",
    "neftune_noise_alpha",
    "average_tokens_across_devices",
    "eval_strategy",
    "eval_steps",
)
_SAVED_COUNT = ("seed", "data_seed")  # options of the optimizer are compared by `state.adapters`
_OUTPUTS = ("save_strategy", "save_steps", "logging_strategy", "logging_steps")
_MAX_STEPS = "max_steps"
_ACCUMULATE = "gradient_accumulation_steps"
_CONTROL = (
    "should_training_stop",
    "should_epoch_stop",
    "should_save",
    "should_evaluate",
    "should_log",
)


class TrainerPart:
    """Counters, the log, running sums, control flags, and other callbacks' state.

    Args:
        trainer: The Trainer.
        later: Callbacks not begun yet, so without state.

    Attributes:
        begun: The last epoch begun for the callbacks; -1 before.
        finished: Training is over; only the Trainer's final steps are left.
        state: The Trainer's, of this training.
    """

    __trainckpt_loads_in_steps__ = True

    def __init__(self, trainer: Any, later: Sequence[Any] = ()) -> None:
        self.begun = -1
        self.finished = False
        self.state = trainer.state
        self._trainer, self._later = trainer, later
        self._waiting: dict[str, Any] = {}  # saved state of `later`
        self._then: dict[str, Any] = {}  # saved settings

    def state_dict(self) -> dict[str, Any]:
        """Return plain values, and the running loss as a tensor."""
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        return {
            "state": {name: _stored(getattr(state, name)) for name in _STATE},
            "sums": {name: getattr(trainer, name) for name in _SUMS if hasattr(trainer, name)},
            "loss": trainer._tr_loss.clone(),
            "control": {name: bool(getattr(control, name)) for name in _CONTROL},
            "sync_gradients": bool(trainer.accelerator.gradient_state.sync_gradients),
            "callbacks": self._waiting
            | {
                name: _state_of(one) for name, one in self._others().items() if self._has_begun(one)
            },
            "begun": self.begun,
            "finished": self.finished,
            "max_steps": state.max_steps,
            "settings": self._settings(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state. A finished run continues if it now has more steps."""
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in saved["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = saved["loss"].to(trainer._tr_loss.device)
        trainer.accelerator.gradient_state._set_sync_gradients(saved["sync_gradients"])
        others = self._others()
        for name, value in saved["callbacks"].items():
            if name in others and self._has_begun(others[name]):
                _give_back(others[name], value)
            elif name in others:
                self._waiting[name] = value
        self._then = saved.get("settings", {})
        reached, most = saved["state"]["global_step"], trainer.state.max_steps
        goes_on = reached < most and saved["max_steps"] < most
        self.begun, self.finished = saved["begun"], saved["finished"] and not goes_on
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value and not (goes_on and "stop" in name))

    def all_have_begun(self) -> None:
        """Restore the state of later callbacks."""
        self._later, others = (), self._others()
        while self._waiting:
            name, value = self._waiting.popitem()
            _give_back(others[name], value)

    def stateless(self) -> list[Any]:
        """Return the callbacks without state."""
        others = self._others().values()
        return [
            one
            for one in self._trainer.callback_handler.callbacks
            if not any(one is other for other in others)
        ]

    def _has_begun(self, one: Any) -> bool:
        return not any(one is each for each in self._later)

    def _settings(self) -> dict[str, Any]:
        args = self._trainer.args
        names = (*_COUNT_NOW, *_SAVED_COUNT, *_OUTPUTS)
        told = {name: getattr(args, name, None) for name in names}
        plain = (type(None), bool, int, float)
        return {name: v if isinstance(v, plain) else str(v) for name, v in told.items()}

    def _changed(self, then: dict[str, Any], names: Sequence[str]) -> str:
        """Return these arguments' changes since the snapshot, or ""."""
        now = {**self._settings(), _MAX_STEPS: self._trainer.state.max_steps}
        other = [name for name in names if name in then and then[name] != now[name]]
        return ", ".join(f"{name} {then[name]} then, {now[name]} now" for name in other)

    def __trainckpt_problems__(self, saved: dict[str, Any]) -> list[str]:
        then = {**saved.get("settings", {}), _MAX_STEPS: saved["max_steps"]}
        changed = self._changed(then, (*_COUNT_NOW, _MAX_STEPS))
        is_longer = saved["max_steps"] != self._trainer.state.max_steps
        schedule = ", and the schedule of the learning rate is made for so many steps"
        which = f"the new value counts{schedule if is_longer else ''}"
        return [f"other settings of the training: {changed} ({which})"] if changed else []

    def _say_which_count(self) -> None:
        """Report changed arguments without effect on the training."""
        if changed := self._changed(self._then, _SAVED_COUNT):
            logger.warning(
                "%s: the value in the snapshot counts, and the training goes on as it was; to "
                "train with the new one, begin a new run with init_from",
                changed,
            )
        if changed := self._changed(self._then, _OUTPUTS):
            logger.info("%s: the new value counts, and changes nothing that is trained", changed)

    def must_fit(self, at: Cursor, *, is_second: bool) -> None:
        """Raise unless this training can continue from there; call it after the state is restored.

        Args:
            at: The position of the run.
            is_second: The same callback has trained before, in this process.

        Raises:
            ConfigurationError: It cannot.
        """
        if self._trainer.args.process_index == 0:
            self._say_which_count()
        then, now = self._then.get(_ACCUMULATE), self._settings()[_ACCUMULATE]
        in_epoch = at.batches > 0 and not self.finished
        if in_epoch and then is not None and then != now:
            raise ConfigurationError(
                f"{_ACCUMULATE} is {now}, and was {then} when this epoch began: the Trainer counts "
                "the windows of an epoch by it, so the rest of this one would be dealt out wrongly",
                hint=f"resume with {_ACCUMULATE}={then}; another number can begin with an epoch",
            )
        if not self.finished:
            return
        state, again = self._trainer.state, "set more max_steps or num_train_epochs to train on"
        if is_second:
            raise ConfigurationError(
                f"this callback's run has finished at step {state.global_step}: a second training "
                "would only get its result",
                hint=f"give each training a callback and a run of its own, or {again}",
            )
        early = f" of {state.max_steps}, where it was ended early," if self._ended_early() else ""
        if self._trainer.args.process_index == 0:
            logger.warning(
                "the run has finished at step %d%s so train() trains nothing and returns its "
                "result; %s, or name another run to train anew",
                state.global_step,
                early,
                again,
            )

    def _ended_early(self) -> bool:
        return bool(self._trainer.state.global_step < self._trainer.state.max_steps)

    def _others(self) -> dict[str, Any]:
        """Return callbacks with state, by class and by index among those of the class."""
        found: dict[str, Any] = {}
        for one in self._trainer.callback_handler.callbacks:
            kind = type(one).__qualname__
            if isinstance(one, ExportableState) or _has_state(one):
                number = sum(name.startswith(f"{kind}.") for name in found)
                found[f"{kind}.{number}"] = one
        return found


def _stored(value: Any) -> Any:
    """Return a logged value in storable form: logging must never break a save."""
    if isinstance(value, dict):
        return {str(key): _stored(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_stored(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return str(value)


def _has_state(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(
        getattr(one, "load_state_dict", None)
    )


def _state_of(one: Any) -> dict[str, Any]:
    held: dict[str, Any] = one.state_dict() if _has_state(one) else one.state()["attributes"]
    return dict(held)


@torch.no_grad()
def _give_back(one: Any, held: dict[str, Any]) -> None:
    if _has_state(one):
        one.load_state_dict(held)
        return
    for name, value in held.items():
        setattr(one, name, value)

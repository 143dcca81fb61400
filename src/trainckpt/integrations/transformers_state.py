"""What a Trainer remembers beside model, optimizer and schedule, as one object to track."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import ExportableState

_STATE = (
    "epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history", "best_metric",
    "best_global_step", "best_model_checkpoint",
)  # fmt: skip
_SUMS = (
    "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
    "_initial_num_input_tokens_seen", "current_flos",
)  # fmt: skip
_CONTROL = (
    "should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log",
)  # fmt: skip


class TrainerPart:
    """Counters, the log, running sums, the flags of its control, and other callbacks' state.

    Attributes:
        begun: The last epoch whose begin the callbacks were told; -1 before.
        finished: Training is over, only the Trainer's last words are left.
    """

    def __init__(self, trainer: Any) -> None:
        self.begun = -1
        self.finished = False
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        """Plain values, and the running loss as a tensor."""
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        return {
            "state": {name: getattr(state, name) for name in _STATE},
            "sums": {name: getattr(trainer, name) for name in _SUMS},
            "loss": trainer._tr_loss.clone(),
            "control": {name: bool(getattr(control, name)) for name in _CONTROL},
            "sync_gradients": bool(trainer.accelerator.gradient_state.sync_gradients),
            "callbacks": {name: _state_of(one) for name, one in self._others().items()},
            "begun": self.begun,
            "finished": self.finished,
            "max_steps": state.max_steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Put them back. More steps than then: a finished run goes on."""
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in saved["sums"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = saved["loss"].to(trainer._tr_loss.device)
        trainer.accelerator.gradient_state._set_sync_gradients(saved["sync_gradients"])
        others = self._others()
        for name, value in saved["callbacks"].items():
            if name in others:
                _give_back(others[name], value)
        reached = saved["state"]["global_step"]
        goes_on = saved["max_steps"] <= reached < trainer.state.max_steps
        self.begun, self.finished = saved["begun"], saved["finished"] and not goes_on
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value and not (goes_on and "stop" in name))

    def _others(self) -> dict[str, Any]:
        """Callbacks that say their own state, by class and by their place among its likes."""
        found: dict[str, Any] = {}
        for one in self._trainer.callback_handler.callbacks:
            kind = type(one).__qualname__
            if isinstance(one, ExportableState) or _has_state(one):
                number = sum(name.startswith(f"{kind}.") for name in found)
                found[f"{kind}.{number}"] = one
        return found


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

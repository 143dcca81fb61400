"""A best score, or a counter, that a callback holds in a plain attribute: named, or tracked."""

from __future__ import annotations

from collections import deque

import lightning
import pytest
import torch
import transformers

import trainckpt
from tests.integrations.toy_lightning import StopAt, fit
from tests.integrations.trained import Training

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_EXACT = "not exact: of callbacks, in no state_dict, so not as when it was saved: Best.best"


class Best(lightning.Callback):
    """The best validation loss, as a tensor of Lightning's; `rounds` is set as a fit begins."""

    def __init__(self):
        self.best, self.rounds, self.improved = float("inf"), 0, []

    def on_train_start(self, trainer, module):
        self.rounds = trainer.max_epochs

    def on_validation_end(self, trainer, module):
        if trainer.callback_metrics["val_loss"] < self.best:
            self.best = trainer.callback_metrics["val_loss"]
            self.improved.append(self.best.item())


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "trainckpt")
    return lambda: [line for line in caplog.text.splitlines() if "Best" in line]


def test_lightning_names_it_when_a_save_lacks_it_and_when_a_resume_has_lost_it(tmp_path, said):
    """Not what is set anew as a fit begins."""
    fit(tmp_path, stop=StopAt(12), callbacks=[Best()])
    (at_save,) = said()
    assert (
        "Best.best, Best.improved, StopAt.sent: changed since the run began, and in no state_dict"
        in at_save
    )
    assert 'pass counts=trainckpt.Attributes(<the Best>, "best", "improved") to the' in at_save
    fit(tmp_path, callbacks=[Best()])
    at_resume = said()[1]
    assert NOT_EXACT in at_resume
    assert ", now inf), Best.improved" in at_resume
    assert "rounds" not in at_resume


def test_a_resume_that_loses_them_is_never_called_bitwise(tmp_path, caplog):
    fit(tmp_path, stop=StopAt(12), callbacks=[Best()])
    caplog.set_level("INFO", "trainckpt")
    fit(tmp_path, callbacks=[Best()])
    words = [line for line in caplog.messages if line.startswith("this resume is ")]
    assert words == ["this resume is same data, not bitwise: attributes"]


def fit_keeping(place, best, **how):
    kept = trainckpt.Attributes(best, "best", "improved")
    fit(
        place,
        callbacks=[best],
        options={"kept": kept},
        **how,
    )
    return best.best


def test_lightning_keeps_it_where_it_is_tracked(tmp_path, said):
    straight = fit_keeping(tmp_path / "straight", Best())
    fit_keeping(tmp_path / "run", Best(), stop=StopAt(12))
    assert fit_keeping(tmp_path / "run", Best()) == straight
    assert said() == []


class BestOfTrainer(transformers.TrainerCallback):
    """Its class has the value that it begins with."""

    best = 1e9

    def on_evaluate(self, args, state, control, metrics, **_):
        self.best = min(self.best, metrics["eval_loss"])


def trained(folder, callback, strike_at=None, **options):
    training = Training(folder, {}, folder / "run", strike_at, ours=options)
    training.trainer.add_callback(callback)
    training.train()
    return callback.best


def test_the_trainer_names_it(tmp_path, said):
    trained(tmp_path, BestOfTrainer(), strike_at=12)
    assert "BestOfTrainer.best: changed since the run began" in said()[0]
    trained(tmp_path, BestOfTrainer())
    (at_resume,) = [line for line in said() if "not as when it was saved" in line]
    assert "BestOfTrainer.best (" in at_resume
    assert 'counts=trainckpt.Attributes(<the BestOfTrainer>, "best") to the' in at_resume
    assert ", now 1000000000.0)" in at_resume


def test_the_trainer_keeps_it_where_it_is_tracked(tmp_path, said):
    one, other = BestOfTrainer(), BestOfTrainer()
    best = trained(tmp_path, one, strike_at=12, kept=trainckpt.Attributes(one, "best"))
    end = trained(tmp_path, other, kept=trainckpt.Attributes(other, "best"))
    assert end <= best < 1e9
    assert said() == []


class Teaching(transformers.TrainerCallback):
    """Holds a module that it trains by itself."""

    def __init__(self):
        self.teacher = torch.nn.Linear(2, 2)

    def on_step_end(self, *_, **__):
        self.teacher.weight.data += 1


def test_a_module_that_a_callback_holds_is_named(tmp_path, caplog):
    for strike_at in (12, None):
        caplog.clear()
        training = Training(tmp_path, {}, tmp_path / "run", strike_at)
        training.trainer.add_callback(Teaching())
        training.train()
    assert "not as when it was saved: teacher." in caplog.text


class Smoothing(transformers.TrainerCallback):
    """Weights averaged in a dictionary, the last losses, and the kinds of logs seen."""

    def __init__(self):
        self.average, self.last, self.kinds = {}, deque(maxlen=2), set()
        self.table, self.folders = {"a": 1}, ["/"]

    def on_step_end(self, args, state, control, model, **_):
        for name, parameter in model.named_parameters():
            before = self.average.get(name, 0)
            self.average[name] = 0.9 * before + 0.1 * parameter.detach()
        self.last.append(float(self.average["head.bias"][0]))
        self.folders = [f"{args.output_dir}/{state.global_step}"]

    def on_log(self, args, state, control, logs, **_):
        self.kinds.update(logs)


class Sampling(transformers.Trainer):
    """A Trainer with a sum of its own beside the Trainer's."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.total, self.losses = 0.0, []

    def training_step(self, *args, **given):
        loss = super().training_step(*args, **given)
        self.total += loss.item()
        self.losses.append(loss.item())
        return loss


def test_containers_of_a_callback_and_what_a_subclass_of_the_trainer_adds_are_named(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(transformers, "Trainer", Sampling)
    for strike_at in (12, None):
        caplog.clear()
        caplog.set_level("INFO", "trainckpt")
        training = Training(tmp_path, {}, tmp_path / "run", strike_at)
        training.trainer.add_callback(Smoothing())
        training.train()
    (line,) = [each for each in caplog.messages if each.startswith("not exact")]
    assert "saved: Sampling.losses, Sampling.total (" in line
    assert "Smoothing.average and 2 more (track them" in line

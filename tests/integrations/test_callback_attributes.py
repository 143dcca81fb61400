"""A best score, or a counter, that a callback holds in a plain attribute: kept, or named."""

from __future__ import annotations

from collections import deque

import lightning
import pytest
import torch
import transformers

import trainckpt
from tests.integrations.lightning_training import StopAt, fit
from tests.integrations.transformers_training import Training

pytestmark = pytest.mark.filterwarnings("ignore")
NOT_EXACT = (
    "not exact: of callbacks, in no state_dict, so not as when it was saved: BestInFile.best"
)


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


def fit_best(place, best, **how):
    fit(place, callbacks=[best], **how)
    return best.best, best.improved, best.rounds


def test_lightning_s_callbacks_go_on_with_what_they_had(tmp_path, said, caplog):
    straight = fit_best(tmp_path / "straight", Best())
    fit_best(tmp_path / "run", Best(), stop=StopAt(12))
    assert fit_best(tmp_path / "run", Best()) == straight
    assert said() == []
    words = [line for line in caplog.messages if line.startswith("this resume is ")]
    assert [word.partition(" in all")[0] for word in words] == ["this resume is bitwise"]


class BestInFile(Best):
    """It opens a file in training, and its best value belongs to that."""

    def on_validation_end(self, trainer, module):
        super().on_validation_end(trainer, module)
        self.file = object()  # as an open file


def test_lightning_names_it_when_a_save_lacks_it_and_when_a_resume_has_lost_it(tmp_path, said):
    """Not what is set anew as a fit begins."""
    fit(tmp_path, stop=StopAt(12), callbacks=[BestInFile()])
    (at_save,) = said()
    assert (
        "BestInFile.best, BestInFile.improved: changed since the run began, and in no state_dict"
        in at_save
    )
    assert 'pass counts=trainckpt.Attributes(<the BestInFile>, "best", "improved") to' in at_save
    fit(tmp_path, callbacks=[BestInFile()])
    at_resume = said()[1]
    assert NOT_EXACT in at_resume
    assert ", now inf), BestInFile.improved" in at_resume
    assert "rounds" not in at_resume


def test_a_resume_that_loses_them_is_never_called_bitwise(tmp_path, caplog):
    fit(tmp_path, stop=StopAt(12), callbacks=[BestInFile()])
    caplog.set_level("INFO", "trainckpt")
    fit(tmp_path, callbacks=[BestInFile()])
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


def test_the_trainer_s_callbacks_go_on_with_what_they_had(tmp_path, said):
    best = trained(tmp_path, BestOfTrainer(), strike_at=12)
    assert trained(tmp_path, BestOfTrainer()) <= best < 1e9
    assert said() == []


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


def test_containers_of_a_callback_and_what_a_subclass_of_the_trainer_adds_go_on(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(transformers, "Trainer", Sampling)

    def train(place, strike_at=None):
        training = Training(place, {}, place / "run", strike_at)
        training.trainer.add_callback(smoothing := Smoothing())
        training.train()
        return training.trainer, smoothing

    caplog.set_level("INFO", "trainckpt")
    straight, averaged = train(tmp_path / "straight")
    train(tmp_path / "stopped", strike_at=12)
    resumed, again = train(tmp_path / "stopped")
    assert (resumed.total, resumed.losses) == (straight.total, straight.losses)
    assert (again.last, again.kinds, again.table) == (averaged.last, averaged.kinds, {"a": 1})
    assert again.average.keys() == averaged.average.keys()
    assert all(torch.equal(again.average[name], averaged.average[name]) for name in again.average)
    assert "not exact" not in caplog.text

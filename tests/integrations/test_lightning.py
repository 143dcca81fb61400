"""A fit of Lightning that was stopped and resumed is the fit that was never stopped.

Several fits in one process, each with all objects made anew; a stop is a real SIGTERM, and the
Trainer's `fit` returns (on_stop="return").
"""

from __future__ import annotations

import signal

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

import trainckpt
from tests.integrations.lightning_training import Alternating, Augmented, StopAt, Toy, fit, loaders
from tests.state.helpers import frozen
from trainckpt.integrations.lightning_state import LoopState

pytestmark = pytest.mark.filterwarnings("ignore")


def same(straight, parts):
    """The parts of a run, put together, are the straight run."""
    assert [line for part in parts for line in part.seen] == straight.seen
    assert [note for part in parts for note in part.notes] == straight.notes
    for name, value in straight.end.items():
        assert frozen(parts[-1].end[name]) == frozen(value), name


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """More only wait for each other in so small a model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def straight():
    """The run without a stop, and without the callback."""
    return fit()


def test_the_callback_changes_nothing(tmp_path, straight):
    same(straight, [fit(tmp_path)])


# Windows are of 4, 4 and 2 micro-batches: their first, middle and last; an epoch's first and last.
@pytest.mark.parametrize(
    "micro",
    [
        0,
        5,
        pytest.param(7, marks=pytest.mark.long),
        9,
        pytest.param(10, marks=pytest.mark.long),
        pytest.param(13, marks=pytest.mark.long),
        29,
    ],
)
def test_a_stop_at_any_micro_batch_shows_in_nothing(tmp_path, straight, micro):
    first = fit(tmp_path, stop=StopAt(micro))
    assert len(first.seen) == micro + 1
    same(straight, [first, fit(tmp_path, seed=99)])


def test_a_stop_in_a_validation_waits_for_its_end(tmp_path, straight):
    first = fit(tmp_path, stop=StopAt(9, in_validation=True))
    assert (len(first.seen), len(first.notes)) == (10, 4)
    same(straight, [first, fit(tmp_path, seed=99)])


def test_several_stops_in_one_run(tmp_path, straight):
    parts = [fit(tmp_path, stop=StopAt(at), seed=at + 5) for at in (2, 3, 11, 24)]
    same(straight, [*parts, fit(tmp_path)])


def test_a_finished_fit_that_is_started_again_trains_nothing(tmp_path, straight):
    fit(tmp_path)
    again = fit(tmp_path, seed=99)
    assert again.seen == []
    assert frozen(again.end) == frozen(straight.end)


def scaled():
    """Half precision with a scaler, which skips steps at the start."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def scheduled():
    """Another number of micro-batches per window from the second epoch on."""
    return {
        "callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})],
        "accumulate_grad_batches": 1,
    }


HOW = {
    "a scaler": scaled,
    "windows that change": scheduled,
    "validation in mid-epoch": lambda: {"val_check_interval": 3},
    "sanity check": lambda: {"num_sanity_val_steps": 2},
    "bf16": lambda: {"precision": "bf16-mixed"},
    "weights in bf16": lambda: {"precision": "bf16-true"},
    "max_steps in mid-epoch": lambda: {"max_epochs": -1, "max_steps": 7},
    "gradients clipped": lambda: {"gradient_clip_val": 0.1},
    "limits": lambda: {"limit_train_batches": 7, "limit_val_batches": 1},
}


@pytest.mark.parametrize("how", HOW, ids=str)
def test_whatever_the_trainer_is_told(tmp_path, how):
    straight = fit(**HOW[how]())
    parts = [fit(tmp_path, stop=StopAt(8), **HOW[how]()), fit(tmp_path, seed=99, **HOW[how]())]
    same(straight, parts)


@pytest.mark.parametrize("at", [5, 9], ids=["inside a window", "at an epoch's end"])
def test_another_accumulation_is_said_and_gone_on_with(tmp_path, caplog, at):
    caplog.set_level("INFO", logger="trainckpt")
    fit(tmp_path, stop=StopAt(at))
    assert exactness(caplog) == []
    found = fit(tmp_path, stop=StopAt(at + 1), accumulate_grad_batches=2)
    assert found.trainer.accumulate_grad_batches == 2
    other = ["same data, not bitwise: trainer", "accumulate_grad_batches was 4, is 2"]
    assert exactness(caplog) == other
    fit(tmp_path, stop=StopAt(at + 2), accumulate_grad_batches=2)
    assert exactness(caplog) == ["restored, compared after the first batch"]


def test_another_precision_and_other_clipping_are_said_and_gone_on_with(tmp_path, caplog):
    caplog.set_level("INFO", logger="trainckpt")
    half = {"precision": "bf16-mixed", "gradient_clip_val": 0.1}
    fit(tmp_path, stop=StopAt(5))
    assert exactness(caplog) == []
    fit(tmp_path, stop=StopAt(6), **half)
    word, *reasons = exactness(caplog)
    assert word == "same data, not bitwise: trainer"
    assert set("; ".join(reasons).split("; ")) == {
        "precision was 32-true, is bf16-mixed",
        "gradient_clip_val was None, is 0.1",
    }
    fit(tmp_path, stop=StopAt(7), **half)
    assert exactness(caplog) == ["restored, compared after the first batch"]


def test_a_plan_of_accumulation_is_compared_as_configured(tmp_path, caplog):
    """The number it has reached is another one than the Trainer begins with; that is no change."""
    caplog.set_level("INFO", logger="trainckpt")
    fit(tmp_path, stop=StopAt(13), **scheduled())
    fit(tmp_path, stop=StopAt(15), **scheduled())
    assert exactness(caplog) == ["restored, compared after the first batch"]
    found = fit(tmp_path, stop=StopAt(17), accumulate_grad_batches=2)
    assert found.trainer.accumulate_grad_batches == 2
    other = ["same data, not bitwise: trainer", "accumulate_grad_batches was {0: 2, 1: 4}, is 2"]
    assert exactness(caplog) == other
    same_plan = [GradientAccumulationScheduler({0: 2})]
    fit(tmp_path, callbacks=same_plan, accumulate_grad_batches=1)
    assert exactness(caplog) == ["restored, compared after the first batch"]


def test_a_snapshot_from_before_the_accumulation_was_kept_is_loaded(tmp_path, caplog, monkeypatch):
    def older(self):
        return {name: v for name, v in now(self).items() if name != "accumulate_configured"}

    caplog.set_level("INFO", logger="trainckpt")
    now = LoopState.state_dict
    with monkeypatch.context() as patched:
        patched.setattr(LoopState, "state_dict", older)
        fit(tmp_path, stop=StopAt(5))
    fit(tmp_path, stop=StopAt(7), accumulate_grad_batches=2)
    assert exactness(caplog) == ["restored, compared after the first batch"]


def exactness(caplog):
    """What the last fit said of its restored state, and each reason why it is not bitwise."""
    said = [*caplog.messages]
    caplog.clear()
    exact = [line.split(": ", 2)[2] for line in said if ": resumed from " in line]
    return exact + [line.partition(": ")[2] for line in said if line.startswith("not bitwise: ")]


MODULES = {
    "manual optimization": Alternating,
    "schedule by epochs": lambda: Toy("epoch"),
    "schedule by a plateau": lambda: Toy("plateau"),
}


@pytest.mark.parametrize("kind", MODULES, ids=str)
@pytest.mark.parametrize(
    "at", [pytest.param(5, marks=pytest.mark.long), 15, pytest.param(19, marks=pytest.mark.long)]
)
def test_whatever_the_module_optimizes_with(tmp_path, kind, at):
    make = MODULES[kind]
    straight = fit(module=make)
    parts = [fit(tmp_path, stop=StopAt(at), module=make), fit(tmp_path, seed=99, module=make)]
    same(straight, parts)


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_and_their_randomness(tmp_path, persistent):
    def data():
        return loaders(2, persistent_workers=persistent)

    how = {"num_sanity_val_steps": 1, "val_check_interval": 4}
    straight = fit(data=data(), **how)
    parts = [fit(tmp_path, stop=StopAt(14), data=data(), **how), fit(tmp_path, data=data(), **how)]
    same(straight, parts)


class Checked(lightning.LightningDataModule):
    """Knows how often it was asked, and says so in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def train_dataloader(self):
        self.asked += 1
        return loaders()[0]

    def val_dataloader(self):
        return loaders()[1]

    def state_dict(self):
        return {"asked": self.asked}

    def load_state_dict(self, state):
        self.asked = state["asked"] + 10


class Hooked(Toy):
    """A OneCycle schedule of the run's length, and state that only hooks know."""

    counted = 0

    def on_save_checkpoint(self, checkpoint):
        checkpoint["counted"] = self.counted

    def on_load_checkpoint(self, checkpoint):
        self.counted = checkpoint["counted"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.counted += 1
        self.note("counted", self.counted)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_data_module_hooks_and_a_schedule_of_the_runs_length(tmp_path):
    straight = fit(tmp_path / "straight", module=Hooked, data=Checked())
    parts = [
        fit(tmp_path / "run", stop=StopAt(11), module=Hooked, data=Checked()),
        fit(tmp_path / "run", seed=99, module=Hooked, data=Checked()),
    ]
    same(straight, parts)
    assert parts[-1].trainer.datamodule.asked > straight.trainer.datamodule.asked


class CyclingBetas(Toy):
    """OneCycleLR moves the betas of Adam with the rate."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01, betas=(0.9, 0.99))
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        group = self.optimizers(use_pl_optimizer=False).param_groups[0]
        self.note("betas", *(float(beta).hex() for beta in group["betas"]))


@pytest.mark.parametrize("stop", [pytest.param(6, marks=pytest.mark.long), 13])
def test_betas_that_a_schedule_moves_go_on_from_where_they_were(tmp_path, stop):
    """lightning#15462, #20550."""
    straight = fit(tmp_path / "straight", module=CyclingBetas)
    parts = [
        fit(tmp_path / "run", stop=StopAt(stop), module=CyclingBetas),
        fit(tmp_path / "run", seed=99, module=CyclingBetas),
    ]
    same(straight, parts)


def callbacks(folder):
    """Those that keep state: averaged weights, early stopping, checkpoints at steps and epochs."""
    return [
        EMAWeightAveraging(decay=0.5),
        EarlyStopping("val_loss", patience=1, min_delta=10.0),
        ModelCheckpoint(folder, "{epoch}-{step}", "val_loss", save_top_k=2),
        ModelCheckpoint(folder, "every-{step}", every_n_train_steps=2, save_top_k=-1),
    ]


def test_callbacks_keep_their_state_and_checkpoints_of_lightning_are_its_own(tmp_path):
    folders = [tmp_path / name for name in ("straight", "stopped", "run")]
    how = {"enable_checkpointing": True, "val_check_interval": 5, "max_epochs": 8}
    straight = fit(callbacks=callbacks(folders[0]), **how)
    assert len(straight.seen) < 80, "it stops early"
    parts = [
        fit(folders[2], stop=StopAt(4), callbacks=callbacks(folders[1]), **how),
        fit(folders[2], stop=StopAt(9), callbacks=callbacks(folders[1]), seed=99, **how),
        fit(folders[2], callbacks=callbacks(folders[1]), seed=99, **how),
    ]
    same(straight, parts)
    assert weights_in(folders[0]) == weights_in(folders[1])
    again = fit(folders[2], callbacks=callbacks(folders[1]), seed=99, **how)
    assert again.seen == []


def weights_in(folder):
    """Of every checkpoint of Lightning's, by its name."""
    kept = {f.name: torch.load(f, weights_only=True)["state_dict"] for f in folder.iterdir()}
    return {name: frozen(weights) for name, weights in kept.items()}


def several(mode):
    """Two training loaders of different lengths as one."""
    short = DataLoader(Augmented(8), 2, shuffle=True)
    both = CombinedLoader([DataLoader(Augmented(20), 2, shuffle=True), short], mode)
    return both, loaders()[1]


class Pairs(Toy):
    """Learns from a pair of batches."""

    def training_step(self, batches, batch_idx):
        found = [super(Pairs, self).training_step(b, batch_idx) for b in batches if b is not None]
        return sum(found)

    def log(self, *args, **kwargs):
        """Twice under one name is too often."""


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.long), 5])
def test_several_training_loaders(tmp_path, mode, at):
    straight = fit(tmp_path / "straight", module=Pairs, data=several(mode))
    place = tmp_path / "run"
    parts = [
        fit(place, stop=StopAt(at), module=Pairs, data=several(mode)),
        fit(place, module=Pairs, data=several(mode), seed=99),
    ]
    same(straight, parts)


def test_it_does_nothing_but_in_a_fit(tmp_path):
    ours = trainckpt.lightning.TrainckptCallback(tmp_path / "run")
    trainer = lightning.Trainer(
        callbacks=[ours],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(Toy(), loaders()[1], verbose=False)
    fit(callbacks=[trainckpt.lightning.TrainckptCallback(tmp_path / "run")], fast_dev_run=True)
    assert not (tmp_path / "run").exists()


def test_handlers_of_signals_are_given_back(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    fit(tmp_path, stop=StopAt(3))
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]


class Failing(Toy):
    """A script that fails once, in its 17th micro-batch."""

    def training_step(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 16:
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_a_fit_that_fails_goes_on_from_its_last_save(tmp_path, straight):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module=Failing, options={"every": "1 steps"})
    after = fit(tmp_path, seed=99)
    assert after.seen == straight.seen[14:], "two windows of the second epoch were complete: 4 + 4"
    assert frozen(after.end) == frozen(straight.end)


def test_a_stop_is_exit_code_75_and_no_checkpoint_callback_saves_again(
    tmp_path, stays_when_stopped
):
    folder = tmp_path / "own"
    own = [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_on_exception=True)]
    with pytest.raises(trainckpt.Stopped) as stopped:
        fit(
            tmp_path / "run",
            stop=StopAt(5),
            callbacks=own,
            enable_checkpointing=True,
            options={"on_stop": "exit"},
        )
    assert stopped.value.code == 75
    assert not folder.exists()


def own_checkpoints(folder):
    """What Lightning takes for a reason to go on from one of these files by itself."""
    return [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_last=True)]


@pytest.mark.parametrize("failed", [False, True], ids=["stopped", "failed"])
def test_a_path_that_lightning_chose_by_itself_is_dropped(tmp_path, straight, failed):
    """As with last.ckpt, or with what OnExceptionCheckpoint saved of a fit that failed."""
    folder, how = tmp_path / "own", {"enable_checkpointing": True}
    if failed:
        own, options = own_checkpoints(folder), {"every": "1 steps"}
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path, module=Failing, callbacks=own, options=options, **how)
        assert (folder / "on_exception.ckpt").exists()
    else:
        fit(tmp_path, stop=StopAt(13), callbacks=own_checkpoints(folder), **how)
        assert (folder / "last.ckpt").exists()
    after = fit(tmp_path, seed=99, callbacks=own_checkpoints(folder), **how)
    assert after.seen == straight.seen[14:]
    assert frozen(after.end) == frozen(straight.end)
    assert after.trainer.ckpt_path is None

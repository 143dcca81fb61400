"""What cannot work under Lightning is one sentence and what to do, before anything is trained."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.trainer.connectors import checkpoint_connector
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset

from tests.integrations.lightning_training import Augmented, StopAt, Toy, fit, loaders
from trainckpt.attempt import log
from trainckpt.data.loader import TrackedLoader
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.integrations import lightning_compat
from trainckpt.lightning import TrainckptCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Endless(IterableDataset):
    """No length, no state."""

    def __iter__(self):
        while True:
            yield torch.randn(6), 0


class Fetching(Toy):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter):
        next(dataloader_iter)


class Wider(Toy):
    """Another model."""

    def __init__(self):
        super().__init__()
        self.more = torch.nn.Linear(2, 2)


class Thawing(BaseFinetuning):
    """Thaws what it froze."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])


class Forgetful:
    """Batches, and nothing else."""

    def __len__(self):
        return 4

    def __iter__(self):
        return iter([(torch.randn(2, 6), torch.arange(2))] * 4)


def endless():
    return DataLoader(Endless(), 2), loaders()[1]


REFUSED = {
    "metrics: an object of the Trainer is tracked under this name": lambda: {
        "options": {"metrics": Forgetful()},
    },
    "has 2 TrainckptCallbacks": lambda: {"callbacks": [TrainckptCallback("elsewhere")]},
    "StochasticWeightAveraging changes": lambda: {"callbacks": [StochasticWeightAveraging(0.1)]},
    "Thawing changes": lambda: {"callbacks": [Thawing()]},
    "reload_dataloaders_every_n_epochs": lambda: {"reload_dataloaders_every_n_epochs": 1},
    "the training loader has no length": lambda: {"data": endless()},
    "fetches by itself": lambda: {"module": Fetching},
    "goes on with loaders that have ended": lambda: {
        "data": (CombinedLoader([loaders()[0], loaders()[0]], "max_size"), loaders()[1])
    },
    "a Forgetful is neither": lambda: {"data": (Forgetful(), loaders()[1])},
}


@pytest.mark.parametrize("sentence", REFUSED, ids=str)
def test_what_cannot_be_exact_is_refused(tmp_path, sentence):
    with pytest.raises(ConfigurationError, match=sentence) as caught:
        fit(tmp_path / "run", **REFUSED[sentence]())
    assert caught.value.hint


def test_strategies_with_state_of_their_own_are_refused():
    with pytest.raises(ConfigurationError, match="FSDPStrategy is not supported"):
        lightning_compat.refuse_strategy(FSDPStrategy())
    spawned = DDPStrategy(start_method="spawn", cluster_environment=LightningEnvironment())
    spawned._configure_launcher()
    with pytest.raises(ConfigurationError, match="the launcher _MultiProcessingLauncher"):
        lightning_compat.refuse_strategy(spawned)


def test_a_checkpoint_to_go_on_from_and_a_run_are_one_too_many(tmp_path):
    with pytest.raises(ConfigurationError, match="both say where to go on"):
        fit(tmp_path / "run", ckpt_path="some.ckpt")


def own_checkpoints(folder):
    """With these Lightning goes on from what they saved, whether or not it was told to."""
    return [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, save_last=True)]


@pytest.fixture
def saved(tmp_path):
    """A folder with a last.ckpt of a fit without us."""
    folder = tmp_path / "own"
    own, how = [ModelCheckpoint(folder, save_last=True)], {"enable_checkpointing": True}
    fit(callbacks=own, max_epochs=1, limit_train_batches=1, limit_val_batches=0, **how)
    return folder


def test_a_path_that_was_given_is_refused_also_where_lightning_would_choose_it(tmp_path, saved):
    """And the refusal saves nothing in the place of what a fit that trained has saved."""
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    how = {"enable_checkpointing": True, "ckpt_path": "last"}
    with pytest.raises(ConfigurationError, match=r"last.ckpt' and TrainckptCallback both say"):
        fit(tmp_path / "run", callbacks=own_checkpoints(saved), **how)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


def test_a_file_of_the_slurm_plugin_is_refused_though_nobody_gave_it(tmp_path, saved, monkeypatch):
    """Lightning goes on from it in every Slurm job."""
    (saved / "last.ckpt").rename(saved / "hpc_ckpt_1.ckpt")
    how = {"enable_checkpointing": True, "default_root_dir": saved}
    in_job = SimpleNamespace(detect=lambda: True)
    monkeypatch.setattr(checkpoint_connector, "SLURMEnvironment", in_job)
    with pytest.raises(ConfigurationError, match=r"hpc_ckpt_1.ckpt' and TrainckptCallback both"):
        fit(tmp_path / "run", callbacks=own_checkpoints(saved), **how)


def test_a_refusal_that_nobody_catches_ends_the_script_with_its_own_code(tmp_path, monkeypatch):
    """Also where it comes before there is a Checkpointer."""
    monkeypatch.setattr(log, "_installed", [])
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(ConfigurationError) as refused:
        fit(tmp_path / "run", ckpt_path="some.ckpt")
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(refused.type, refused.value, None)
    assert ended.value.code == 78


def test_a_refusal_silences_checkpoint_callbacks_once(tmp_path, saved):
    """The same ones may be given to the fit that is right, and that may fail."""
    own = own_checkpoints(saved)
    with pytest.raises(ConfigurationError, match="both say where to go on"):
        fit(tmp_path / "run", callbacks=own, enable_checkpointing=True, ckpt_path="last")
    assert not any("on_exception" in vars(callback) for callback in own)


def test_another_model_is_refused(tmp_path):
    fit(tmp_path, stop=StopAt(2))
    with pytest.raises(StateMismatch, match=r"model/more.weight is new"):
        fit(tmp_path, module=Wider)


def test_a_loader_that_is_not_that_of_the_snapshot_is_refused_with_what_differs(tmp_path):
    """Nothing is wrong with its kind, so no other kind is asked for."""
    fit(tmp_path, stop=StopAt(2))
    data = DataLoader(Augmented(), 5, shuffle=True), loaders()[1]
    with pytest.raises(StateMismatch, match="batch_size was 2, is 5") as caught:
        fit(tmp_path, data=data)
    assert 'another place that begins with these weights: init_from="' in caught.value.hint


def test_a_loader_that_fabric_has_wrapped_is_refused_with_what_to_do_instead():
    """It has no state_dict, and moves each batch to the device: the script can do that itself."""
    fabric = Fabric(accelerator="cpu", devices=1)
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(4.0)))
    with pytest.raises(ConfigurationError, match="_FabricDataLoader") as caught:
        TrackedLoader(loader, name="loader")
    assert "fabric.to_device(batch)" in caught.value.hint


def test_a_second_fit_is_refused(tmp_path):
    done = fit(tmp_path, limit_train_batches=1)
    with pytest.raises(ConfigurationError, match="was in a fit before"):
        done.trainer.fit(done.module, *loaders())


def test_a_lightning_that_is_built_in_another_way_is_refused(tmp_path, monkeypatch):
    gone = ("loops.fit_loop:_FitLoop", "setup_everything", "makes the training loaders")
    monkeypatch.setattr(lightning_compat, "_RELIED_ON", (*lightning_compat._RELIED_ON, gone))
    with pytest.raises(ConfigurationError, match=r"it lacks .*_FitLoop.setup_everything, which"):
        fit(tmp_path / "run")

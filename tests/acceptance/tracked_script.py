"""A training with a tracker, in a process of its own that kills itself: see `test_tracker_kills`.

    python -m tests.acceptance.tracked_script LOOP TRACKER FOLDER RUN KILL_AT [LEAVE_AT WORKERS]

`RUN` is "-" for a training without trainckpt's callback, `KILL_AT` for one without a kill. The
plain loop may also leave its `with` block, after micro-batch `LEAVE_AT`.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from tests.end_to_end import test_trackers


def die(ckpt):
    """End as in the loss of a node, with the tracker's processes, once the saves are there."""
    ckpt._attempt.saver.wait()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends with its parent
            child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def open_log(tracker, folder, ckpt):
    """Return what logs a value: name, value, step."""
    if tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return ckpt.track_run(SummaryWriter(folder)).add_scalar
    if tracker == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}.db")
        ckpt.track_run(mlflow.start_run())
        return lambda name, value, at: mlflow.log_metric(name, value, step=at)
    import wandb

    names = {"wandb": {}, "wandb with an id": {"id": "own"}}[tracker]
    run = ckpt.track_run(wandb.init(mode="offline", dir=folder, **names))
    return lambda name, value, at: run.log({name: value, f"{name} at": at})


def train_plainly(tracker, folder, run, kill_at, leave_at="-", workers="0"):
    """Train with a loop of our own."""

    def open_deadly(ckpt):
        log = open_log(tracker, folder, ckpt)

        def logs(name, value, at):
            log(name, value, at)
            if (name, at) == ("loss", kill_at):
                die(ckpt)

        return logs

    place = folder / "straight" if run is None else run
    leaves = None if leave_at == "-" else int(leave_at)
    test_trackers.train(place, open_deadly, workers=int(workers), leave_at=leaves)


def fit(tracker, folder, run, kill_at):
    """Train with Lightning, by optimizer steps logged one by one."""
    from lightning.pytorch import loggers
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.integrations import lightning_training

    class Killed(lightning_training.Toy):
        def training_step(self, batch, batch_idx):
            if self.trainer.fit_loop.total_batch_idx == kill_at:
                (ours,) = (c for c in self.trainer.callbacks if hasattr(c, "checkpointer"))
                die(ours.checkpointer)
            return super().training_step(batch, batch_idx)

    logger = {
        "csv": lambda: loggers.CSVLogger(folder, name="csv"),
        "tensorboard": lambda: loggers.TensorBoardLogger(folder, name="tb"),
        "mlflow": lambda: loggers.MLFlowLogger("all", tracking_uri=f"sqlite:///{folder}.db"),
        "wandb": lambda: loggers.WandbLogger(save_dir=folder, offline=True),
    }[tracker]()
    how = {"logger": [logger], "callbacks": [ModelCheckpoint()], "enable_checkpointing": True}
    lightning_training.fit(run, module=Killed, options={"every": "1 step"}, **how)


def train_by_trainer(tracker, folder, run, kill_at):
    """Train with the Transformers Trainer."""
    import transformers

    from tests.integrations import transformers_training

    class Kills(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == kill_at:
                die(training.ours.checkpointer)

    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}.db",
        "TENSORBOARD_LOGGING_DIR": str(folder),
    }
    how = {"report_to": tracker, "logging_steps": 1, "ours": {"every": "2 steps"}}
    training = transformers_training.Training(folder / "out", {}, run, **how)
    training.trainer.add_callback(Kills())
    training.train()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    loop, tracker, folder, run, kill_at, *how = sys.argv[1:]
    Path(folder).mkdir(exist_ok=True)
    {"plain": train_plainly, "lightning": fit, "transformers": train_by_trainer}[loop](
        tracker,
        Path(folder),
        None if run == "-" else Path(run),
        None if kill_at == "-" else int(kill_at),
        *how,
    )

"""The Transformers Trainer: with the callback a stop anywhere is exact, and numbers stay theirs."""

from __future__ import annotations

import functools
import multiprocessing
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import trainckpt
from tests.integrations import transformers_training
from tests.integrations.accelerate_training import seed
from tests.integrations.sigterm_at_boundary import strike
from tests.integrations.transformers_training import Training, compared
from tests.long_cases import long
from tests.ranks.processes import preload, run_ranks
from trainckpt.cli.main import main
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.integrations import transformers_callback, transformers_state
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history

preload("tests.integrations.transformers_training")

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch.*", "ignore::FutureWarning", "ignore::DeprecationWarning"
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("stops", [[0, 7, 11, 22], *long([1, 4, 10, 12])], ids=str)
def test_a_stop_at_any_place_of_window_and_epoch_ends_as_the_run_without_us(tmp_path, stops):
    """11 micro-batches an epoch, windows of 4, 4 and 3, evaluations in mid-epoch.

    Compared are samples, losses, state, RNG, the log, epoch fractions, counters, the training's
    own mean loss, and another callback's state.
    """
    assert compared(tmp_path, stops) == []


@pytest.mark.parametrize(
    "how",
    [
        {"train_sampling_strategy": "group_by_length", "eval_strategy": "epoch"},
        {"dataloader_num_workers": 2, "items": 12},
        {"bf16": True, "bf16_full_eval": True, "optim": "adamw_torch_fused"},
        {"max_steps": 4, "data_seed": 5, "logging_strategy": "epoch", "eval_on_start": True},
    ],
    ids=["by length", "workers", "bf16", "max steps"],
)
@pytest.mark.parametrize("stop", [*long(3), 5])
def test_every_kind_of_training_goes_on_where_it_was(tmp_path, how, stop):
    assert compared(tmp_path, [stop], **how) == []


class StopInEvaluation(transformers.TrainerCallback):
    """SIGTERM in an evaluation's first batch."""

    def __init__(self, training):
        self.training, self.sent = training, False

    def on_prediction_step(self, *_, **__):
        if not self.sent:
            self.sent = True
            strike(self.training.ours.checkpointer, here=True)


def test_an_evaluation_that_draws_is_followed_by_the_same_training_wherever_it_stops(tmp_path):
    """Lengths are drawn by, and the evaluation draws from, the generator that training uses."""
    how = {"train_sampling_strategy": "group_by_length"}
    assert compared(tmp_path, [7, 8, 9], **how) == []
    end = Training(tmp_path, {}, **how).train()
    first = Training(tmp_path, {}, tmp_path / "during", **how)
    first.trainer.add_callback(StopInEvaluation(first))
    assert first.train() is None
    assert Training(tmp_path, {}, tmp_path / "during", **how).train() == end


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_under_ddp_stop_at_one_micro_batch_and_go_on_bit_for_bit(tmp_path, world):
    """The window's tokens are counted over all ranks; a resume inside it does not count again."""
    program = functools.partial(transformers_training.of_ranks, items=12 * world)
    found = run_ranks(program, world, str(tmp_path), world, [3] if world == 2 else [5])
    assert found == [([], "DistributedDataParallel")] * world


def test_a_finished_run_goes_on_only_if_there_is_more_to_train(tmp_path):
    """Started again it says the same; with more steps it trains on."""
    first = {}
    end = Training(tmp_path, first, tmp_path / "run", max_steps=3).train()
    again = {}
    told = Training(tmp_path, again, tmp_path / "run", max_steps=3).train()
    assert (told[0], told[2:]) == (end[0], end[2:])
    assert again == {}
    Training(tmp_path, again, tmp_path / "run", max_steps=5).train()
    assert sorted(again) == [*range(len(first), len(first) + 8)]


def test_a_run_that_a_callback_ended_early_goes_on_only_with_more_steps(tmp_path, caplog):
    """What it came to is told, and that nothing is trained."""

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    first, again = {}, {}
    training = Training(tmp_path, first, tmp_path / "run", max_steps=4)
    training.trainer.add_callback(Ends())
    training.train()
    told = Training(tmp_path, again, tmp_path / "run", max_steps=4).train()
    assert (told[3][0], again) == (2, {})
    assert "finished at step 2 of 4, where it was ended early, so train() trains" in caplog.text
    assert Training(tmp_path, again, tmp_path / "run", max_steps=5).train()[3][0] == 5
    assert sorted(again) == [*range(len(first), len(first) + 11)]


def test_a_callback_that_has_finished_its_run_is_refused_for_another_training(tmp_path):
    """A fold of a cross-validation would get the result of the first."""
    training = Training(tmp_path, {}, tmp_path / "run", max_steps=2)
    training.train()
    with pytest.raises(ConfigurationError, match="would only get its result"):
        training.trainer.train()
    training.trainer.args.max_steps = 3
    assert training.trainer.train().global_step == 3


class Raises(transformers.TrainerCallback):
    """Raises once, when it is told of this."""

    def __init__(self, when):
        self.when = when

    def raised(self, when):
        if self.when == when:
            self.when = None
            raise ValueError(when)

    def on_train_begin(self, *_, **__):
        self.raised("train begin")

    def on_epoch_begin(self, args, state, *_, **__):
        self.raised(f"epoch {state.epoch:.0f}")

    def on_evaluate(self, *_, **__):
        self.raised("evaluation before the first epoch")


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("train begin", marks=pytest.mark.long),
        pytest.param("epoch 0", marks=pytest.mark.long),
        "epoch 1",
        pytest.param("evaluation before the first epoch", marks=pytest.mark.long),
        "the end",
    ],
)
def test_what_is_raised_anywhere_ends_the_attempt_and_training_can_begin_again(
    tmp_path, when, monkeypatch
):
    """Signals are the script's again, the record says failed, and the next one goes on."""
    how = {"eval_on_start": True} if "first" in when else {}
    want, seen = {}, {}
    end = Training(tmp_path, want, **how).train()
    training = Training(tmp_path, {}, tmp_path / "run", **how)
    training.trainer.add_callback(Raises(when))
    before, handler = set(vars(training.trainer)), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        if when == "the end":
            patched.setattr(trainckpt.Checkpointer, "close", unwritable)
        with pytest.raises((ValueError, OSError)):
            training.trainer.train()
    assert signal.getsignal(signal.SIGTERM) == handler
    assert not {"_run_epoch", "_evaluate", "get_batch_samples"} & (
        set(vars(training.trainer)) - before
    )
    record = attempt_history.read_attempts(open_directory(str(tmp_path / "run")))[1]
    assert record.outcome["outcome"] == "failed"
    again = Training(tmp_path, seen, tmp_path / "run", **how)
    assert again.train() == end
    assert seen == want


def test_a_trainer_whose_beginning_was_broken_off_saves_when_it_trains_again(tmp_path):
    training = Training(tmp_path, {}, tmp_path / "run", max_steps=2)
    training.trainer.add_callback(Raises("train begin"))
    with pytest.raises(ValueError, match="train begin"):
        training.trainer.train()
    training.trainer.train()
    records = attempt_history.read_attempts(open_directory(str(tmp_path / "run")))
    assert [r.outcome["outcome"] for _, r in sorted(records.items())] == ["failed", "finished"]
    assert training.trainer.callback_handler.callbacks.count(training.ours) == 1


def unwritable(self):
    raise OSError("the disk is full")


def test_callbacks_listed_after_ours_begin_before_they_get_their_state_back(tmp_path):
    """One that makes its state as training begins has it then, and does not begin anew with it."""

    class Average(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            self.steps = 0

        def on_step_end(self, *_, **__):
            self.steps += 1

        def state_dict(self):
            return {"steps": self.steps}

        def load_state_dict(self, state):
            self.steps = state["steps"]

    counted = []
    for strike_at in (5, None):
        training = Training(tmp_path, {}, tmp_path / "run", strike_at=strike_at)
        average = Average()
        training.trainer.add_callback(average)
        training.train()
        assert training.trainer.callback_handler.callbacks.count(training.ours) == 1
        assert training.ours.stopped == (strike_at is not None)
        counted.append(average.steps)
    assert counted == [1, 6]


def test_a_callback_that_another_adds_as_training_begins_is_kept_and_called(tmp_path):
    """Ours is behind the others by then, goes behind that one too, and ends where it was first."""
    training, heard = Training(tmp_path, {}, tmp_path / "run", max_steps=2), []

    class Added(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            heard.append("begin")

        def on_step_end(self, *_, **__):
            heard.append("step")

    class Adds(transformers.TrainerCallback):
        def on_train_begin(self, *_, **__):
            training.trainer.add_callback(Added())

    training.trainer.add_callback(Adds())
    training.train()
    assert heard == ["begin", "step", "step"]
    callbacks = training.trainer.callback_handler.callbacks
    assert [type(each) for each in callbacks].count(Added) == 1
    assert callbacks.count(training.ours) == 1


def test_another_accumulation_is_refused_inside_an_epoch_and_other_settings_are_said(
    tmp_path, caplog
):
    caplog.set_level("INFO", logger="trainckpt")
    Training(tmp_path, {}, tmp_path / "run", strike_at=5).train()
    with pytest.raises(ConfigurationError, match="gradient_accumulation_steps is 2, and was 4"):
        Training(tmp_path, {}, tmp_path / "run", gradient_accumulation_steps=2).train()
    caplog.clear()
    other = {"max_grad_norm": 0.1, "lr_scheduler_type": "constant"}
    assert Training(tmp_path, {}, tmp_path / "run", strike_at=11, **other).train() is None
    assert ": same data, not bitwise" in caplog.text
    assert "max_grad_norm 0.5 then, 0.1 now" in caplog.text
    training = Training(tmp_path, {}, tmp_path / "run", gradient_accumulation_steps=2)
    assert training.train()[3][0] == 3 + 6


def test_a_resume_lists_changed_arguments_with_the_value_that_counts(tmp_path, caplog):
    """More steps, another schedule for them; the learning rate of the optimizer that came back."""
    caplog.set_level("INFO", logger="trainckpt")
    before = {"lr_scheduler_type": "linear", "learning_rate": 0.1, "max_steps": 6}
    Training(tmp_path, {}, tmp_path / "run", strike_at=5, **before).train()
    now = {**before, "learning_rate": 0.5, "save_steps": 7, "max_steps": 8}
    training = Training(tmp_path, {}, tmp_path / "run", **now)
    training.train()
    assert "max_steps 6 then, 8 now (the new value counts, and the schedule of" in caplog.text
    assert "learning rate optimizer lr 0.1 0.5 snapshot" in " ".join(caplog.text.split())
    assert "save_steps 500 then, 7 now: the new value counts, and changes nothing" in caplog.text
    assert training.trainer.state.global_step == 8
    assert training.trainer.optimizer.param_groups[0]["initial_lr"] == 0.1


def test_another_micro_batch_at_the_same_global_batch_is_refused_or_named(tmp_path, caplog):
    """transformers#43708: 2 samples in each of 4 micro-batches, then 4 in each of 2."""
    caplog.set_level("INFO", logger="trainckpt")
    Training(tmp_path, {}, tmp_path / "run", strike_at=5).train()
    now = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with pytest.raises(StateMismatch) as refused:
        Training(tmp_path, {}, tmp_path / "run", **now).train()
    assert "batch_size was 2, is 4" in str(refused.value)


def test_what_changes_nothing_that_is_trained_leaves_the_resume_bitwise(tmp_path, caplog):
    caplog.set_level("INFO", logger="trainckpt")
    Training(tmp_path, {}, tmp_path / "run", strike_at=5).train()
    other = {"seed": 3, "data_seed": 4, "save_steps": 7, "learning_rate": 0.5}
    end = Training(tmp_path, {}, tmp_path / "run", **other).train()
    assert end == Training(tmp_path, {}).train()
    assert "this resume is bitwise" in caplog.text


def test_windows_whose_batches_are_made_anew_are_refused(tmp_path):
    training = Training(tmp_path, {}, tmp_path / "run")
    collect = training.trainer.get_batch_samples

    def copied(*args):
        window, items = collect(*args)
        return [dict(batch) for batch in window], items

    training.trainer.get_batch_samples = copied
    with pytest.raises(ConfigurationError, match="makes other micro-batches"):
        training.train()


def test_whatever_a_script_logs_is_saved_as_text_or_a_number(tmp_path):
    """Else no save after it would succeed."""
    training = Training(tmp_path, {}, tmp_path / "run", strike_at=5)
    odd = {"f1": np.float32(0.5), "loss": torch.tensor(2.0), "when": Path("x"), "of": {3: (1,)}}
    training.trainer.add_callback(Logs(odd))
    assert training.train() is None
    training = Training(tmp_path, {}, tmp_path / "run")
    training.train()
    plain = {"f1": 0.5, "loss": 2.0, "when": "x", "of": {"3": [1]}, "step": 0}
    assert training.trainer.state.log_history[0] == plain


class Logs(transformers.TrainerCallback):
    """Puts a line into the log."""

    def __init__(self, line):
        self.line = line

    def on_epoch_begin(self, args, state, *_, **__):
        state.log_history.append({**self.line, "step": state.global_step})


def test_workers_end_with_a_training_that_ends_inside_an_epoch(tmp_path):
    before = set(multiprocessing.active_children())
    training = Training(tmp_path, {}, tmp_path / "run", max_steps=1, dataloader_num_workers=2)
    training.train()
    assert set(multiprocessing.active_children()) <= before


def test_a_sum_that_another_release_lacks_is_left_out(tmp_path, monkeypatch):
    sums = (*transformers_state._SUMS, "_of_another_release")
    monkeypatch.setattr(transformers_state, "_SUMS", sums)
    assert compared(tmp_path, [5]) == []


def test_its_own_checkpoints_are_saved_as_ever_and_the_trainer_is_left_as_it_was(tmp_path):
    names = []
    for place in (None, tmp_path / "run"):
        folder = tmp_path / f"own-{place is None}"
        training = Training(folder, {}, place, save_strategy="steps", save_steps=3)
        before = set(vars(training.trainer)) | set(vars(training.trainer.callback_handler))
        training.train()
        names.append(sorted(str(file.relative_to(folder)) for file in folder.rglob("*")))
        after = set(vars(training.trainer)) | set(vars(training.trainer.callback_handler))
        assert not {"_run_epoch", "get_batch_samples", "on_epoch_begin"} & (after - before)
    assert names[0] == names[1]
    assert any("checkpoint-3" in name for name in names[0])


def test_a_stop_ends_the_script_with_the_code_for_start_me_again(tmp_path, stays_when_stopped):
    exits = {"ours": {"on_stop": "exit"}}
    with pytest.raises(trainckpt.Stopped) as caught:
        Training(tmp_path, {}, tmp_path / "run", strike_at=2, **exits).train()
    assert caught.value.code == 75


def test_a_gpt2_that_is_exported_is_loaded_by_transformers_to_the_last_bit(
    tmp_path, monkeypatch, capsys
):
    """In one file and in several with an index; the head is tied to the embedding, and left out."""
    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)
    seed(0)
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with trainckpt.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ckpt:
        ckpt.boundary()
        ids = torch.arange(16).view(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for how in ([], ["--max-shard-size", "5kB"]):
        out = tmp_path / f"out{len(how)}"
        out.mkdir()
        config.save_pretrained(out)
        assert main(["export", str(tmp_path / "run"), str(out), *how]) == 0
        assert (len(list(out.glob("*.safetensors"))) > 1) == bool(how)
        loaded, said = transformers.GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
        assert not any(said.values()), said
        found, expected = loaded.state_dict(), model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight
    capsys.readouterr()


# ---- wrong use


def refused(training, *words, **how):
    with pytest.raises(ConfigurationError) as caught:
        training.train(**how)
    assert all(word in str(caught.value) for word in words), caught.value
    assert caught.value.hint


def test_wrong_use_gets_one_sentence_and_what_to_do(tmp_path):
    def new(**args):
        return Training(tmp_path, {}, tmp_path / "run", **args)

    two = new()
    two.trainer.add_callback(trainckpt.transformers.TrainckptCallback(tmp_path / "other"))
    refused(two, "2 TrainckptCallbacks", "leave one")
    refused(new(ignore_data_skip=True), "ignore_data_skip")
    keeps = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    refused(new(**keeps), "workers of evaluations", "eval_strategy='no'")
    layerwise = new(max_steps=2)
    layerwise.trainer.optimizer = LayerWiseDummyOptimizer(optimizer_dict={}, lr=0.1)
    refused(layerwise, "layerwise optimizer", "without '_layerwise'")
    stream = new(max_steps=2)
    stream.trainer.train_dataset = Stream()
    refused(stream, "IterableDataset", "map-style")
    folder = tmp_path / "checkpoint-1"
    new(save_strategy="steps", save_steps=1, max_steps=1).train()
    refused(new(), "would each resume", resume_from_checkpoint=str(folder))
    with pytest.raises(ConfigurationError, match=r"no transformers\.Trainer is training here"):
        trainckpt.transformers.TrainckptCallback(tmp_path).on_train_begin()


class Stream(IterableDataset):
    """Data without indices."""

    def __iter__(self):
        return iter(transformers_training.Tokens())


def test_another_model_is_refused_with_every_difference(tmp_path):
    Training(tmp_path, {}, tmp_path / "run", strike_at=3).train()
    training = Training(tmp_path, {}, tmp_path / "run")
    training.trainer.model.head = torch.nn.Linear(8, 4)
    with pytest.raises(StateMismatch, match=r"model/head\.weight has shape"):
        training.train()


@pytest.mark.parametrize("name", ["model", "trainer", "loader"])
def test_an_object_under_a_name_of_the_trainers_own_is_refused(tmp_path, name):
    training = Training(tmp_path, {}, tmp_path / "run", ours={name: torch.nn.Linear(1, 1)})
    with pytest.raises(ConfigurationError, match=f"^{name}: an object of the Trainer is tracked"):
        training.train()
    assert not (tmp_path / "run").exists()


def test_a_trainer_built_in_another_way_is_refused_when_the_callback_is_made(monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "get_batch_samples")
    monkeypatch.setattr(transformers_callback, "_USED", ())
    with pytest.raises(ConfigurationError, match="get_batch_samples, which fetches a window"):
        trainckpt.transformers.TrainckptCallback("runs/x")


class Shift:
    """A transform of the inputs."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x + self.by


class Shifted(transformers_training.Tokens):
    transform = Shift(0.0)

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return {**item, "input_ids": self.transform(item["input_ids"])}


class ShiftByEpoch(transformers.TrainerCallback):
    """Sets the transform of an epoch as it begins, and counts epochs without a state."""

    def __init__(self, data):
        self.data, self.began = data, []

    def on_epoch_begin(self, args, state, control, **_):
        self.began.append(state.epoch)
        self.data.transform = Shift(0.5 * state.epoch)


@pytest.mark.parametrize("strike_at", [*long(2), 14])
def test_an_epoch_that_is_resumed_begins_again_for_the_callbacks(tmp_path, caplog, strike_at):
    def train(place, seen, strike_at=None):
        training = Training(place, seen, place / "run", strike_at)
        training.trainer.train_dataset = data = Shifted()
        training.trainer.add_callback(callback := ShiftByEpoch(data))
        training.train()
        return callback.began

    caplog.set_level("INFO", "trainckpt")
    want, seen = {}, {}
    began = train(tmp_path / "straight", want)
    train(tmp_path / "stopped", seen, strike_at)
    assert train(tmp_path / "stopped", seen) == began == [0, 1.0]
    assert seen == want
    assert "not exact" not in caplog.text

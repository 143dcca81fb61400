"""A script that gives other values than the run had: which value counts, and what is said."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from tests.end_to_end.training import Crash, record
from trainckpt import Checkpointer
from trainckpt.attempt import git_commit
from trainckpt.cli.main import main
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.resume import script_values

WAIT_S = 60.0

PARTS = {"lr": (0.1, 0.5), "weight_decay": (0.0, 0.25), "betas": ((0.9, 0.999), (0.8, 0.9))}
KINDS = {"lr": "learning rate", "weight_decay": "weight decay", "betas": "optimizer"}


@pytest.fixture(autouse=True)
def _from_info_on(caplog):
    caplog.set_level("INFO", logger="trainckpt")


class Training:
    """What a script builds, with what may differ at the next start."""

    def __init__(self, *, warms_up=False, length=None, p=0.0, lr=0.1, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Dropout(p), nn.Linear(2, 1), nn.Dropout(p))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, **options)
        if length is None:
            factor = (lambda n: n / 9) if warms_up else (lambda _: 1)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)
        else:
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, length)

    def run(self, place, steps, *, on_the_way=None, in_the_loop=None, **options):
        """Train until so many steps; the rate of each step, and the Checkpointer."""
        optimizer, rates = self.optimizer, []
        with Checkpointer(place, **vars(self), **options) as ckpt:
            optimizer.param_groups[0].update(on_the_way or {})
            while ckpt.cursor.step < steps:
                ckpt.boundary()
                optimizer.param_groups[0].update(in_the_loop or {})
                rates.append(optimizer.param_groups[0]["lr"])
                self.model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                self.schedule.step()
                optimizer.zero_grad()
        return rates, ckpt


def trained(place, steps, *, on_the_way=None, in_the_loop=None, changed=None, **made):
    training = Training(**made)
    how = {"on_the_way": on_the_way, "in_the_loop": in_the_loop, "changed": changed}
    training.run(place, steps, **how)
    return training.optimizer.param_groups[0]


def rows(caplog):
    """The rows of the tables in the log, their words joined by one space."""
    tables = [m for m in caplog.messages if m.startswith("the script has changed since")]
    return [" ".join(line.split()) for table in tables for line in table.splitlines()[2:]]


# ---- optimizers


@pytest.mark.parametrize("name", PARTS)
def test_a_resume_says_once_that_the_value_of_the_snapshot_counts(tmp_path, caplog, name):
    then, now = PARTS[name]
    trained(tmp_path, 2, **{name: then})
    for steps in (4, 6):  # the second resume says it too
        caplog.clear()
        group = trained(tmp_path, steps, **{name: now})
        assert group[name] == then
        assert rows(caplog) == [f"{KINDS[name]} optimizer {name} {then} {now} snapshot"]
        assert f'pass changed="{KINDS[name]}: script"' in caplog.text
        assert "not bitwise: " not in caplog.text


@pytest.mark.parametrize("name", PARTS)
def test_the_scripts_value_counts_and_holds_where_it_is_chosen(tmp_path, caplog, name):
    then, now = PARTS[name]
    trained(tmp_path, 2, **{name: then})
    group = trained(tmp_path, 4, changed={KINDS[name]: "script"}, **{name: now})
    assert group[name] == now
    assert rows(caplog) == [f"{KINDS[name]} optimizer {name} {then} {now} script"]
    assert f"not bitwise: {KINDS[name]}: optimizer {name} was {then}, is {now}" in caplog.text
    caplog.clear()
    assert trained(tmp_path, 6, **{name: now})[name] == now  # the run has it now
    assert rows(caplog) == []


@pytest.mark.parametrize("name", PARTS)
def test_a_refused_kind_refuses_the_resume_and_names_every_difference(tmp_path, name):
    then, now = PARTS[name]
    trained(tmp_path, 2, p=0.1, **{name: then})
    with pytest.raises(StateMismatch, match=f"{KINDS[name]} may not") as refusal:
        trained(tmp_path, 4, p=0.2, changed=f"{KINDS[name]}: refuse", **{name: now})
    assert list(refusal.value.differences) == [
        f"{KINDS[name]}: optimizer {name} was {then}, is {now}",
        "dropout: model.*.p was 0.1, is 0.2",
    ]
    assert record(tmp_path, 2)["outcome"]["exit_code"] == 78


def test_the_rate_of_the_script_goes_through_the_schedule(tmp_path):
    straight, _ = Training(warms_up=True, lr=0.4).run(tmp_path / "straight", 6)
    Training(warms_up=True, lr=0.1).run(tmp_path / "run", 3)
    resumed = Training(warms_up=True, lr=0.4)
    rates, _ = resumed.run(tmp_path / "run", 6, changed="learning rate: script")
    assert rates == pytest.approx(straight[3:])
    assert resumed.schedule.base_lrs == [0.4]
    assert resumed.optimizer.param_groups[0]["initial_lr"] == 0.4


def test_a_rate_in_a_tensor_stays_in_it(tmp_path):
    def made(lr):
        training = Training()
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=torch.tensor(lr))
        training.schedule = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)
        return training

    made(0.5).run(tmp_path, 1)
    resumed = made(0.25)
    rates, _ = resumed.run(tmp_path, 2, changed="learning rate: script")
    assert isinstance(rates[0], torch.Tensor)
    assert rates[0].item() == 0.0625  # halved by the schedule, once before and once after the step


def test_a_schedule_that_has_moved_the_rate_is_no_change(tmp_path, caplog):
    trained(tmp_path, 2, warms_up=True)
    trained(tmp_path, 4, warms_up=True)
    assert rows(caplog) == []


def test_a_value_set_between_resume_and_first_batch_is_undone_and_named(tmp_path, caplog):
    trained(tmp_path, 2)
    group = trained(tmp_path, 4, on_the_way={"weight_decay": 0.5})
    assert group["weight_decay"] == 0.01
    (line,) = [line for line in caplog.messages if "weight_decay 0.5 set, 0.01 saved" in line]
    assert "set it in the loop, once a batch is there" in line


def test_a_value_set_in_the_loop_counts(tmp_path, caplog):
    trained(tmp_path, 2)
    assert trained(tmp_path, 4, in_the_loop={"weight_decay": 0.5})["weight_decay"] == 0.5
    assert " set, " not in caplog.text


# ---- schedule, dropout, accumulation


def test_the_length_of_a_schedule_is_the_snapshots_unless_the_script_is_chosen(tmp_path, caplog):
    Training(length=10).run(tmp_path, 2)
    for steps in (4, 6):
        caplog.clear()
        resumed = Training(length=20)
        resumed.run(tmp_path, steps)
        assert resumed.schedule.T_max == 10
        assert rows(caplog) == ["schedule schedule.T_max 10 20 snapshot"]
    caplog.clear()
    resumed = Training(length=20)
    resumed.run(tmp_path, 8, changed="schedule: script")
    assert (resumed.schedule.T_max, resumed.schedule.last_epoch) == (20, 8)
    assert rows(caplog) == ["schedule schedule.T_max 10 20 script"]
    caplog.clear()
    Training(length=20).run(tmp_path, 9)
    assert rows(caplog) == []
    with pytest.raises(StateMismatch, match=r"class.* was CosineAnnealingLR, is LambdaLR"):
        Training(warms_up=True).run(tmp_path, 10, changed="schedule: script")


SCHEDULES = {
    "ExponentialLR": lambda of: schedules.ExponentialLR(of, 0.9),
    "CosineAnnealingWarmRestarts": lambda of: schedules.CosineAnnealingWarmRestarts(of, 2, 2),
    "OneCycleLR": lambda of: schedules.OneCycleLR(of, 0.3, total_steps=30),  # moves betas too
    "SequentialLR": lambda of: schedules.SequentialLR(
        of, [schedules.ConstantLR(of, 0.5, 2), schedules.ExponentialLR(of, 0.9)], [2]
    ),
    "ChainedScheduler": lambda of: schedules.ChainedScheduler(
        [schedules.ConstantLR(of, 0.5, 2), schedules.ExponentialLR(of, 0.9)]
    ),
}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_second_attempt_with_the_objects_of_the_first_has_no_table(tmp_path, caplog, name, steps):
    """Training has moved them, and the script has given nothing else."""
    training = Training()
    training.schedule = SCHEDULES[name](training.optimizer)
    training.run(tmp_path, steps, every="1 step" if steps == 1 else "2 steps")
    training.run(tmp_path, 6)
    assert rows(caplog) == []
    fresh = Training()
    fresh.schedule = SCHEDULES[name](fresh.optimizer)
    fresh.run(tmp_path, 8)
    assert rows(caplog) == []


def test_a_second_attempt_with_the_same_objects_names_what_the_script_has_changed(tmp_path, caplog):
    training = Training(length=10)
    training.run(tmp_path, 3)
    training.schedule.T_max = 20
    training.optimizer.param_groups[0]["weight_decay"] = 0.5
    training.run(tmp_path, 6)
    assert rows(caplog) == [
        "weight decay optimizer weight_decay 0.01 0.5 snapshot",
        "schedule schedule.T_max 10 20 snapshot",
    ]


def test_a_rate_moved_by_hand_is_compared_also_after_a_step_before_the_checkpointer(
    tmp_path, caplog
):
    def train(steps, lr, **options):
        training = Training(lr=lr)
        training.model(torch.ones(1, 2)).sum().backward()
        training.optimizer.step()
        del training.schedule
        with Checkpointer(tmp_path, **vars(training), **options) as ckpt:
            rate = training.optimizer.param_groups[0]["lr"]
            while ckpt.cursor.step < steps:
                ckpt.boundary()
                training.optimizer.step()
                training.optimizer.param_groups[0]["lr"] *= 0.5
        return rate

    train(2, 0.1)
    train(4, 0.4, changed="learning rate: script")
    assert rows(caplog) == ["learning rate optimizer lr 0.1 0.4 script"]


def test_dropout_is_the_scripts_unless_the_snapshot_is_chosen(tmp_path, caplog):
    Training(p=0.1).run(tmp_path, 2)
    _, ckpt = Training(p=0.3).run(tmp_path, 4)
    assert rows(caplog) == ["dropout model.*.p 0.1 0.3 script"]
    assert "not bitwise: dropout: model.*.p was 0.1, is 0.3" in caplog.text
    assert record(tmp_path, ckpt.attempt)["outcome"]["exactness"] == "same data, not bitwise"
    resumed = Training(p=0.5)
    resumed.run(tmp_path, 6, changed={"dropout": "snapshot"})
    assert [resumed.model[0].p, resumed.model[2].p] == [0.3, 0.3]


def test_another_accumulation_is_listed(tmp_path, caplog):
    Training().run(tmp_path, 2, accumulate=2)
    Training().run(tmp_path, 4, accumulate=4)
    assert rows(caplog) == ["accumulation accumulate 2 4 script"]
    with pytest.raises(StateMismatch, match="accumulation may not"):
        Training().run(tmp_path, 6, accumulate=8, changed="accumulation: refuse")


def test_another_length_of_the_windows_is_listed_once_it_is_seen(tmp_path, caplog):
    def train(steps, micro_batches):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Checkpointer(tmp_path, model=model, optimizer=optimizer) as ckpt:
            while ckpt.cursor.step < steps:
                for _ in range(micro_batches):
                    ckpt.boundary()
                    model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
        return ckpt

    train(4, 2)
    assert record(tmp_path, 1)["script"]["accumulation"] == 2
    train(8, 2)
    assert rows(caplog) == []
    ckpt = train(12, 3)
    assert rows(caplog) == ["accumulation micro-batches of a window 2 3 script"]
    assert record(tmp_path, ckpt.attempt)["outcome"]["exactness"] == "same data, not bitwise"


def test_equal_scripts_have_no_table(tmp_path, caplog):
    Training(p=0.1, length=5).run(tmp_path, 2, accumulate=2)
    _, ckpt = Training(p=0.1, length=5).run(tmp_path, 4, accumulate=2)
    assert rows(caplog) == []
    assert "changes" not in record(tmp_path, ckpt.attempt)


def test_a_choice_that_there_is_not_is_refused(tmp_path):
    for changed in ("batch size: snapshot", "rate: script", {"dropout": 3}):
        with pytest.raises(ConfigurationError, match=r"changed=.* is not an option") as refusal:
            Training().run(tmp_path, 1, changed=changed)
        assert "batch size (refuse, script)" in refusal.value.hint


# ---- data

LENGTH = 12


def passes(place, *, stop_at=None, epochs=2, late=False, length=LENGTH, sampler=None, **options):
    """Train micro-batches, until number `stop_at` of all; the samples of each epoch."""
    size = options.pop("batch_size", 2)
    data = TensorDataset(torch.arange(length))
    how = {"shuffle": True} if sampler is None else {"sampler": sampler(data)}
    torch.manual_seed(0)
    loader = DataLoader(data, size, **how)
    given = {} if late else {"loader": loader}
    seen = {}
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tracked = {"model": model, "optimizer": optimizer, **given}
    with (
        contextlib.suppress(Crash),
        Checkpointer(place, **tracked, every="1 steps", **options) as ckpt,
    ):
        loader = ckpt.loader(loader)
        for epoch in ckpt.epochs(epochs):
            for (ids,) in loader:
                if ckpt.cursor.micro_batches == stop_at:
                    raise Crash
                seen.setdefault(epoch, []).append(ids.tolist())
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
    return seen


@pytest.mark.parametrize("late", [False, True])
def test_the_rest_of_an_epoch_in_batches_of_another_size(tmp_path, caplog, late):
    first = passes(tmp_path, stop_at=3, late=late)
    with pytest.raises(StateMismatch, match="batch_size was 2, is 3"):
        passes(tmp_path, batch_size=3, late=late)
    then = passes(tmp_path, batch_size=3, late=late, changed="batch size: script")
    assert rows(caplog) == ["batch size loader 2 3 script"]
    assert "not bitwise: batch size: loader was 2, is 3" in caplog.text.replace("exact", "bitwise")
    repeated = then[0][0] if len(then[0]) == 3 else []
    assert [len(ids) for ids in then[0]] == [3, 3] or repeated
    both = [i for ids in first[0][: 3 - bool(repeated)] + then[0] for i in ids]
    assert sorted(both) == list(range(LENGTH))
    assert sorted(i for ids in then[1] for i in ids) == list(range(LENGTH))


@pytest.mark.parametrize(
    ("kind", "made"),
    [("dataset length", {"length": 20}), ("sampler", {"sampler": SequentialSampler})],
)
def test_other_data_begin_with_an_epoch(tmp_path, caplog, kind, made):
    passes(tmp_path, stop_at=3)
    with pytest.raises(StateMismatch, match="the snapshot lies inside an epoch"):
        passes(tmp_path, changed={kind: "script"}, **made)
    passes(tmp_path, epochs=1)
    with pytest.raises(StateMismatch, match=f"{kind} was"):
        passes(tmp_path, **made)
    caplog.clear()
    then = passes(tmp_path, changed={kind: "script"}, **made)
    assert rows(caplog)[0].startswith(f"{kind} loader ")
    assert list(then) == [1]
    assert len([i for ids in then[1] for i in ids]) == made.get("length", LENGTH)


# ---- arguments, git commit


def be_script(path, monkeypatch):
    script = ModuleType("__main__")
    script.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", script)


def test_other_arguments_and_another_commit_are_listed_and_recorded(
    tmp_path, caplog, capsys, monkeypatch
):
    def git(*command):
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        run = subprocess.run(
            ["git", *who, *command], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return run.stdout.strip()

    monkeypatch.setattr(script_values, "GIT_WAIT_S", WAIT_S)  # a busy machine is slow too
    be_script(tmp_path / "train.py", monkeypatch)
    (tmp_path / "train.py").write_text("1")
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "one")
    one = git("rev-parse", "HEAD")
    place = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train.py", "data", "--lr", "0.1", "--api-key", "hush"])
    Training().run(place, 2)
    (tmp_path / "train.py").write_text("2")
    monkeypatch.setattr(sys, "argv", ["train.py", "data", "--lr", "0.2", "--api-key", "tush"])
    Training().run(place, 4)
    commits = f"git commit script {one[:10]} {one[:10]}-dirty script"
    assert rows(caplog) == ["arguments script --lr 0.1 --lr 0.2 script", commits]
    assert "not bitwise: " not in caplog.text
    written = (place / "attempts" / "1.json").read_text() + caplog.text
    assert "hush" not in written
    assert record(place, 1)["script"]["git commit"] == one
    capsys.readouterr()
    assert main(["show", str(place), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["changes"]
    assert [change["kind"] for change in shown] == ["arguments", "git commit"]
    assert main(["show", str(place)]) == 0
    assert "the script had changed when this attempt resumed" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["train.py"])
    (tmp_path / "train.py").write_text("1")
    for kind in ("arguments", "git commit"):
        with pytest.raises(StateMismatch, match=f"and {kind} may not"):
            Training().run(place, 6, changed={kind: "refuse"})


def test_a_slow_git_holds_up_no_step_and_its_commit_is_listed_once_it_is_known(
    tmp_path, caplog, monkeypatch
):
    git, answer, place = tmp_path / "git", tmp_path / "answer", tmp_path / "run"
    be_script(tmp_path / "train.py", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    git.write_text(f"#!/bin/sh\necho {'1' * 40}")
    git.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(script_values, "GIT_WAIT_S", WAIT_S)
        Training().run(place, 2)
    git.write_text(f"#!/bin/sh\ncat {answer}")  # waits for what is written
    os.mkfifo(answer)
    training = Training()
    with Checkpointer(place, **vars(training)) as ckpt:
        while ckpt.cursor.step < 6:
            ckpt.boundary()
            if ckpt.cursor.step == 4:
                assert rows(caplog) == []
                answer.write_text("2" * 40)
                assert ckpt._context.git_commit.is_known_within(WAIT_S)
            training.optimizer.step()
    assert rows(caplog) == [f"git commit script {'1' * 10} {'2' * 10} script"]
    assert record(place, 2)["script"]["git commit"] == "2" * 40


REFUSES = {"changed": {"git commit": "refuse"}}


def test_a_commit_that_git_does_not_name_any_more_is_refused(tmp_path, monkeypatch):
    git, place = tmp_path / "git", tmp_path / "run"
    be_script(tmp_path / "train.py", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    git.write_text(f"#!/bin/sh\necho {'1' * 40}")
    git.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(script_values, "GIT_WAIT_S", WAIT_S)
        Training().run(place, 2)
    git.write_text("#!/bin/sh\necho 'fatal: no repository' >&2\nexit 128")
    with pytest.raises(StateMismatch) as refused:
        Training().run(place, 4, **REFUSES)
    change = f"git commit: script was {'1' * 10}, is not known: "
    assert refused.value.differences == (f"{change}fatal: no repository",)
    git.write_text("#!/bin/sh\nexec sleep 86400")
    monkeypatch.setattr(git_commit, "TIMEOUT_S", 0.1)
    with pytest.raises(StateMismatch) as refused:
        Training().run(place, 4, **REFUSES)
    assert refused.value.differences == (f"{change}git did not answer",)
    Training().run(place, 4)


def test_with_nothing_to_resume_no_start_waits_for_git_and_its_end_ends_git(tmp_path, monkeypatch):
    git = tmp_path / "git"
    be_script(tmp_path / "train.py", monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    git.write_text("#!/bin/sh\nexec sleep 86400")
    git.chmod(0o700)
    training = Training()
    with Checkpointer(tmp_path / "run", **vars(training), **REFUSES) as ckpt:
        ckpt.boundary()
        commit = ckpt._context.git_commit
        assert not commit.is_known_within(0)
        training.optimizer.step()
    assert commit.is_known_within(WAIT_S / 2)
    assert commit.value is None

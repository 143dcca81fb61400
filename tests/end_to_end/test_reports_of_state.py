"""Public reports of wrong resumes, as programs: state of models, optimizers and schedulers.

Each is run three ways: a resumed run goes on as the one that was not stopped, and not as a cold one
does, which begins anew where the other was stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.end_to_end.training import Crash
from trainckpt import Checkpointer, load
from trainckpt.errors import StateMismatch

NUM, STOP = 12, 5  # micro-batches of a run, and where it is stopped


class Program:
    """A script: what it tracks, and what it does in one micro-batch. One step in each."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)

    def tracked(self):
        return vars(self)

    def train(self, number):
        self.optimizer.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        return loss

    def loss(self, number):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        dtype = next(self.model.parameters()).dtype
        return self.model(x.to(dtype)).float().square().mean()

    def evaluate(self, number):
        """After the micro-batch, if the program does that."""


def run(place, make, crash_at=None, first=0, end=NUM):
    """Losses by micro-batch; the program."""
    program, losses = make(), {}
    with Checkpointer(place, every="1 steps", **program.tracked()) as ckpt:
        for number in range(max(first, ckpt.cursor.micro_batches), end):
            ckpt.boundary()
            if number == crash_at:
                raise Crash
            losses[number] = program.train(number).item().hex()
            program.evaluate(number)
    return losses, program


def resumes_exactly(place, make, stop=STOP):
    """Run it three ways; the programs at the end: straight and resumed."""
    straight, whole = run(place / "straight", make)
    with pytest.raises(Crash):
        run(place / "run", make, crash_at=stop)
    resumed, rest = run(place / "run", make)
    cold, _ = run(place / "cold", make, first=stop)
    assert resumed == {number: straight[number] for number in range(stop, NUM)}
    assert cold != resumed
    return whole, rest


class Freezing(Program):
    """pytorch#192202: a layer is trained, frozen, and trained again."""

    def train(self, number):
        self.model[0].requires_grad_(not 3 <= number < 8)
        return super().train(number)


class Moments(torch.optim.Optimizer):
    """Momentum of one type, whatever the parameters are; some is in the groups, as flags are."""

    def __init__(self, params, dtype):
        super().__init__(params, {"lr": 0.05, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if "d" not in group:  # made at the first step
                group["d"] = torch.tensor(1e-6, dtype=torch.float64)
                group["history"], group["warm"] = [], False
            group["warm"] = True
            for p in group["params"]:
                zeros = torch.zeros(p.shape, dtype=group["dtype"])
                kept = self.state[p].setdefault("momentum", zeros)
                kept.mul_(0.9).add_(p.grad.to(kept.dtype))
                group["d"].add_(kept.double().abs().sum())
                p.sub_(group["lr"] * group["d"].float().to(p.dtype) * kept.to(p.dtype))
            group["history"].append(float(group["d"]))


class MomentsOfAnotherType(Program):
    """pytorch#43706, torchtitan#4615; prodigy-plus-schedule-free#19: tensors in groups."""

    parameters, moments = torch.bfloat16, torch.float32

    def __init__(self):
        super().__init__()
        self.model.to(self.parameters)
        self.optimizer = Moments(self.model.parameters(), self.moments)


class NarrowMoments(MomentsOfAnotherType):
    parameters, moments = torch.float32, torch.bfloat16


class Sequential(Program):
    """pytorch#162591: a sequence of schedules, some made with arguments that say where they are."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        parts = [
            lr_scheduler.ConstantLR(self.optimizer, 0.1, total_iters=3),
            lr_scheduler.ExponentialLR(self.optimizer, 0.9),
        ]
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, parts, [3])

    def train(self, number):
        loss = super().train(number)
        self.scheduler.step()
        return loss


class OtherSequential(Sequential):
    """The same schedules, made with other arguments than the saved ones were."""

    def __init__(self):
        super().__init__()
        parts = [
            lr_scheduler.ConstantLR(self.optimizer, 0.7, total_iters=9),
            lr_scheduler.ExponentialLR(self.optimizer, 0.2),
        ]
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, parts, [6])


class Gradual(lr_scheduler.LRScheduler):
    """pytorch-gradual-warmup-lr: its state_dict holds a scheduler, and so the optimizer."""

    def __init__(self, optimizer, after):
        self.after_scheduler, self.finished = after, False
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch > 3:
            self.finished = True
            return self.after_scheduler.get_last_lr()
        return [base * (self.last_epoch + 1) / 4 for base in self.base_lrs]

    def step(self, epoch=None):
        if self.finished:
            self.after_scheduler.step()
        super().step(epoch)


class Warmup(Program):
    """pytorch-gradual-warmup-lr#27."""

    def __init__(self):
        super().__init__()
        after = lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.scheduler = Gradual(self.optimizer, after)

    def train(self, number):
        loss = super().train(number)
        self.scheduler.step()
        return loss


class Spectral(Program):
    """miles-credit#409: u and v of spectral norm, and an average of them."""

    norm = staticmethod(nn.utils.parametrizations.spectral_norm)

    def __init__(self):
        super().__init__()
        self.norm(self.model[0])
        self.average = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def train(self, number):
        loss = super().train(number)
        self.average.update_parameters(self.model)
        return loss


class LegacySpectral(Spectral):
    norm = staticmethod(nn.utils.spectral_norm)


class Centred(nn.Linear):
    """nflows#4: subtracts a mean of what came so far, in buffers outside its state_dict."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(sizes[0]), persistent=False)
        self.register_buffer("is_set", torch.tensor(False), persistent=False)

    def forward(self, x):
        mean = x.detach().mean(0)
        self.mean.copy_(self.mean.lerp(mean, 0.1) if self.is_set else mean)
        self.is_set.fill_(True)
        return super().forward(x - self.mean)


class Unsaved(Program):
    """falcon#115, nflows#4: buffers with persistent=False that a forward changes."""

    def __init__(self):
        super().__init__()
        self.model[0] = Centred(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)


class Tied(Program):
    """Automodel#2511: really tied, so they stay one."""

    tied = True

    def __init__(self):
        super().__init__()
        self.model = nn.ModuleDict({"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 4)})
        if self.tied:
            self.model["outer"].weight = self.model["inner"].weight
        else:  # equal by the configuration only
            self.model["outer"].weight.data = self.model["inner"].weight.data.clone()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)

    def loss(self, number):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        return self.model["outer"](self.model["inner"](x).tanh()).square().mean()


class TiedByName(Tied):
    tied = False


class Low(nn.Module):
    """A toy of LoRA, wrapped around a layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Adapter(Program):
    """lerobot#3459, diffusers#6366."""

    def __init__(self):
        super().__init__()
        self.model[0], self.model[2] = Low(self.model[0]), Low(self.model[2])
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 0.05)


class Swapping(Program):
    """schnetpack#785, ace#1438: averaged weights are swapped in for an evaluation."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def train(self, number):
        loss = super().train(number)
        self.average.update_parameters(self.model)
        return loss

    def swap(self):
        pairs = zip(self.model.parameters(), self.average.module.parameters(), strict=True)
        for mine, mean in pairs:
            mine.data, mean.data = mean.data, mine.data


class Compiled(Program):
    """torchtitan#961: names of a compiled model."""

    compiled = True

    def __init__(self):
        super().__init__()
        if self.compiled:
            self.model = torch.compile(self.model, backend="eager")


PROGRAMS = [
    Freezing,
    MomentsOfAnotherType,
    NarrowMoments,
    Sequential,
    Warmup,
    Spectral,
    LegacySpectral,
    Unsaved,
    Tied,
    TiedByName,
    Adapter,
]


@pytest.mark.parametrize("make", PROGRAMS)
def test_it_resumes_exactly(tmp_path, caplog, make):
    caplog.set_level(logging.INFO, "trainckpt")
    resumes_exactly(tmp_path, make)
    assert "this resume is bitwise" in caplog.text
    assert "not exact" not in caplog.text
    assert "not bitwise" not in caplog.text


@pytest.mark.parametrize(
    "stop", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long), 9]
)
@pytest.mark.parametrize("make", [Freezing, Sequential, Warmup])
def test_it_does_wherever_it_is_stopped(tmp_path, make, stop):
    resumes_exactly(tmp_path, make, stop)


def test_a_sequence_of_schedules_keeps_the_arguments_it_was_saved_with(tmp_path):
    end = 4 + 10
    straight, _ = run(tmp_path / "straight", Sequential, end=end)
    with pytest.raises(Crash):
        run(tmp_path / "run", Sequential, crash_at=4)
    resumed, _ = run(tmp_path / "run", OtherSequential, end=end)
    cold, _ = run(tmp_path / "cold", OtherSequential, first=4, end=end)
    assert resumed == {number: straight[number] for number in range(4, end)}
    assert cold != resumed


@pytest.mark.long
def test_prodigy_keeps_the_distance_that_is_in_its_groups(tmp_path):
    """prodigy-plus-schedule-free#19."""
    prodigyopt = pytest.importorskip("prodigyopt")

    class Distance(Program):
        def __init__(self):
            super().__init__()
            self.optimizer = prodigyopt.Prodigy(self.model.parameters(), 1.0, d_coef=0.5)

    whole, rest = resumes_exactly(tmp_path, Distance)
    (mine,), (other,) = whole.optimizer.param_groups, rest.optimizer.param_groups
    assert {key: mine[key] for key in ("d", "d_numerator", "k")} == {
        key: other[key] for key in ("d", "d_numerator", "k")
    }


def test_moments_keep_their_types_and_groups_what_was_added_to_them(tmp_path):
    for make in (MomentsOfAnotherType, NarrowMoments):
        _, rest = resumes_exactly(tmp_path / make.__name__, make)
        kept = [state["momentum"].dtype for state in rest.optimizer.state.values()]
        assert set(kept) == {make.moments}
        (group,) = rest.optimizer.param_groups
        assert (group["d"].dtype, group["warm"], len(group["history"])) == (
            torch.float64,
            True,
            NUM,
        )


def test_a_nested_scheduler_goes_on_with_the_optimizer_that_is_there(tmp_path):
    _, rest = resumes_exactly(tmp_path, Warmup, stop=9)
    assert rest.scheduler.optimizer is rest.optimizer
    assert rest.scheduler.after_scheduler.optimizer is rest.optimizer


def test_an_optimizer_in_the_state_of_another_object_is_tracked_by_itself(tmp_path):
    class Whole(lr_scheduler.ExponentialLR):
        def state_dict(self):
            return dict(vars(self))

    class Holding(Program):
        def __init__(self):
            super().__init__()
            self.scheduler = Whole(self.optimizer, 0.9)

        def tracked(self):
            return {"model": self.model, "scheduler": self.scheduler}

        def train(self, number):
            loss = super().train(number)
            self.scheduler.step()
            return loss

    _, rest = resumes_exactly(tmp_path, Holding)
    assert rest.scheduler.optimizer is rest.optimizer


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_schedule_free_goes_on_in_the_mode_it_was_saved_in(tmp_path, mode):
    """schedule_free#32: in eval mode the parameters are other ones, and so must the state be."""
    schedulefree = pytest.importorskip("schedulefree")

    class Free(Program):
        def __init__(self):
            super().__init__()
            self.optimizer = schedulefree.AdamWScheduleFree(self.model.parameters(), 0.05)

        def train(self, number):
            self.optimizer.train()
            return super().train(number)

        def evaluate(self, number):
            getattr(self.optimizer, mode)()

    whole, rest = resumes_exactly(tmp_path, Free)
    modes = [program.optimizer.param_groups[0]["train_mode"] for program in (whole, rest)]
    assert modes == [mode == "train"] * 2


def test_what_is_tied_stays_tied_and_what_is_not_does_not(tmp_path):
    for make in (Tied, TiedByName):
        _, rest = resumes_exactly(tmp_path / make.__name__, make)
        same = rest.model["outer"].weight is rest.model["inner"].weight
        assert same == make.tied


def test_a_tracked_object_that_the_snapshot_lacks_is_refused(tmp_path):
    """trl#5911, open-instruct#1523."""

    class Two(Sequential):
        pass

    class One(Two):
        def tracked(self):
            return {name: value for name, value in vars(self).items() if name != "scheduler"}

    with pytest.raises(Crash):
        run(tmp_path, One, crash_at=4)
    with pytest.raises(StateMismatch) as refused:
        run(tmp_path, Two)
    assert "scheduler is tracked now, and not in the snapshot" in str(refused.value)


def test_compiled_or_not_the_names_are_the_same_for_three_generations(tmp_path):
    straight, _ = run(tmp_path / "straight", Program)
    plain, sizes = type("Plain", (Compiled,), {"compiled": False}), []
    for make, stop in ((Compiled, 3), (plain, 6), (Compiled, 9)):
        with pytest.raises(Crash):
            run(tmp_path / "run", make, crash_at=stop)
        newest = max((tmp_path / "run/snapshots").glob("s*"), key=lambda p: p.stat().st_mtime_ns)
        sizes.append(sum(file.stat().st_size for file in newest.glob("*.safetensors")))
    resumed, _ = run(tmp_path / "run", Compiled)
    assert resumed == {number: straight[number] for number in range(9, NUM)}
    assert len(set(sizes)) == 1


def test_an_adapter_has_its_values_and_its_size_for_three_generations(tmp_path):
    straight, _ = run(tmp_path / "straight", Adapter)
    names, sizes = [], []
    for stop in (3, 6, 9):
        with pytest.raises(Crash):
            run(tmp_path / "run", Adapter, crash_at=stop)
        tensors = load(tmp_path / "run")
        names.append(sorted(tensors))
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    resumed, _ = run(tmp_path / "run", Adapter)
    assert resumed == {number: straight[number] for number in range(9, NUM)}
    assert names[0] == names[1] == names[2]
    assert len(set(sizes)) == 1


def test_an_adapter_that_is_wrapped_after_the_checkpointer_is_made_is_refused(tmp_path):
    with pytest.raises(Crash):
        run(tmp_path, Adapter, crash_at=4)
    program = Program()
    with pytest.raises(StateMismatch) as refused, Checkpointer(tmp_path, **program.tracked()):
        pass
    assert "model/0.a" in str(refused.value)


@pytest.mark.parametrize("stop", [4, 5])
def test_averaged_weights_that_are_swapped_in_for_an_evaluation_are_swapped_back(tmp_path, stop):
    """The save and the stop fall on the evaluation's entry, or on the next boundary."""

    def swapping(place, crash_at=None, crash_in=None):
        program, losses = Swapping(), {}
        with Checkpointer(place, every="1 steps", **program.tracked()) as ckpt:
            for number in range(ckpt.cursor.micro_batches, NUM):
                ckpt.boundary()
                if number == crash_at:
                    raise Crash
                losses[number] = program.train(number).item().hex()
                if number % 4 == 3:
                    with ckpt.evaluation():
                        program.swap()
                        ckpt.save(tag=f"e{number}")
                        if number == crash_in:
                            raise Crash
                        losses[f"e{number}"] = program.loss(number).item().hex()
                        program.swap()
        return losses

    straight = swapping(tmp_path / "straight")
    with pytest.raises(Crash):
        swapping(tmp_path / "run", *((stop, None) if stop == 5 else (None, 7)))
    resumed = swapping(tmp_path / "run")
    assert resumed == {key: straight[key] for key in resumed}
    assert len(resumed) >= NUM - 8


def test_a_signal_amid_an_evaluation_stops_once_the_weights_are_swapped_back(tmp_path):
    """ace#1438: SIGTERM while the averaged weights are in the model."""

    def swapping(place, strike=None):
        program, losses = Swapping(), {}
        tracked = program.tracked()
        with Checkpointer(place, every="never", on_stop="return", **tracked) as ckpt:
            for number in range(ckpt.cursor.micro_batches, NUM):
                if not ckpt.boundary():
                    return losses
                losses[number] = program.train(number).item().hex()
                if number % 4 == 3:
                    with ckpt.evaluation():
                        program.swap()
                        if number == strike:
                            os.kill(os.getpid(), signal.SIGTERM)
                            while not ckpt._gate.has_open_round():
                                time.sleep(0.001)
                        losses[f"e{number}"] = program.loss(number).item().hex()
                        program.swap()
        return losses

    straight = swapping(tmp_path / "straight")
    before = swapping(tmp_path / "run", strike=7)
    assert set(before) < set(straight)
    resumed = swapping(tmp_path / "run")
    assert {**before, **resumed} == straight
    assert resumed == {key: straight[key] for key in resumed}

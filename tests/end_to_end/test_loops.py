"""Loops of every shape, stopped where it hurts: what comes back is what a straight run has."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading

import pytest
import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import DataLoader

from tests.end_to_end.training import (
    ACCUMULATE,
    ITEMS,
    Crash,
    Parts,
    attempt,
    crashed,
    record,
    usable,
)
from trainckpt import Checkpointer
from trainckpt.attempt.progress_counter import ProgressCounter
from trainckpt.errors import ConfigurationError, SaveFailed, StateMismatch
from trainckpt.notice import Notice
from trainckpt.state.registry import Registry

EPOCH = 5  # micro-batches


class Loop:
    """One attempt: its parts, its Checkpointer, and the lines it wrote.

    Args:
        seen: Gets the line of each micro-batch, under its number.
        stop_at: Micro-batch after which a stop is asked for.
        stop_between: Epoch after which one is asked for, outside the loops.
        stop_in: Evaluation of this attempt, from 1, at whose entry one is asked for.
        epochs: To train.
    """

    def __init__(self, seen, stop_at=None, stop_between=None, stop_in=None, epochs=3):
        self.seen, self.epochs = seen, epochs
        self.stop_at, self.stop_between, self.stop_in = stop_at, stop_between, stop_in
        self.parts, self.entered = Parts(), 0

    def open(self, place, loader=None):
        tracked = {**self.parts.tracked(), "loader": loader or self.parts.loader}
        self.ckpt = Checkpointer(place, **tracked, every="never", on_stop="return")
        return self.ckpt

    def train(self, batch, *more):
        at = self.ckpt.cursor
        line = self.parts.train_on(batch, at.micro + 1 == ACCUMULATE)
        self.seen[at.micro_batches] = (at, self.rate(), *line, *more)
        if at.micro_batches == self.stop_at:
            self.stop()

    def over(self, epoch):
        """After an epoch's last batch: the scheduler steps; True if the attempt has ended."""
        if self.ckpt._has_returned():
            return True
        self.parts.scheduler.step()
        if epoch == self.stop_between:
            self.stop()
        return False

    def rate(self):
        return self.parts.scheduler.get_last_lr()

    def stop(self):
        self.ckpt._listener.watcher.request(Notice("test"))


def assert_exact(script, place, *attempts, **whole):
    """The attempts, and one more that ends the run, write what a straight run writes."""
    straight, seen = {}, {}
    end = script(place / "straight", straight, **whole).parts.state()
    for how in attempts:
        script(place / "run", seen, **{**whole, **how})
    done = set(seen)
    assert done < set(straight)
    last = script(place / "run", seen, **whole)
    assert last.ckpt.resumed_from.micro_batches == len(done)
    assert seen == straight
    assert last.parts.state() == end


def zeroing(place, seen, **how):
    loop = Loop(seen, **how)
    with loop.open(place) as ckpt:
        for _ in ckpt.epochs(loop.epochs):
            loop.parts.optimizer.zero_grad()
            for batch in ckpt.batches():
                loop.train(batch)
    return loop


@pytest.mark.parametrize("stop_at", [pytest.param(2, marks=pytest.mark.long), 6])
def test_gradients_of_an_open_window_survive_a_zero_grad_at_an_epoch_s_start(tmp_path, stop_at):
    assert_exact(zeroing, tmp_path, {"stop_at": stop_at})


def own_epochs(place, seen, **how):
    loop = Loop(seen, **how)
    with loop.open(place) as ckpt:
        tracked = ckpt.loader(loop.parts.loader)
        for epoch in range(ckpt.cursor.epoch, loop.epochs):
            for batch in tracked:
                loop.train(batch)
            if loop.over(epoch):
                break
    return loop


@pytest.mark.parametrize("how", [{"stop_between": 0}, {"stop_between": 1}, {"stop_at": 4}])
def test_a_scheduler_stepped_after_each_epoch_of_an_own_loop_is_not_stepped_twice(tmp_path, how):
    """The stop falls on the first boundary of the epoch after, or on the end of the pass."""
    assert_exact(own_epochs, tmp_path, how)


def test_the_final_snapshot_of_an_own_loop_goes_on_with_more_epochs(tmp_path):
    assert_exact(own_epochs, tmp_path, {"epochs": 1}, {"epochs": 2})


def breaking(place, seen, **how):
    loop = Loop(seen, **how)
    with loop.open(place) as ckpt:
        for _ in ckpt.epochs(loop.epochs):
            for number, batch in enumerate(ckpt.batches()):
                loop.train(batch)
                if number == 2:
                    break
    return loop


def test_epochs_left_by_break_are_over_when_the_final_snapshot_goes_on_with_more(tmp_path):
    assert_exact(breaking, tmp_path, {"epochs": 1}, {"epochs": 2})


def beside(place, seen, **how):
    loop = Loop(seen, **how)
    second = DataLoader(torch.arange(ITEMS), shuffle=True)
    with loop.open(place, [loop.parts.loader, second]) as ckpt:
        inner = ckpt.loader(second)
        for _ in ckpt.epochs(loop.epochs):
            for batch in ckpt.batches():
                found = []
                for item in inner:
                    found.append(item.item())
                    if len(found) == 2:
                        break
                loop.train(batch, found)
    return loop


@pytest.mark.parametrize("stop_at", [0, 4])
def test_a_second_loader_left_by_break_begins_anew_after_a_resume(tmp_path, stop_at):
    assert_exact(beside, tmp_path, {"stop_at": stop_at}, epochs=2)


def zipped(place, seen, items=EPOCH + 2, workers=0, **how):
    loop = Loop(seen, **how)
    second = DataLoader(torch.arange(items), shuffle=True, num_workers=workers)
    with loop.open(place, [loop.parts.loader, second]) as ckpt:
        first, other = ckpt.loader(loop.parts.loader), ckpt.loader(second)
        for epoch in ckpt.epochs(loop.epochs):
            for batch, item in zip(first, other, strict=False):
                loop.train(batch, item.item())
            if loop.over(epoch):
                break
    return loop


@pytest.mark.parametrize("items", [EPOCH, EPOCH + 2], ids=["as long", "longer"])
@pytest.mark.parametrize(
    "how",
    [
        {"stop_between": 0},
        pytest.param({"stop_at": 2}, marks=pytest.mark.long),
        {"stop_at": 4},
        pytest.param({"stop_at": 9}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_loader_zipped_with_the_first_begins_anew_with_each_epoch(tmp_path, how, items):
    """Stopped at an epoch's last batch, the second loader is not asked again in that epoch."""
    assert_exact(zipped, tmp_path, how, items=items)


def test_a_zipped_loader_with_workers_begins_anew_after_two_stops_at_an_epoch_s_end(tmp_path):
    """The second stop comes before the second loader was asked for anything."""
    stops = {"stop_at": 4}, {"stop_between": 0}
    assert_exact(zipped, tmp_path, *stops, items=EPOCH, workers=2)


def cycled(place, seen, **how):
    loop = Loop(seen, **how)
    second = DataLoader(torch.arange(EPOCH + 2), shuffle=True)
    with loop.open(place, [loop.parts.loader, second]) as ckpt:
        endless = (item for _ in itertools.count() for item in ckpt.loader(second))
        for _ in ckpt.epochs(loop.epochs):
            for batch in ckpt.batches():
                loop.train(batch, next(endless).item())
    return loop


@pytest.mark.parametrize("stop_at", [pytest.param(2, marks=pytest.mark.long), 4, 6])
def test_a_second_loader_that_goes_round_over_epochs_goes_on_after_a_resume(tmp_path, stop_at):
    assert_exact(cycled, tmp_path, {"stop_at": stop_at})


def evaluating(place, seen, **how):
    loop = Loop(seen, **how)
    with loop.open(place) as ckpt:
        for epoch in ckpt.epochs(loop.epochs):
            for batch in ckpt.batches():
                loop.train(batch)
            for _ in range(2):
                if ckpt._has_returned():
                    return loop
                loop.entered += 1
                if loop.entered == loop.stop_in:
                    loop.stop()
                with ckpt.evaluation():
                    if not ckpt._has_returned():
                        torch.rand(3)
            if loop.over(epoch):
                break
    return loop


def test_a_resume_at_the_second_evaluation_that_is_stopped_at_the_repeated_first_is_exact(tmp_path):
    """Nothing is saved there: what the first stop left still stands."""
    assert_exact(evaluating, tmp_path, {"stop_in": 2}, {"stop_in": 1})


def test_the_micro_batch_keeps_its_number_over_an_evaluation_in_its_body(tmp_path):
    parts, numbers = Parts(), []
    with Checkpointer(tmp_path, **parts.tracked(), every="never") as ckpt:
        for batch in ckpt.batches():
            before = ckpt.cursor
            if before.micro_batches in (1, 2):
                with ckpt.evaluation():
                    pass
            after = ckpt.cursor
            numbers.append((before.micro, after.micro, after.micro_batches))
            parts.train_on(batch, after.micro + 1 == ACCUMULATE)
    assert numbers == [(0, 0, 0), (1, 1, 1), (0, 0, 2), (1, 1, 3), (0, 0, 4)]


def by_boundary(place, seen, **how):
    loop = Loop(seen, **how)
    with loop.open(place) as ckpt:
        while ckpt.cursor.micro_batches < 8 and ckpt.boundary():
            loop.train((torch.rand(2, 4), torch.arange(2)))
    return loop


@pytest.mark.parametrize("stop_at", [3])
def test_micro_batches_without_the_tracked_loader_are_counted_and_draw_anew(tmp_path, stop_at):
    """A loader is tracked, but never asked: it must not hold back the generators."""
    assert_exact(by_boundary, tmp_path, {"stop_at": stop_at})


def test_a_pass_over_the_loader_after_the_run_ends_nothing(tmp_path):
    loop = zeroing(tmp_path, {}, epochs=1)
    tracked = loop.ckpt.loader(loop.parts.loader)
    assert len(list(tracked)) == len(list(loop.ckpt.batches())) == EPOCH
    assert record(tmp_path, 1)["outcome"]["outcome"] == "finished"


def test_a_loader_registered_after_training_began_is_refused(tmp_path):
    with Loop({}).open(tmp_path) as ckpt:
        next(ckpt.batches())
        with pytest.raises(ConfigurationError, match="after training has begun") as refusal:
            ckpt.loader(DataLoader(torch.arange(3)))
    assert refusal.value.exit_code == 78


def test_a_loader_that_is_made_anew_in_each_epoch_is_refused_with_what_to_do_instead(tmp_path):
    with Loop({}).open(tmp_path) as ckpt:
        for epoch in ckpt.epochs(2):
            shuffled = torch.Generator().manual_seed(epoch)
            loader = DataLoader(torch.arange(4), shuffle=True, generator=shuffled)
            if epoch:
                with pytest.raises(ConfigurationError) as refusal:
                    ckpt.loader(loader)
                break
            list(ckpt.batches())
    assert "give it a sampler with set_epoch(), which ckpt.epochs() calls" in refusal.value.hint


def test_another_batch_size_is_refused_with_the_way_to_begin_a_new_run_with_the_weights(tmp_path):
    crashed(tmp_path, 5)
    parts = Parts()
    parts.loader = DataLoader(parts.loader.dataset, 5, shuffle=True)
    with pytest.raises(StateMismatch, match="batch_size was 2, is 5") as refusal:
        attempt(tmp_path, parts=parts)
    assert 'begins with these weights: init_from="' in refusal.value.hint
    parts = Parts(width=5)
    with pytest.raises(StateMismatch) as refusal:
        attempt(tmp_path, parts=parts)
    assert refusal.value.hint == "run the script as it was, or start a new run in another place"


def test_a_save_that_was_asked_for_and_never_taken_fails_when_the_attempt_ends(tmp_path):
    with contextlib.suppress(Crash), Loop({}).open(tmp_path) as ckpt:
        next(ckpt.batches())
        pending = ckpt.save()
        raise Crash
    with pytest.raises(SaveFailed, match="the attempt failed before this save was taken"):
        pending.wait("staged", 0)
    assert usable(tmp_path) == []


class Counting(torch.optim.SGD):
    """Keeps something beside the state of its parameters."""

    def step(self, closure=None):
        self.state["calls"] = self.state.get("calls", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 0.1
        return super().step(closure)


def counting(place, seen, **how):
    loop = Loop(seen, **how)
    loop.parts.optimizer = Counting(loop.parts.model.parameters(), 0.1, momentum=0.9)
    loop.parts.scheduler = torch.optim.lr_scheduler.ExponentialLR(loop.parts.optimizer, 0.9)
    with loop.open(place) as ckpt:
        for _ in ckpt.epochs(loop.epochs):
            for batch in ckpt.batches():
                loop.train(batch)
    return loop


def test_what_an_optimizer_keeps_under_keys_of_its_own_survives(tmp_path):
    counting(tmp_path, {}, stop_at=5)
    optimizer = counting(tmp_path, {}).parts.optimizer
    steps = 3 * EPOCH // ACCUMULATE
    assert optimizer.state["calls"] == steps
    assert torch.allclose(optimizer.state["sum"], torch.full((2,), 0.1 * steps))


class Unloadable:
    """Can be saved, and never loaded."""

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise Crash


def test_a_load_state_dict_that_raises_leaves_a_failed_attempt_and_nothing_running(tmp_path):
    loop, threads = Loop({}, stop_at=1), set(threading.enumerate())
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    loop.parts.unloadable = Unloadable()
    with loop.open(tmp_path) as ckpt:
        for batch in ckpt.batches():
            loop.train(batch)
    loop = Loop({})
    loop.parts.unloadable = Unloadable()
    with pytest.raises(Crash), loop.open(tmp_path):
        pass
    assert record(tmp_path, 1)["outcome"]["outcome"] == "stopped"
    assert record(tmp_path, 2)["outcome"]["outcome"] == "failed"
    assert set(threading.enumerate()) <= threads
    assert handlers == [
        signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    ]


def test_a_save_asked_for_after_the_end_fails_at_once(tmp_path):
    loop = Loop({})
    with loop.open(tmp_path) as ckpt:
        for batch in ckpt.batches():
            loop.train(batch)
    assert ckpt.save().error is not None


class OwnScaler(torch.amp.GradScaler):
    """As scripts make them."""


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, OwnScaler, ShardedGradScaler])
def test_the_updates_of_a_scaler_are_counted_whatever_its_class(kind):
    parts, position, registry = Parts(), ProgressCounter(), Registry()
    registry.add("optimizer", parts.optimizer)
    registry.add("scaler", kind("cpu"))
    assert position.watch_steps(registry) == ""
    parts.optimizer.step()
    assert position.step == 0, "the scaler may have undone this step"


class Around(torch.optim.Optimizer):
    """Steps an optimizer inside it, as SAM and Lookahead do."""

    def __init__(self, params):
        super().__init__(params, {})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def step(self):
        self.base.step()


@pytest.mark.parametrize("alone", [True, False])
def test_a_step_of_an_optimizer_inside_another_one_counts_once(alone):
    position, registry = ProgressCounter(), Registry()
    registry.add("optimizer", optimizer := Around([torch.nn.Parameter(torch.ones(1))]))
    assert position.watch_steps(registry) == ""
    for number in range(1, 4):
        (optimizer.base if alone else optimizer).step()
        assert position.step == number


@pytest.mark.parametrize("steps", [True, False])
def test_an_optimizer_whose_steps_are_not_counted_is_said_once(tmp_path, caplog, steps):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.DataLoader(torch.ones(600, 1))
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, loader=data) as ckpt:
        for _ in ckpt.batches():
            if steps and ckpt.cursor.micro_batches == 200:
                optimizer.step()
    said = [r.message for r in caplog.records if "no step of optimizer (a SGD)" in r.message]
    assert len(said) == (0 if steps else 1)


@pytest.mark.parametrize("steps_by", ["the scaler", "the optimizer"])
def test_steps_beside_a_scaler_that_is_not_enabled_are_counted(tmp_path, steps_by):
    parts = Parts()
    parts.scaler = torch.amp.GradScaler("cpu", enabled=False)
    with Checkpointer(tmp_path, **parts.tracked(), every="1 step") as ckpt:
        for x, _ in ckpt.batches():
            parts.scaler.scale(parts.model(x).square().mean()).backward()
            if steps_by == "the scaler":
                parts.scaler.step(parts.optimizer)
                parts.scaler.update()
            else:
                parts.optimizer.step()
            assert ckpt.cursor.micro == 0
        assert ckpt.cursor.step == EPOCH
    assert usable(tmp_path)[-1].startswith(f"s{EPOCH}~")

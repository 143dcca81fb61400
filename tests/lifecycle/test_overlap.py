"""What is copied beside training is of one instant, or it is not saved."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from torch import nn

from trainckpt import Checkpointer
from trainckpt.lifecycle.deciding import copy_choice
from trainckpt.lifecycle.deciding.copy_choice import OVERLAP
from trainckpt.lifecycle.run.launch import AT_VARIABLE
from trainckpt.lifecycle.saving import copying, saver
from trainckpt.snapshot import write_beside
from trainckpt.state import overlap
from trainckpt.state.overlap import Fence, Overlapped, Piece, calls_hooks

WORDS, WIDTH = 300, 64  # 75 kB: large enough to be copied beside training


@pytest.fixture(autouse=True)
def always_beside_training(monkeypatch):
    monkeypatch.setattr(copy_choice, "choose", lambda *_: OVERLAP)
    for limit in ("NEARLY_S", "PATIENCE_S"):  # on a busy machine too no save is put off
        monkeypatch.setattr(saver, limit, 120.0)


class Model(nn.Module):
    def __init__(self, max_norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH, max_norm=max_norm)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.out(self.words(ids))


class Loop:
    """Four micro-batches, two a step, and a snapshot asked for before each."""

    def __init__(self, place, model, optimizers, between=lambda: None, **options):
        self.model, self.optimizers, self.between = model, optimizers, between
        self.saves, self.states = [], []
        options = {"every": "never", "keep_last": 99, **options}
        with Checkpointer(place, model=model, optimizer=optimizers, **options) as ckpt:
            self.resumed_from = ckpt.resumed_from
            for number in range(8):
                self.saves.append(ckpt.save())
                ckpt.boundary()
                self.states.append([t.clone() for t in self.tensors()])
                self.train(number)

    def tensors(self):
        moments = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *moments]

    def train(self, number):
        ids = torch.arange(number, number + 40)
        loss = nn.functional.cross_entropy(self.model(ids), ids)
        self.between()
        loss.backward()
        if number % 2:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()


def adam(model):
    return [torch.optim.Adam(model.parameters(), 0.1)]


def restored(place, save, make):
    """Model and optimizer tensors of one snapshot, put into fresh objects."""
    model = Model()
    optimizers = make(model)
    os.environ[AT_VARIABLE] = save.snapshot
    try:
        ckpt = Checkpointer(place, model=model, optimizer=optimizers, every="never")
        ckpt.resume()
        ckpt.boundary()
        found = [v for o in optimizers for s in o.state.values() for v in s.values()]
        found = [*model.state_dict().values(), *found]
        ckpt._attempt.departure.abandon(None, ckpt.cursor)
    finally:
        del os.environ[AT_VARIABLE]
    return found


def as_saved(place, loop, make=adam):
    """Every snapshot that was committed is the state of its boundary, bit for bit."""
    good = 0
    for save, state in zip(loop.saves, loop.states, strict=True):
        if save.error is None:
            found = restored(place, save, make)
            assert len(found) == len(state)
            assert all(torch.equal(a, b) for a, b in zip(found, state, strict=True))
            good += 1
    return good


@pytest.mark.parametrize("by", ["the rank", "another process"])
def test_what_is_copied_beside_training_is_the_state_of_the_boundary(tmp_path, monkeypatch, by):
    if by == "another process":
        monkeypatch.setattr(write_beside, "FROM_BYTES", 0)
    model = Model()
    loop = Loop(tmp_path, model, adam(model))
    assert as_saved(tmp_path, loop) == 8


def test_every_step_of_every_optimizer_waits_for_the_copies(tmp_path, monkeypatch):
    """The thread copies nothing: what is saved in time was copied before the first step."""
    monkeypatch.setattr(Overlapped, "run", lambda self: iter([self._fenced.wait()][:0]))

    def two(model):
        return [
            torch.optim.Adam(model.words.parameters(), 0.1),
            torch.optim.SGD(model.out.parameters(), 0.1, momentum=0.9),
        ]

    model = Model()
    loop = Loop(tmp_path, model, two(model))
    assert as_saved(tmp_path, loop, two) == 8


def test_a_tensor_that_a_forward_writes_to_spoils_no_snapshot(tmp_path, caplog):
    """`Embedding(max_norm=)`: the version counter tells."""
    model = Model(max_norm=0.5)
    with caplog.at_level(logging.INFO, "trainckpt"):
        loop = Loop(tmp_path, model, adam(model))
    assert "model/words.weight changed between two optimizer steps" in caplog.text
    assert "from now on copied while training waits: model/words.weight" in caplog.text
    assert 5 <= as_saved(tmp_path, loop) < 8


@pytest.mark.parametrize("change", ["average", "clip"])
def test_what_goes_through_data_is_noticed_by_its_bytes(tmp_path, caplog, change):
    """Averages that are swapped in for a moment, weights clipped between steps: no counter."""
    model = Model()
    average = torch.zeros(WORDS, WIDTH)

    def between():
        if change == "clip":
            model.words.weight.data.clamp_(-0.1, 0.1)
        else:
            kept = model.words.weight.data.clone()
            model.words.weight.data.copy_(average)
            model.words.weight.data.copy_(kept.add_(1e-3))

    with caplog.at_level(logging.INFO, "trainckpt"):
        loop = Loop(tmp_path, model, adam(model), between)
    assert "model/words.weight changed between two optimizer steps" in caplog.text
    assert 5 <= as_saved(tmp_path, loop) < 8


def test_a_proof_waits_for_the_step_and_a_wait_for_the_save_makes_it_at_once(tmp_path):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    ckpt = Checkpointer(tmp_path, model=model, optimizer=optimizer, every="never")
    with ckpt:
        pending = ckpt.save()
        ckpt.boundary()
        pending.wait("durable", timeout_s=30.0)  # no step comes while this thread waits
        assert pending.error is None


def test_only_optimizers_that_call_the_hooks_have_their_tensors_copied_beside_training():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert calls_hooks(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    assert "step" in vars(optimizer)
    assert calls_hooks(optimizer)
    seen = []
    fence = Fence(seen.append)
    optimizer.step()
    scheduler.step()
    fence.close()
    assert seen == [optimizer]
    optimizer.step = lambda: None
    assert not calls_hooks(optimizer)


def test_two_threads_share_the_copies_and_each_byte_is_copied_once(monkeypatch):
    monkeypatch.setattr(overlap, "CHUNK_BYTES", 1000)
    source = torch.randn(10_007)
    target = torch.zeros_like(source)
    one = Overlapped([Piece("w", source, target.data_ptr())], proves=True, num_threads=2)
    one.fence()
    assert torch.equal(target, source)
    assert list(one.run())[-1] == target.data_ptr() + target.nbytes
    assert one.changed == []


def test_what_is_said_to_be_copied_is_copied_whichever_thread_was_last(monkeypatch):
    monkeypatch.setattr(overlap, "CHUNK_BYTES", 4000)
    for _ in range(20):
        source = torch.randn(50_000)
        target = torch.zeros_like(source)
        begin = target.data_ptr()
        one = Overlapped([Piece("w", source, begin)], proves=False, num_threads=3)
        for behind in one.run():
            there = (behind - begin) // 4
            assert torch.equal(target[:there], source[:there])
        assert there == len(source)


def test_a_fence_lets_steps_pass_when_nothing_is_copied_and_after_it_was_closed():
    seen = []
    fence = Fence(seen.append)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.step()
    fence.close()
    optimizer.step()
    assert seen == [optimizer]


def test_the_first_copies_and_some_later_ones_are_proved():
    proved = [n for n in range(1, 20) if n <= copying.PROVED_FIRST or n % copying.PROVED_EVERY == 0]
    assert proved == [1, 2, 8, 16]


def test_a_change_before_the_copy_was_even_begun_is_noticed():
    """Then copy and live tensor are equal at the fence, and neither is what there was."""
    source = torch.randn(WORDS, WIDTH)
    target = torch.zeros_like(source)
    late = Overlapped([Piece("w", source, target.data_ptr())], proves=True)
    source.data.mul_(2.0)
    late.fence()
    assert torch.equal(target, source)
    assert list(late.run())
    assert late.changed == ["w"]

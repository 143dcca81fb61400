"""What is copied beside training is of one instant, or it is not saved."""

from __future__ import annotations

import logging
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.end_to_end.overlapped import WIDTH, WORDS, Loop, Model, adam, as_saved
from tests.state.slow_device import SlowDevice
from trainckpt import Checkpointer
from trainckpt.attempt.status_files import SUPERVISOR_VARIABLE
from trainckpt.format.attempt_times import TIMES, AttemptTimes
from trainckpt.format.save_history import SAVES, parse_history
from trainckpt.save import coordinator, copying
from trainckpt.save.copying import OVERLAP
from trainckpt.snapshot import writer_client
from trainckpt.snapshot.attempt_history import read_attempt
from trainckpt.state import captured, device_copy, overlapped_copy
from trainckpt.state.capture import capture
from trainckpt.state.overlapped_copy import (
    OverlappedCopy,
    PendingCopy,
    StepFence,
)
from trainckpt.state.registry import Registry
from trainckpt.state.step_hooks import calls_hooks
from trainckpt.state.zero_copy import AdoptedTensors
from trainckpt.storage.local import LocalTier


@pytest.fixture(autouse=True)
def always_beside_training(monkeypatch):
    monkeypatch.setattr(copying, "choose", lambda *_: OVERLAP)
    for limit in ("NEARLY_S", "PATIENCE_S"):  # on a busy machine too no save is put off
        monkeypatch.setattr(coordinator, limit, 120.0)


@pytest.fixture
def slow(monkeypatch):
    device = SlowDevice()
    monkeypatch.setattr(device_copy, "CudaCalls", lambda: device)
    return device


def momentum(model):
    return [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]


def two(model):
    return [
        torch.optim.Adam(model.words.parameters(), 0.1),
        torch.optim.SGD(model.out.parameters(), 0.1, momentum=0.9),
    ]


@pytest.mark.parametrize("by", ["the rank", "another process"])
def test_what_is_copied_beside_training_is_the_state_of_the_boundary(tmp_path, monkeypatch, by):
    if by == "another process":
        monkeypatch.setattr(writer_client, "FROM_BYTES", 0)
    model = Model()
    loop = Loop(tmp_path, model, adam(model))
    assert as_saved(tmp_path, loop) == 8


def test_every_step_of_every_optimizer_waits_for_the_copies(tmp_path, monkeypatch):
    """The thread copies nothing: what is saved in time was copied before the first step."""
    monkeypatch.setattr(OverlappedCopy, "run", lambda self: iter([self._fenced.wait()][:0]))
    model = Model()
    loop = Loop(tmp_path, model, two(model))
    assert as_saved(tmp_path, loop, two) == 8


def test_waits_of_steps_for_the_copies_are_waits_for_the_save(tmp_path, monkeypatch):
    fence = OverlappedCopy.fence

    def slow_fence(self, limit_s=None):
        time.sleep(0.1)
        return fence(self, limit_s)

    monkeypatch.setattr(OverlappedCopy, "fence", slow_fence)
    model = Model()
    Loop(tmp_path, model, two(model))
    facts = read_attempt(LocalTier(tmp_path), 1).facts
    waited_s = AttemptTimes.parse(facts[TIMES]).save_s
    rows = parse_history(facts[SAVES]).rows
    assert waited_s > 0.4, "of four steps"
    assert sum(row.stall_s or 0.0 for row in rows) > 0.7 * waited_s


def test_what_a_device_copies_by_itself_is_waited_for_once_or_is_what_steps_come_behind(
    tmp_path, slow
):
    model = Model()
    loop = Loop(tmp_path, model, two(model))
    assert slow.locked == {}
    assert slow.held_back == 8 - 3  # three were proved, so they were waited for
    assert len(slow.copied) == 2 * 8 + 1  # at the boundary, and the rest; the final save is whole
    assert as_saved(tmp_path, loop, two) == 8


def test_what_a_step_on_another_stream_still_writes_is_waited_for_before_anything_is_read(
    tmp_path, slow
):
    class Elsewhere(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                slow.asked.append(partial(parameter.data.sub_, parameter.grad.clone()))

    class Waiting(Loop):
        def tensors(self):
            slow.finish("cpu")
            return super().tensors()

    def make(model):
        return [Elsewhere(model.parameters(), 0.1)]

    model = Model()
    loop = Waiting(tmp_path, model, make(model))
    assert not torch.equal(loop.states[0][0], loop.states[-1][0])
    assert as_saved(tmp_path, loop, make) == 8


@pytest.mark.parametrize("at", [1, 4])
def test_a_device_that_does_not_copy_is_said_once_and_every_save_is_whole(
    tmp_path, slow, caplog, at
):
    slow.fails_at = at
    model = Model()
    loop = Loop(tmp_path, model, two(model))
    assert slow.num_started == at
    assert slow.locked == {}
    assert caplog.text.count("the GPU does not copy by itself, so copies take longer: no mem") == 1
    assert as_saved(tmp_path, loop, two) == 8


class Replayed(torch.optim.SGD):
    """Steps as a graph that is replayed: no version counter sees it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


def test_a_graph_that_is_recorded_ends_what_its_steps_would_not_wait_for(tmp_path, slow):
    def make(model):
        return [Replayed(model.parameters(), 0.1)]

    def between():
        slow.is_recording = len(slow.copied) >= 2 * 4  # no hook of a later step does anything

    model = Model()
    loop = Loop(tmp_path, model, make(model), between)
    assert [save.error is None for save in loop.saves] == [True] * 3 + [False] + [True] * 4
    assert as_saved(tmp_path, loop, make) == 7


def test_beside_a_graph_of_before_the_checkpointer_all_is_copied_at_the_boundary(
    tmp_path, slow, caplog
):
    """Its steps call no hook, so nothing of theirs would wait for copies."""
    slow.has_recorded = True
    model = Model()
    optimizers = [Replayed(model.parameters(), 0.1)]

    class Replaying(Loop):
        def train(self, number):
            ids = torch.arange(number, number + 40)
            nn.functional.cross_entropy(model(ids), ids).backward()
            type(optimizers[0]).step.__wrapped__(optimizers[0])  # as `replay`: past the hooks
            optimizers[0].zero_grad()

    loop = Replaying(tmp_path, model, optimizers)
    assert len(slow.copied) == 8 + 1  # one at each boundary, and the final save
    assert not torch.equal(loop.states[3][0], loop.states[4][0])
    assert "a CUDA graph was recorded before the Checkpointer was made" in caplog.text
    assert as_saved(tmp_path, loop, lambda m: [Replayed(m.parameters(), 0.1)]) == 8


def test_a_capture_waits_for_all_streams_of_a_device_before_and_after(slow):
    registry, model = Registry(), Model()
    registry.add("model", model)
    registry.add("optimizer", adam(model)[0])
    capture(registry)
    assert slow.num_finished == 2


def test_private_memory_is_locked_as_well_and_let_go_for_a_dump(tmp_path, slow, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_MEMORY", "none")
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(tmp_path))
    model = Model()
    with Checkpointer(tmp_path / "run", model=model, optimizer=adam(model), every="never") as ckpt:
        for _ in range(2):
            pending = ckpt.save()
            ckpt.boundary()
            pending.wait("durable", timeout_s=30.0)
            assert len(slow.locked) == 1
            ckpt._hooks.call_before_dump()  # before a dump
            assert slow.locked == {}
    assert slow.num_locked == 3


def test_memory_that_a_device_refuses_is_said_once_and_copied_to_as_ever(tmp_path, slow, caplog):
    slow.refuses = "out of memory"
    model = Model()
    loop = Loop(tmp_path, model, adam(model))
    assert caplog.text.count("cannot be locked for the GPU, so copies take longer: out of") == 1
    assert slow.copied == []
    assert as_saved(tmp_path, loop) == 8


@pytest.mark.parametrize("by", ["the rank", "its device"])
def test_a_tensor_that_a_forward_writes_to_spoils_no_snapshot(tmp_path, caplog, request, by):
    """`Embedding(max_norm=)`: the version counter tells."""
    if by == "its device":
        request.getfixturevalue("slow")
    model = Model(max_norm=0.5)
    with caplog.at_level(logging.DEBUG, "trainckpt"):
        loop = Loop(tmp_path, model, adam(model))
    assert "model/words.weight changed between two optimizer steps" in caplog.text
    assert "will copy these tensors while training waits: model/words.weight" in caplog.text
    assert 5 <= as_saved(tmp_path, loop) < 8


@pytest.mark.parametrize("by", ["the rank", "its device"])
@pytest.mark.parametrize("change", ["average", "clip"])
def test_what_goes_through_data_is_noticed_by_its_bytes(tmp_path, caplog, request, change, by):
    """Averages that are swapped in for a moment, weights clipped between steps: no counter."""
    if by == "its device":
        request.getfixturevalue("slow")
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
    fence = StepFence(seen.append)
    optimizer.step()
    scheduler.step()
    fence.close()
    assert seen == [optimizer]
    optimizer.step = lambda: None
    assert not calls_hooks(optimizer)


def test_two_threads_share_the_copies_and_each_byte_is_copied_once(monkeypatch):
    monkeypatch.setattr(overlapped_copy, "CHUNK_BYTES", 1000)
    source = torch.randn(10_007)
    target = torch.zeros_like(source)
    one = OverlappedCopy([PendingCopy("w", source, target.data_ptr())], proves=True, num_threads=2)
    one.fence()
    assert torch.equal(target, source)
    assert list(one.run())[-1] == target.data_ptr() + target.nbytes
    assert one.changed == []


def test_what_is_said_to_be_copied_is_copied_whichever_thread_was_last(monkeypatch):
    monkeypatch.setattr(overlapped_copy, "CHUNK_BYTES", 4000)
    for _ in range(20):
        source = torch.randn(50_000)
        target = torch.zeros_like(source)
        begin = target.data_ptr()
        one = OverlappedCopy([PendingCopy("w", source, begin)], proves=False, num_threads=3)
        for behind in one.run():
            there = (behind - begin) // 4
            assert torch.equal(target[:there], source[:there])
        assert there == len(source)


def test_a_fence_lets_steps_pass_when_nothing_is_copied_and_after_it_was_closed():
    seen = []
    fence = StepFence(seen.append)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], 0.1)
    optimizer.step()
    fence.close()
    optimizer.step()
    assert seen == [optimizer]


class Queue(SlowDevice):
    """Whose copies are not over before somebody has waited for them."""

    def hold(self, device, copies):
        self.held_back += 1


def test_a_step_on_another_stream_comes_behind_the_copies_too():
    device = Queue()
    one, fence, source, target = overlapped_on(device)
    fence.guard(one)
    optimizers = two(Model())
    for optimizer in optimizers:
        optimizer.step()
    assert device.held_back == len(optimizers)
    behind = list(one.run())
    assert behind == [target.data_ptr() + target.nbytes]
    assert torch.equal(source, target)
    optimizers[0].step()
    optimizers[0].step()
    fence.close()
    assert device.held_back == len(optimizers) + 1


def overlapped_on(device):
    a_side, source = device_copy.DeviceCopier(device), torch.randn(WORDS, WIDTH)
    target = torch.zeros_like(source)
    a_side.use([source])
    a_side.register(memoryview(target.numpy()).cast("B"))
    piece = PendingCopy("w", source, target.data_ptr())
    return (
        OverlappedCopy([piece], proves=False, device_copier=a_side),
        StepFence(device_copier=a_side),
        source,
        target,
    )


def test_the_first_copies_and_some_later_ones_are_proved():
    proved = [n for n in range(1, 20) if n <= copying.PROVED_FIRST or n % copying.PROVED_EVERY == 0]
    assert proved == [1, 2, 8, 16]


def test_a_change_before_the_copy_was_even_begun_is_noticed():
    """Then copy and live tensor are equal at the fence, and neither is what there was."""
    source = torch.randn(WORDS, WIDTH)
    target = torch.zeros_like(source)
    late = OverlappedCopy([PendingCopy("w", source, target.data_ptr())], proves=True)
    source.data.mul_(2.0)
    late.fence()
    assert torch.equal(target, source)
    assert list(late.run())
    assert late.changed == ["w"]


@pytest.mark.parametrize("by", ["the rank", "its device"])
def test_a_proof_notices_a_change_of_any_byte(by):
    device, source = SlowDevice(), torch.randn(WORDS, WIDTH)
    a_side = device_copy.DeviceCopier(device) if by == "its device" else None
    num_bytes, target = source.nbytes, torch.zeros_like(source)
    if a_side is not None:
        a_side.use([source])
        a_side.register(memoryview(target.numpy()).cast("B"))
    for at in (0, 1, num_bytes // 2, num_bytes - 1):
        target.zero_()
        late = OverlappedCopy(
            [PendingCopy("w", source, target.data_ptr())], proves=True, device_copier=a_side
        )
        source.data.view(torch.uint8).view(-1)[at] += 1
        late.fence()
        assert late.changed == ["w"]
    assert bool(device.guarded) == (by == "its device")


def test_a_resume_copies_what_lies_on_a_device_together_through_two_buffers(tmp_path, monkeypatch):
    """As if all did: parameters and moments, on resuming and at the first boundary."""
    model = Model()
    loop = Loop(tmp_path, model, two(model))
    uploaded, really = [], device_copy.upload

    def upload(copies):
        copies = list(copies)
        uploaded.append(sum(into.nbytes for into, _ in copies))
        really(copies)

    monkeypatch.setattr(device_copy, "PART_BYTES", 10_000)
    monkeypatch.setattr(
        AdoptedTensors, "give", lambda *_: False
    )  # nothing is live where it was read to
    for module in (device_copy, captured):
        monkeypatch.setattr(module, "can_upload", lambda into, data: into.shape == data.shape)
        monkeypatch.setattr(module, "upload", upload)
    assert as_saved(tmp_path, loop, two) == 8
    of_model = sum(parameter.nbytes for parameter in model.parameters())
    assert uploaded.count(of_model) == 2 * 8
    of_states = sum(tensor.nbytes for state in loop.states for tensor in state)
    assert sum(uploaded) == 2 * of_states


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_save_without_memory_of_its_own_is_the_state_of_its_boundary(tmp_path, device, caplog):
    """Written from the live tensors, while training waits."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = Model().to(device)
    loop = Loop(tmp_path, model, two(model), memory_budget="1 B")
    assert "rank 0 has no arena" in caplog.text
    assert as_saved(tmp_path, loop, two) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["nothing", "clip", "average"])
def test_on_a_gpu_each_snapshot_is_the_state_of_its_boundary(tmp_path, caplog, change):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = Model().cuda()

    def between():
        if change == "clip":
            model.words.weight.data.clamp_(-0.1, 0.1)
        elif change == "average":
            kept = model.words.weight.data.clone()
            model.words.weight.data.zero_()
            model.words.weight.data.copy_(kept.add_(1e-3))

    with caplog.at_level(logging.INFO, "trainckpt"):
        loop = Loop(tmp_path, model, two(model), between)
    assert "cannot be locked" not in caplog.text
    changed = "model/words.weight changed between two optimizer steps" in caplog.text
    assert changed == (change != "nothing")
    good = as_saved(tmp_path, loop, two)
    assert good == 8 if change == "nothing" else 5 <= good < 8


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", ["before the Checkpointer", "amid the training"])
def test_a_graph_that_steps_on_a_gpu_is_recorded_and_replayed_beside_saves(tmp_path, recorded):
    """No hook is called for its replays, so nothing is copied beside them."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = Model().cuda()
    ids = torch.arange(40, device="cuda")
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    loop = SimpleNamespace(saves=[], states=[], device="cuda", optimizers=momentum(model))
    record_at = 0 if recorded == "before the Checkpointer" else 4

    def step():
        nn.functional.cross_entropy(model(ids), ids).backward()
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad(set_to_none=False)

    def step_beside():
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)

    def record():
        with torch.cuda.graph(graph):
            step()

    if not record_at:
        for _ in range(3):
            step_beside()
        record()
    with Checkpointer(tmp_path, model=model, optimizer=loop.optimizers, every="never") as ckpt:
        for number in range(8):
            loop.saves.append(ckpt.save())
            ckpt.boundary()
            moments = [s["momentum_buffer"] for s in loop.optimizers[0].state.values()]
            state = [*model.state_dict().values(), *moments]
            loop.states.append([tensor.clone() for tensor in state])
            if number < record_at:
                step_beside()
            else:
                if number == record_at and record_at:
                    record()
                graph.replay()
    # the one in flight while it was recorded may have failed
    others = [s for n, s in enumerate(loop.saves) if not record_at or n != record_at]
    assert all(save.error is None for save in others)
    assert as_saved(tmp_path, loop, momentum) >= len(others)

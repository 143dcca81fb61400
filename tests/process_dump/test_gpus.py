"""GPU state is set aside and put back in order, whatever fails; the driver is a state machine."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.process_dump.fake_gpu.state_machine import (
    AFTER,
    BEFORE,
    FATAL,
    SUCCESS,
    StateMachine,
    running,
)
from tests.process_dump.test_restore import RECORD
from trainckpt.cli import doctor
from trainckpt.errors import SaveFailed
from trainckpt.format.dump import DumpRecord, Gpu, GpuState
from trainckpt.process_dump import gpu_state
from trainckpt.process_dump.gpu_state import CallFailed, Device, GpusLost, GpuUsage, Machine


class Direct:
    """The state machine in place of `CudaDriver`, in this process."""

    def __init__(self, machine: StateMachine) -> None:
        self.machine = machine

    def state(self, pid):
        self._call("state", pid)
        return self.machine.states[pid]

    def lock(self, pid, timeout_ms):
        assert timeout_ms > 0, "the driver would wait for ever"
        self._call("lock", pid, timeout_ms)

    def checkpoint(self, pid):
        self._call("checkpoint", pid)

    def restore(self, pid):
        self._call("restore", pid)

    def unlock(self, pid):
        self._call("unlock", pid)

    def _call(self, name, pid, timeout_ms=0):
        code = self.machine.call(name, pid, timeout_ms)
        if code != SUCCESS:
            raise CallFailed(name, pid, code)


def not_running(machine):
    return {pid for pid, state in machine.states.items() if state != "RUNNING"}


def set_aside(machine):
    gpu_state.set_aside(Direct(machine), list(machine.states), 5.0)


def failure_of(act, machine):
    try:
        act(machine)
    except SaveFailed as error:
        return error
    return None


def put_back(machine, **how):
    return gpu_state.put_back(Direct(machine), list(machine.states), **how)


# ---- the order of the calls


def test_all_are_locked_before_any_is_checkpointed_and_all_are_restored_before_any_is_unlocked():
    machine = running(3)
    set_aside(machine)
    assert set(machine.states.values()) == {"CHECKPOINTED"}
    assert put_back(machine) == gpu_state.UnrestoredProcesses({}, ())
    assert not_running(machine) == set()
    assert machine.misordered == []
    names = [name for name, _, _ in machine.calls if name != "state"]
    assert names == [name for name in ("lock", "checkpoint", "restore", "unlock") for _ in range(3)]


def fail_once_or_twice(number, more):
    """Every call fails in every way; and every two."""
    for index, how in product(range(number), (BEFORE, AFTER, FATAL)):
        yield {index: how}
    for one, other in combinations(range(number + more), 2):
        for ways in product((BEFORE, AFTER, FATAL), repeat=2):
            yield dict(zip((one, other), ways, strict=True))


def test_whatever_fails_while_it_is_set_aside_all_run_again_or_are_named():
    whole = running(2)
    set_aside(whole)
    refused = lost = 0
    for fails in fail_once_or_twice(len(whole.calls), 12):
        machine = running(2)
        machine.fails = fails
        error = failure_of(set_aside, machine)
        if isinstance(error, GpusLost):
            lost += 1
            assert not_running(machine) <= set(error.pids), (fails, error)
            unsure = [f"process {pid} is not known" for pid in {*error.pids} - not_running(machine)]
            assert all(text in error.message for text in unsure), (fails, error)
            assert FATAL in fails.values() or len(fails) > 1, "one failure in passing loses none"
        elif error is not None:
            refused += 1
            assert not_running(machine) == set(), (fails, error)
            assert machine.misordered == [] or FATAL in fails.values(), fails
        else:
            assert set(machine.states.values()) == {"CHECKPOINTED"}, fails
    assert refused > 0
    assert lost > 0


def test_whatever_fails_while_it_is_put_back_all_run_or_none_was_let_go():
    machine = running(2)
    set_aside(machine)
    before = len(machine.calls)
    put_back(machine)
    made = len(machine.calls) - before
    for fails in fail_once_or_twice(made, 3):
        machine = running(2)
        set_aside(machine)
        machine.calls.clear()
        machine.fails = fails
        left = put_back(machine, together=True)
        assert not_running(machine) <= {*left.states}, (fails, left)
        if len(fails) == 1 and FATAL not in fails.values():
            assert left.states == {}, "what fails in passing is tried again"
        if any(state == "CHECKPOINTED" for state in machine.states.values()):
            assert "unlock" not in [name for name, _, _ in machine.calls], (fails, left)
        assert [p for p in left.problems if "CUDA_ERROR" not in p] == []


def test_a_busy_process_is_waited_for_no_longer_than_all_locks_may_take():
    machine = running(3)
    first, _, last = machine.states
    machine.busy = (last,)
    with pytest.raises(SaveFailed, match=f"lock of process {last}: CUDA_ERROR_NOT_READY"):
        set_aside(machine)
    assert not_running(machine) == set()
    assert ("unlock", first, SUCCESS) in machine.calls
    assert "checkpoint" not in [name for name, _, _ in machine.calls]


def test_what_somebody_else_has_locked_is_left_alone():
    machine = running(2)
    first, second = machine.states
    machine.states[second] = "CHECKPOINTED"
    with pytest.raises(SaveFailed, match=f"process {second} is CHECKPOINTED already"):
        set_aside(machine)
    assert machine.states == {first: "RUNNING", second: "CHECKPOINTED"}


def test_a_restore_for_which_there_is_no_memory_lets_none_go():
    machine = running(2)
    set_aside(machine)
    first, last = machine.states
    machine.refuses["restore", last] = "CUDA_ERROR_OUT_OF_MEMORY"
    left = put_back(machine, together=True)
    assert left.states == {first: "LOCKED", last: "CHECKPOINTED"}
    assert "OUT_OF_MEMORY" in str(left)
    assert "unlock" not in [name for name, _, _ in machine.calls]


# ---- what is known before

MACHINE = Machine("580.65.06", (Device("NVIDIA H200", "GPU-1", 150, 140),))
STATE = GpuState("580.65.06", (Gpu("NVIDIA H200", "GPU-1", 10),), (7,))


def test_what_forbids_it_is_said_before_anything_is_touched():
    fine = GpuUsage(7, holds=True)
    cases = [
        (MACHINE, fine, []),
        (replace(MACHINE, driver="560.35"), fine, ["driver is 560.35, 570 is needed"]),
        (replace(MACHINE, driver=""), fine, ["driver is not known"]),
        (Machine(why_not="cuda-bindings is not installed"), fine, ["is not installed"]),
        (replace(MACHINE, devices=(Device("H200", "GPU-1", divided=True),)), fine, ["(MIG)"]),
        (replace(MACHINE, shared=(7,)), fine, ["process 7 uses its GPU through MPS"]),
        (MACHINE, replace(fine, nccl=True), ["process 7 has a live NCCL communicator"]),
        (MACHINE, replace(fine, stopped=True), ["stopped by a signal"]),
    ]
    for machine, signs, why in cases:
        found = gpu_state.why_not(machine, [signs])
        assert len(found) == len(why), found
        assert all(text in told for text, told in zip(why, found, strict=True))
    assert gpu_state.why_not(MACHINE, [replace(fine, nccl=True)], will_rest=True) == []


def test_another_driver_other_gpus_or_full_ones_do_not_get_it_back():
    assert gpu_state.why_not_again(STATE, MACHINE) == ""
    other = replace(MACHINE, devices=(Device("NVIDIA H200", "GPU-2", 150, 140),))
    full = replace(MACHINE, devices=(Device("NVIDIA H200", "GPU-1", 150, 5),))
    cases = [
        (replace(MACHINE, driver="590.1"), "driver was 580.65.06, this is 590.1"),
        (other, "the GPUs were NVIDIA H200 GPU-1; these are NVIDIA H200 GPU-2"),
        (replace(MACHINE, devices=()), "these are none"),
        (full, "GPU-1 has 0 MB free"),
        (Machine(why_not="no driver"), "no driver"),
    ]
    for machine, why in cases:
        assert why in gpu_state.why_not_again(STATE, machine)


def test_signs_of_a_gpu_are_read_from_proc(tmp_path, monkeypatch):
    task, fds = tmp_path / "7" / "task", tmp_path / "7" / "fd"
    for name, text in (("70", "python"), ("71", "pt_nccl_watchdg")):
        (task / name).mkdir(parents=True)
        (task / name / "comm").write_text(f"{text}\n")
    fds.mkdir()
    (fds / "3").symlink_to("/dev/nvidiactl")
    (tmp_path / "7" / "stat").write_text("7 (py (x) T) T 1")
    line = "7f00-7f01 rw-s 0 00:05 1    "
    maps = [f"{line}/home/dev/nvidia0", f"{line}/dev/nvidia-uvm", f"{line}/dev/nvidia-uvm"]
    (tmp_path / "7" / "maps").write_text("\n".join(maps))
    monkeypatch.setattr(gpu_state, "PROC", tmp_path)
    assert gpu_state.of(7) == GpuUsage(7, holds=True, nccl=True, stopped=True)
    assert gpu_state.look([7, 8]) == [gpu_state.of(7)]
    assert gpu_state.holders([7, 8]) == [7]
    assert gpu_state.gone([7, 8]) == [8]


def test_many_mappings_of_uvm_are_those_of_any_process_that_uses_cuda(tmp_path, monkeypatch):
    (tmp_path / "7").mkdir()
    lines = [f"7f{at:02}-7f{at + 1:02} rw-s 0 00:05 1    /dev/nvidia-uvm" for at in range(40)]
    (tmp_path / "7" / "maps").write_text("\n".join(lines))
    monkeypatch.setattr(gpu_state, "PROC", tmp_path)
    assert gpu_state.why_not(MACHINE, gpu_state.look([7])) == []


def test_managed_memory_is_refused_by_the_driver_and_all_go_on():
    machine = running(2)
    machine.refuses["checkpoint", max(machine.states)] = "CUDA_ERROR_NOT_SUPPORTED"
    with pytest.raises(SaveFailed, match="does not set aside managed memory") as refused:
        set_aside(machine)
    assert refused.value.hint == gpu_state.ONLY_SNAPSHOTS
    assert not_running(machine) == set()


def test_this_process_has_no_gpu_so_nobody_is_asked():
    assert gpu_state.of_tree([os.getpid()], driver=None) is None  # type: ignore[arg-type]


def test_a_record_with_gpus_is_read_as_it_was_written():
    record = replace(RECORD, gpus=STATE)
    assert DumpRecord.load(record.dump(), "x") == record
    assert STATE.num_bytes == 10


def test_doctor_says_what_gpu_state_needs():
    has = Machine("580.65.06", (Device("NVIDIA H200", "GPU-1"),), persistent=False)
    item = doctor.of_gpus(has)
    assert (item.ok, item.needed) == (True, False)
    assert "driver 580.65.06" in item.value
    assert "persistence mode is off" in item.value
    two = replace(has, devices=has.devices * 2)
    assert "launched with NCCL_NVLS_ENABLE=0" in doctor.of_gpus(two, {}).value
    off = {"NCCL_NVLS_ENABLE": "0"}
    assert "NVLS" not in doctor.of_gpus(two, off).value + item.value
    item = doctor.of_gpus(Machine(why_not="cuda-bindings is not installed", cure="pip x"))
    assert (item.ok, item.value, item.cure) == (False, "cuda-bindings is not installed", "pip x")
    item = doctor.of_gpus(replace(has, driver="550.1"))
    assert not item.ok
    assert "570" in item.cure

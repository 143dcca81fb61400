"""Dumps of processes with GPU state: the helper, CRIU, and a driver that is a state machine.

Those marked gpu have the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process_dump.fake_gpu.state_machine import (
    SUCCESS,
    StateMachine,
)
from tests.process_dump.test_refusals import NAME, VARIABLE, Counting
from trainckpt.errors import SaveFailed, UnusableSnapshot
from trainckpt.format.dump import Gpu, GpuState
from trainckpt.launcher.processes import ReparentedProcess, orphans_come_here
from trainckpt.process_dump import cuda_driver, dump, gpu_state, process_tree, restore
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.process_dump.gpu_state import CallFailed, Device, GpuUsage

FAKE = Path(__file__).parent / "fake_gpu"
H200 = {"name": "NVIDIA H200", "uuid": "GPU-1", "total": 150 << 30, "free": 140 << 30}


# ---- the helper process, with a package that has the names of the real one


class Fake:
    """The file that the state machine lives in, and a driver whose helper sees it."""

    def __init__(self, folder, pids, **more):
        self.path = folder / "gpu.json"
        states = dict.fromkeys(pids, "RUNNING")
        body = {
            "driver": "580.65.06",
            "devices": [H200],
            "states": states,
            "used": [[pid, 1 << 20] for pid in pids],
            **more,
        }
        self.path.write_text(json.dumps(body))

    def change(self, **more):
        self.path.write_text(json.dumps({**json.loads(self.path.read_text()), **more}))

    def driver(self):
        above = os.pathsep.join([str(FAKE), os.environ.get("PYTHONPATH", "")])
        return CudaDriver({"PYTHONPATH": above, "FAKE_GPU": str(self.path)})

    def states(self):
        return {int(at): how for at, how in json.loads(self.path.read_text())["states"].items()}

    def calls(self):
        found = json.loads(self.path.read_text()).get("calls", [])
        return [(name, code) for name, _, code in found if name != "state"]


def holding(pids):
    return [GpuUsage(pid, holds=True) for pid in pids]


def test_the_helper_speaks_to_the_driver_and_a_call_that_hangs_ends_the_helper_alone(
    tmp_path, monkeypatch
):
    me = os.getpid()
    fake = Fake(tmp_path, [me])
    with fake.driver() as driver:
        machine = driver.machine()
        assert (machine.driver, machine.why_not, machine.persistent) == ("580.65.06", "", True)
        assert machine.devices == (Device("NVIDIA H200", "GPU-1", 150 << 30, 140 << 30),)
        assert machine.used == ((me, "GPU-1", 1 << 20),)
        assert driver.users([me, os.getppid()]) == [me]
        with pytest.raises(CallFailed, match="CUDA_ERROR_ILLEGAL_STATE"):
            driver.checkpoint(me)
        with pytest.raises(CallFailed, match="CUDA_ERROR_NOT_INITIALIZED"):
            driver.lock(os.getppid(), 10)

        found = gpu_state.of_tree([me, os.getppid()], driver, holding)
        assert found.state == GpuState("580.65.06", (Gpu("NVIDIA H200", "GPU-1", 1 << 20),), (me,))
        found.set_aside()
        assert fake.states() == {me: "CHECKPOINTED"}
        found.put_back()
        assert fake.states() == {me: "RUNNING"}

        found.holders = lambda pids: [pids[-1]]
        with pytest.raises(SaveFailed, match=f"process {os.getppid()} still holds a GPU") as error:
            found.set_aside()
        assert "spawn" in error.value.hint
        assert fake.states() == {me: "RUNNING"}

        live = [GpuUsage(me, holds=True, nccl=True)]
        with pytest.raises(SaveFailed, match="has a live NCCL communicator"):
            gpu_state.of_tree([me], driver, lambda _: live)
        resting = gpu_state.of_tree([me], driver, lambda _: live, will_rest=True)
        assert resting.why_not_now == f"process {me} has a live NCCL communicator"

        fake.change(hangs=["checkpoint"])
        monkeypatch.setattr(driver, "_move_within_s", 5.0)
        found.holders = lambda pids: []
        with pytest.raises(SaveFailed, match=r"checkpoint of process .* no answer within"):
            found.set_aside()
        # The call that hung did its work for all that is known; the next helper undid it.
        assert fake.states() == {me: "RUNNING"}
        fake.change(hangs=[], devices=[{**H200, "mig": 1}])
        with pytest.raises(SaveFailed, match=r"it holds a GPU: NVIDIA H200 is divided \(MIG\)"):
            gpu_state.of_tree([me], driver, holding)
        fake.change(devices=[{**H200, "total": 1 << 60}], used=[])
        with pytest.raises(SaveFailed, match="MB of the host's memory are needed"):
            gpu_state.of_tree([me], driver, holding)
    assert driver._process is None


def test_what_is_lacking_is_said_with_its_cure(tmp_path):
    fake = Fake(tmp_path, [])
    with CudaDriver() as without:
        machine = without.machine()
        if machine.why_not:  # as on any machine without a GPU
            assert "cuda-bindings is not installed" in machine.why_not or "CUDA" in machine.why_not
    fake.change(init="CUDA_ERROR_NO_DEVICE")
    with fake.driver() as driver:
        machine = driver.machine()
        assert machine.why_not == "CUDA cannot be initialized: CUDA_ERROR_NO_DEVICE"
        assert machine.cure == cuda_driver.DRIVER
        fake.change(init="CUDA_SUCCESS", nvml=False)
        assert driver.machine().why_not == "NVML does not work: Driver Not Loaded"


# ---- with CRIU


def test_gpu_state_is_set_aside_before_criu_and_put_back_after_it(criu_here, tmp_path):
    """A real process and a real dump; the driver's part is the state machine's."""
    counting = Counting(tmp_path, criu_here.program, criu_here.version)
    pid = counting.process.pid
    fake = Fake(tmp_path, [pid])
    try:
        assert counting.counts_on()
        with fake.driver() as driver:
            found = gpu_state.of_tree([pid], driver, holding)
            order = replace(counting.order(), gpus=found)
            broken = replace(order, program=tmp_path / "none")
            with pytest.raises(SaveFailed, match="CRIU could not dump"):
                dump.take(counting.tier, broken, VARIABLE)
            assert fake.states() == {pid: "RUNNING"}
            assert counting.counts_on()
            fake.change(calls=[])
            with orphans_come_here():
                record = dump.take(counting.tier, order, VARIABLE)
                counting.process.wait()
                assert dump.await_gone(record) == []
        assert fake.calls() == [("lock", SUCCESS), ("checkpoint", SUCCESS)]
        assert restore.load(counting.tier, "run", NAME).gpus == found.state

        def bring_back(record):
            with restore.examined(counting.tier, record, fake.driver) as whole:
                whole.bring_back(2, dict)

        def refused(why, **change):
            before, printed = json.loads(fake.path.read_text()), counting.log.stat().st_size
            fake.change(**change)
            with pytest.raises(UnusableSnapshot, match=why):
                bring_back(record)
            assert process_tree.taken(record.tasks) == []
            fake.path.write_text(json.dumps(before))
            os.truncate(counting.log, printed)  # of the moment between CRIU and the driver

        refused("dump~1.1 cannot be restored: .* driver was 580", driver="590.1")
        refused("GPU-1 has 0 MB free", devices=[{**H200, "free": 0}])
        refused("CUDA_ERROR_OUT_OF_MEMORY", refuses=[["restore", pid, "CUDA_ERROR_OUT_OF_MEMORY"]])

        bring_back(record)
        counting.restored = ReparentedProcess(record.root)
        assert fake.states() == {pid: "RUNNING"}
        assert fake.calls()[-2:] == [("restore", SUCCESS), ("unlock", SUCCESS)]
        assert counting.counts_on()
    finally:
        counting.end()


# ---- the real driver

ON_GPU = """
import sys, time, torch
state = torch.arange(1 << 20, device="cuda", dtype=torch.int64)
for number in range(10**9):
    state += 1
    assert int(state[0].cpu()) == number + 1
    assert int(state[-1].cpu()) == number + (1 << 20)
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
    time.sleep(0.05)
"""


@pytest.mark.gpu
def test_a_process_with_state_on_a_real_gpu_is_dumped_and_goes_on(criu_here, gpu_here, tmp_path):
    """The values on the GPU go on where they were; its memory is free in between."""
    with CudaDriver() as driver:
        counting = Counting(tmp_path, criu_here.program, criu_here.version, ON_GPU, bare=False)
        try:
            assert counting.counts_on()
            pid = counting.process.pid
            found = gpu_state.of_tree(process_tree.processes(pid), driver)
            assert found is not None
            assert found.state.pids == (pid,)
            found.set_aside()
            assert driver.state(pid) == "CHECKPOINTED"
            assert gpu_state.holders([pid]) == []
            found.put_back()
            assert counting.counts_on()

            with orphans_come_here():
                order = replace(counting.order(), gpus=found)
                record = dump.take(counting.tier, order, VARIABLE)
                counting.process.wait()
                assert dump.await_gone(record) == []
            counting.restore(record)
            assert counting.counts_on()
        finally:
            counting.end()


@pytest.mark.gpu
def test_the_real_driver_refuses_what_the_state_machine_refuses(tmp_path):
    pytest.importorskip("cuda.bindings")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    log = tmp_path / "log"
    with (
        log.open("ab") as output,
        subprocess.Popen(
            [sys.executable, "-c", ON_GPU], stdout=output, stdin=subprocess.DEVNULL
        ) as process,
        CudaDriver() as driver,
    ):
        try:
            until = time.monotonic() + 60
            while len(log.read_bytes().splitlines()) < 3 and time.monotonic() < until:
                time.sleep(0.05)
            pid = process.pid
            machine = StateMachine({pid: "RUNNING"})
            for name in (
                "checkpoint",
                "restore",
                "unlock",
                "lock",
                "lock",
                "restore",
                "checkpoint",
                "unlock",
                "restore",
                "unlock",
            ):
                arguments = (pid, 5000) if name == "lock" else (pid,)
                expected = machine.call(name, *arguments)
                try:
                    getattr(driver, name)(*arguments)
                    answer = SUCCESS
                except CallFailed as error:
                    answer = error.code
                assert (name, answer) == (name, expected)
                assert driver.state(pid) == machine.states[pid]
            with pytest.raises(CallFailed):
                driver.state(os.getpid())
        finally:
            process.send_signal(signal.SIGKILL)

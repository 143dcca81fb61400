"""GPU health, told by a stand-in with the names, values and errors of the real `pynvml`."""

# ruff: noqa: N802 - the names are the real module's
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from trainckpt.preemption.gpu_health import GpuHealth, open_again, shut_down
from trainckpt.preemption.polling import PollFailed


@dataclass
class Fake:
    """Two GPUs. What the test sets is what the driver says; the rest is the real module's."""

    events: list[tuple[int, int, int]] = field(default_factory=list)  # GPU, type, data
    errors: dict[int, int] = field(default_factory=lambda: {0: 4, 1: 0})
    rows: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)
    registered: dict[int, int] = field(default_factory=dict)
    broken: int | None = None
    num_open: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(
            pynvml, name
        )  # constants and errors; an AttributeError for what is not there

    def nvmlInit(self) -> None:
        if self.broken is not None:
            raise pynvml.NVMLError(self.broken)
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        assert self.num_open > 0
        self.num_open -= 1

    def nvmlEventSetFree(self, events: str) -> None:
        assert events == "set"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return {"GPU-aa": "handle 0", "GPU-bb": "handle 1"}[uuid]

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return int(handle.removeprefix("handle "))

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetSupportedEventTypes(self, handle: str) -> int:
        return pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypePState

    def nvmlDeviceRegisterEvents(self, handle: str, types: int, events: str) -> None:
        self.registered[self.nvmlDeviceGetIndex(handle)] = types

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        index, kind, data = self.events.pop(0)
        return SimpleNamespace(device=f"handle {index}", eventType=kind, eventData=data)

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, counter: int) -> int:
        assert kind == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        assert counter == pynvml.NVML_VOLATILE_ECC
        return self.errors[self.nvmlDeviceGetIndex(handle)]

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        index = self.nvmlDeviceGetIndex(handle)
        if index not in self.rows:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self.rows[index]


XID = pynvml.nvmlEventTypeXidCriticalError


def reasons(gpus: GpuHealth) -> list[str]:
    return [notice.reason for notice in gpus()]


def test_the_stand_in_has_no_function_that_the_real_module_has_not():
    ours = {name for name in vars(Fake) if name.startswith("nvml")}
    assert ours == {name for name in ours if callable(getattr(pynvml, name))}


def test_a_gpu_that_is_well_gives_no_notice_whatever_it_had_before():
    fake = Fake(rows={0: (1, 1, 1, 0), 1: (0, 0, 0, 0)})
    gpus = GpuHealth(fake)
    assert [reasons(gpus) for _ in range(3)] == [[], [], []]
    assert fake.registered == {0: XID, 1: XID}


def test_an_xid_after_which_memory_is_right_is_a_notice_that_names_the_gpu():
    fake = Fake(events=[(1, XID, 94), (0, XID, 63)])
    gpus = GpuHealth(fake)
    assert reasons(gpus) == ["GPU 1: Xid 94, a contained memory error"]
    assert reasons(gpus) == ["GPU 0: Xid 63, a row of memory is set aside"]
    assert reasons(gpus) == []


def test_after_a_fault_that_may_have_changed_memory_nothing_is_saved_but_it_is_said():
    said: list[str] = []
    double_bit = pynvml.nvmlEventTypeDoubleBitEccError
    gpus = GpuHealth(Fake(events=[(0, XID, 48), (0, XID, 79), (1, double_bit, 0)]), say=said.append)
    assert [reasons(gpus) for _ in range(3)] == [[], [], []]
    assert [line.partition(";")[0] for line in said] == [
        "GPU 0: Xid 48, an uncorrected memory error",
        "GPU 0: Xid 79, it has fallen off the bus",
        "GPU 1: a double-bit memory error",
    ]


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_an_xid_of_a_programs_own_mistake_is_nobodys_notice(xid):
    said: list[str] = []
    assert reasons(GpuHealth(Fake(events=[(0, XID, xid)]), say=said.append)) == []
    assert said == []


def test_counters_that_rise_are_notices_once():
    fake = Fake(rows={1: (0, 0, 0, 0)})
    gpus = GpuHealth(fake)
    assert reasons(gpus) == []
    fake.errors[0] += 1
    fake.rows[1] = (0, 1, 1, 0)
    assert reasons(gpus) == [
        "GPU 0: an uncorrected memory error",
        "GPU 1: a row of memory waits to be set aside",
    ]
    assert reasons(gpus) == []


@pytest.mark.parametrize(
    ("visible", "watched"),
    [("", {0, 1}), ("1", {1}), ("GPU-bb", {1}), ("GPU-aa,GPU-bb", {0, 1}), ("MIG-x", {0, 1})],
)
def test_only_the_gpus_that_the_process_may_see_are_watched(visible, watched):
    fake = Fake()
    GpuHealth(fake, visible)()
    assert set(fake.registered) == watched


def test_a_driver_that_does_not_work_is_told_as_an_unanswered_question():
    fake = Fake(broken=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    gpus = GpuHealth(fake)
    with pytest.raises(PollFailed, match="Driver Not Loaded"):
        gpus()
    fake.broken = None
    assert reasons(gpus) == []


def test_nvml_that_was_closed_is_opened_by_the_next_question():
    fake = Fake()
    gpus = GpuHealth(fake)
    gpus.close()
    assert reasons(gpus) == []
    assert fake.num_open == 1
    gpus.close()
    assert fake.num_open == 0
    fake.events.append((1, XID, 94))
    assert reasons(gpus) == ["GPU 1: Xid 94, a contained memory error"]
    assert fake.num_open == 1


def test_a_beginning_that_fails_half_way_opens_nvml_once():
    fake = Fake()
    gpus = GpuHealth(fake, visible="GPU-none")
    for _ in range(2):
        with pytest.raises(KeyError):
            gpus()
    assert fake.num_open == 1
    gpus.close()
    assert fake.num_open == 0


class Library:
    """NVML's C library, which counts how often it was opened."""

    num_open = 3

    def nvmlShutdown(self) -> int:
        if self.num_open == 0:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        self.num_open -= 1
        return 0

    def nvmlInit_v2(self) -> int:
        self.num_open += 1
        return 0


def test_nvml_is_shut_down_as_often_as_it_was_opened_and_opened_as_often_again():
    library = Library()
    assert shut_down(library) == 3
    assert library.num_open == 0
    open_again(3, library)
    assert library.num_open == 3


@pytest.mark.gpu
def test_a_real_gpu_that_is_well_gives_no_notice():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    gpus = GpuHealth(pynvml)
    assert reasons(gpus) == []
    assert gpus._handles

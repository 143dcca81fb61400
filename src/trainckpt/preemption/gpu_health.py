"""Report unhealthy GPUs: NVIDIA's driver signals them through NVML before, or without, a failure.

These faults are notices: the run is saved and leaves while the contents of GPU memory are still
right:

    Xid 63, 64    a row of memory was, or could not be, set aside
    Xid 74        a link between GPUs has errors
    Xid 92        many memory errors, all corrected
    Xid 94        an error contained in the process it hit; ours lives
    counters      an uncorrected memory error since the last poll; a row waits to be set aside

These faults are only logged: memory may be wrong, or the GPU is gone (Xid 48, 79, 95, 119, 120 and
the like). A save could then keep wrong numbers; CUDA ends the process by itself, and the older
snapshot stands. Xids caused by a program's own mistakes (13, 31, 43, 45, 68, 109) are ignored.

The module is `pynvml`, of the package nvidia-ml-py (extra `gpu`). While NVML is open the process
holds the driver's device files, which no process dump may contain: `GpuHealth.close` and
`shut_down` come before a dump, `open_again` and the next poll after a restore.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

from trainckpt.notice import GPU, Notice
from trainckpt.preemption.polling import PollFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEVICE_FILE = "/dev/nvidiactl"
LIBRARY = "libnvidia-ml.so.1"
WAIT_MS = 1000  # a dump waits for it
SAVE_ON = {
    63: "a row of memory is set aside",
    64: "a row of memory could not be set aside",
    74: "errors on a link between GPUs",
    92: "many corrected memory errors",
    94: "a contained memory error",
}
SAY_ONLY = {
    48: "an uncorrected memory error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its processor does not answer",
    120: "its processor failed",
    140: "an uncorrected memory error that was not recovered",
}


class GpuHealth:
    """All GPUs of this process's host, or its visible ones; each call polls once.

    Args:
        nvml: The module `pynvml`, or one like it.
        visible: CUDA_VISIBLE_DEVICES.
        say: Called with faults that cause no save.
    """

    pause_s = 0.5

    def __init__(
        self, nvml: Any, visible: str = "", say: Callable[[str], object] = lambda _: None
    ) -> None:
        self._nvml, self._visible, self._say = nvml, visible, say
        self._handles: dict[int, Any] = {}
        self._events: Any = None
        self._is_open = False
        self._errors: dict[int, int] = {}  # GPU -> uncorrected memory errors at the last poll
        self._waiting: set[int] = set()  # GPUs with a row waiting to be set aside from the start

    def __call__(self) -> list[Notice]:
        """Wait a while for an event, then read the counters; see `polling`.

        Raises:
            PollFailed: NVML does not work here.
        """
        try:
            if self._events is None:
                self._begin()
            return [*self._event(), *self._counters()]
        except self._nvml.NVMLError as error:
            raise PollFailed(f"{GPU} health is not watched: {error}") from error

    def close(self) -> None:
        """Close NVML; the next call opens it again."""
        nvml = self._nvml
        if self._events is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(self._events)
        if self._is_open:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        self._events, self._is_open, self._handles = None, False, {}

    def _begin(self) -> None:
        nvml = self._nvml
        if not self._is_open:  # else an earlier try failed behind this line
            nvml.nvmlInit()
            self._is_open = True
        handles = self._visible_handles()
        events = nvml.nvmlEventSetCreate()
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        for handle in handles:
            with contextlib.suppress(nvml.NVMLError):  # not every GPU reports its events
                types = wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle)
                nvml.nvmlDeviceRegisterEvents(handle, types, events)
        self._handles = {nvml.nvmlDeviceGetIndex(handle): handle for handle in handles}
        self._errors = dict(self._uncorrected())
        self._waiting = set(self._rows_waiting())
        self._events = events

    def _visible_handles(self) -> list[Any]:
        nvml, names = self._nvml, [name.strip() for name in self._visible.split(",")]
        if all(name.isdecimal() for name in names):
            return [nvml.nvmlDeviceGetHandleByIndex(int(name)) for name in names]
        if all(name.startswith("GPU-") for name in names):
            return [nvml.nvmlDeviceGetHandleByUUID(name) for name in names]
        count = nvml.nvmlDeviceGetCount()
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def _event(self) -> Sequence[Notice]:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, WAIT_MS)
        except nvml.NVMLError_Timeout:
            return []
        index = nvml.nvmlDeviceGetIndex(event.device)
        if event.eventType != nvml.nvmlEventTypeXidCriticalError:
            self._say(
                f"{GPU} {index}: a double-bit memory error; its memory may be wrong, so "
                "nothing is saved because of it"
            )
            return []
        xid = int(event.eventData)
        if xid in SAY_ONLY:
            self._say(
                f"{GPU} {index}: Xid {xid}, {SAY_ONLY[xid]}; its memory may be wrong, so "
                "nothing is saved because of it"
            )
        return [Notice(f"{GPU} {index}: Xid {xid}, {SAVE_ON[xid]}")] if xid in SAVE_ON else []

    def _counters(self) -> Iterator[Notice]:
        for index, errors in self._uncorrected():
            if errors > self._errors.get(index, errors):
                yield Notice(f"{GPU} {index}: an uncorrected memory error")
            self._errors[index] = errors
        for index in self._rows_waiting():
            if index not in self._waiting:
                self._waiting.add(index)
                yield Notice(f"{GPU} {index}: a row of memory waits to be set aside")

    def _uncorrected(self) -> Iterator[tuple[int, int]]:
        nvml = self._nvml
        for index, handle in self._handles.items():
            with contextlib.suppress(nvml.NVMLError):  # GPUs without such memory
                kind, since = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                yield index, int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))

    def _rows_waiting(self) -> Iterator[int]:
        nvml = self._nvml
        for index, handle in self._handles.items():
            with contextlib.suppress(nvml.NVMLError):
                _, _, waits, failed = nvml.nvmlDeviceGetRemappedRows(handle)
                if waits or failed:
                    yield index


def shut_down(library: Any = None) -> int:
    """Shut NVML down in this process, whichever code opened it.

    Return how often it was open.

    NVML counts its openings. torch opens it to count devices, and leaves it open.

    Args:
        library: NVML's C library; None: the one loaded by the process, if any.
    """
    library = library or _loaded()
    times = 0
    while library is not None and library.nvmlShutdown() == 0:
        times += 1
    return times


def open_again(times: int, library: Any = None) -> None:
    """Open NVML as often as `shut_down` has closed it."""
    library = library or _loaded()
    for _ in range(times):
        library.nvmlInit_v2()


def _loaded() -> Any:
    try:
        return ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD)
    except (OSError, AttributeError):  # not loaded, or no such flag on this system
        return None

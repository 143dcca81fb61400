"""Call CUDA to copy from a GPU to the host during training (`device_copy`).

Each thread makes a device current before it calls CUDA for it: else the runtime would set up the
first device of the host and take memory there. Each call also uses the relaxed capture mode: else
it would fail a graph recording of another thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.state.packed_copies import RUN_BYTES, as_bytes, pack
from trainckpt.storage.direct_io import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trainckpt.state.packed_copies import Run

PORTABLE = 1  # cudaHostRegisterPortable: for all devices
RELAXED = 2  # cudaStreamCaptureModeRelaxed


class CudaCalls:
    """The `DeviceBackend` of CUDA: one copy stream per device, besides those of training."""

    kind = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}  # for packing small tensors

    @property
    def is_used(self) -> bool:
        """Return True if CUDA is initialized: tensors may exist on it."""
        return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Make the device current for this thread, without disturbing graph captures of others."""
        driver, mode = _driver(), ctypes.c_int(RELAXED)
        with torch.cuda.device(device):
            if driver is not None:
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            try:
                yield
            finally:
                if driver is not None:  # back to what it was
                    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def finish(self, device: torch.device) -> None:
        """Wait for all work submitted to the device so far, on any stream."""
        with self.on(device):
            torch.cuda.synchronize(device)

    def finish_own(self, device: torch.device) -> None:
        """Wait for the work submitted to this thread's current stream."""
        with self.on(device):
            torch.cuda.current_stream(device).synchronize()

    @contextlib.contextmanager
    def apart(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Return a context with new streams, so that this thread's work waits for no other."""
        with contextlib.ExitStack() as stack:
            for device in devices:
                stack.enter_context(self.on(device))
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def register(self, address: int, num_bytes: int, device: torch.device) -> str:
        """Page-lock memory. Return the reason for a refusal, or ""."""

        def call() -> str:
            with self.on(device):
                cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = cudart.cudaHostRegister(address, num_bytes, PORTABLE)
                return "" if int(code) == 0 else str(cudart.cudaGetErrorString(code))

        return _alone(call)

    def unregister(self, address: int, device: torch.device) -> None:
        """Unlock memory registered at this address."""

        def call() -> str:
            with self.on(device):
                cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cudart.cudaHostUnregister(address)
            return ""

        _alone(call)

    @torch.no_grad()
    def start(self, device: torch.device, runs: Sequence[Run]) -> torch.cuda.Event:
        """Begin the copies after the work on this thread's current stream, and return an event.

        After an exception some copies may have begun: `finish` waits for those.
        """
        with torch.cuda.device(device):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for target, flat in self._packed(device, runs):
                    _at(target, flat.numel()).copy_(flat, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(stream)
        return done

    def _packed(
        self, device: torch.device, runs: Sequence[Run]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield address and bytes of each copy, which must be submitted before the next one."""
        if any(len(run.sources) > 1 for run in runs) and device not in self._buffers:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                # Made on the copy stream, so each use is ordered after the one before.
                self._buffers[device] = torch.empty(RUN_BYTES, dtype=torch.uint8, device=device)
        buffer = self._buffers.get(device)
        for run in runs:
            if buffer is not None:
                yield run.target, pack(run, buffer)
                continue
            target = run.target
            for source in run.sources:
                yield target, as_bytes(source)
                target += source.nbytes

    def wait(self, device: torch.device, copies: torch.cuda.Event) -> None:
        """Wait for the copies of an event from `start`; any thread."""
        with self.on(device):
            copies.synchronize()

    def is_over(self, copies: torch.cuda.Event) -> bool:
        """Return True if the copies of an event from `start` are complete."""
        return bool(copies.query())  # type: ignore[no-untyped-call]

    def hold(self, device: torch.device, copies: torch.cuda.Event) -> None:
        """Delay later work on this thread's current stream until the copies are complete."""
        torch.cuda.current_stream(device).wait_event(copies)

    @property
    def is_recording(self) -> bool:
        """Return True if the current stream is recording a graph."""
        return torch.cuda.is_current_stream_capturing()

    @property
    def has_recorded(self) -> bool:
        """Return True if any CUDA graph exists: it may be replayed."""
        graph = torch.cuda.CUDAGraph
        return any(issubclass(type(each), graph) for each in gc.get_objects())


def _at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(at_address(address, num_bytes), dtype=torch.uint8)


def _alone(call: Callable[[], str]) -> str:
    """Return the result of `call` in a thread of its own.

    CUDA remembers a failure for the calling thread, and torch would report it at that thread's
    next kernel launch.
    """
    said: list[str] = []

    def run() -> None:
        try:
            said.append(call())
        except Exception as error:  # noqa: BLE001 - on any failure torch copies instead
            said.append(str(error) or repr(error))

    thread = threading.Thread(target=run, name="trainckpt-lock")
    thread.start()
    thread.join()
    return said[0]


@cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuThreadExchangeStreamCaptureMode  # noqa: B018 - is it there?
    except (OSError, AttributeError):
        return None
    return driver

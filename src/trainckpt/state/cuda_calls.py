"""The calls of CUDA with which bytes get from a GPU to the host beside training (`side`).

A thread that calls CUDA for a device makes that device its own first: else the runtime would set up
the first one of the host, and take memory there. And each of ours says that it means no harm to a
graph that another thread may be recording: else that recording would fail.
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
from trainckpt.tiers.direct import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trainckpt.state.packed_copies import Run

PORTABLE = 1  # cudaHostRegisterPortable: for all devices
RELAXED = 2  # cudaStreamCaptureModeRelaxed


class CudaCalls:
    """A `Platform`: one stream beside those that train, for each device."""

    kind = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._buffers: dict[torch.device, torch.Tensor] = {}  # in which small tensors are packed

    @property
    def is_used(self) -> bool:
        """Whether there may be tensors on such a device."""
        return torch.cuda.is_initialized()  # type: ignore[no-untyped-call,no-any-return]

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """This thread calls CUDA for a device, whatever others record meanwhile."""
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
        """Return when all that was asked of it by now is done, on whatever stream."""
        with self.on(device):
            torch.cuda.synchronize(device)

    def finish_own(self, device: torch.device) -> None:
        """Return when all that this thread's current stream was asked for is done."""
        with self.on(device):
            torch.cuda.current_stream(device).synchronize()

    @contextlib.contextmanager
    def apart(self, devices: Iterable[torch.device]) -> Iterator[None]:
        """Have what this thread asks of devices wait for nothing that others asked for."""
        with contextlib.ExitStack() as stack:
            for device in devices:
                stack.enter_context(self.on(device))
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def register(self, address: int, num_bytes: int, device: torch.device) -> str:
        """Lock memory; why not, or ""."""

        def call() -> str:
            with self.on(device):
                cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = cudart.cudaHostRegister(address, num_bytes, PORTABLE)
                return "" if int(code) == 0 else str(cudart.cudaGetErrorString(code))

        return _alone(call)

    def unregister(self, address: int, device: torch.device) -> None:
        """Let it go."""

        def call() -> str:
            with self.on(device):
                cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cudart.cudaHostUnregister(address)
            return ""

        _alone(call)

    @torch.no_grad()
    def start(self, device: torch.device, runs: Sequence[Run]) -> torch.cuda.Event:
        """Begin these copies once what this thread's stream was asked for is done.

        If it raises, some of them may have begun: `finish` waits for those.
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
        """Give address and bytes of each copy; the next only once this one was asked for."""
        if any(len(run.sources) > 1 for run in runs) and device not in self._buffers:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                # Made on the stream that uses it, so each use comes behind the one before.
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
        """Return when what `start` gave is done; any thread."""
        with self.on(device):
            copies.synchronize()

    def is_over(self, copies: torch.cuda.Event) -> bool:
        """Whether it is done."""
        return bool(copies.query())  # type: ignore[no-untyped-call]

    def hold(self, device: torch.device, copies: torch.cuda.Event) -> None:
        """What is asked of the device from now on begins when it is done."""
        torch.cuda.current_stream(device).wait_event(copies)

    @property
    def is_recording(self) -> bool:
        """Whether what is asked now is recorded, to be done again and again."""
        return torch.cuda.is_current_stream_capturing()

    @property
    def has_recorded(self) -> bool:
        """Whether there is anything recorded, which may be done again."""
        graph = torch.cuda.CUDAGraph
        return any(issubclass(type(each), graph) for each in gc.get_objects())


def _at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(at_address(address, num_bytes), dtype=torch.uint8)


def _alone(call: Callable[[], str]) -> str:
    """What it says, in a thread of its own.

    CUDA remembers a call's failure for the thread that made it, and torch would report it at the
    next kernel that this thread launches.
    """
    said: list[str] = []

    def run() -> None:
        try:
            said.append(call())
        except Exception as error:  # noqa: BLE001 - whatever it is, it is copied as ever then
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

"""Copy tensors from a GPU to the arena on a separate stream.

    use         names the saved tensors; without a GPU among their devices nothing is done
    register    page-locks arena memory, so that the GPU can write to it
    copy        at a boundary: copies after all earlier GPU work, and waits
        start       during training: copies; `AsyncCopies.hold` delays the steps, not the thread
    keep        before memory loses pages or ends
    finish      before reads at a boundary: waits for the script's GPU work on any stream

Only contiguous tensors are copied this way, and only to registered memory. All others are copied
by torch: on other devices, and after the driver has refused memory or a copy (logged once).
`CudaCalls` makes all calls to the device; tests put a simulated device in its place.

Threads: the training thread. Another thread may `register` and `keep` while the training thread
waits for it. The saving thread waits for the copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainckpt.format.shard_file import LINE_BYTES
from trainckpt.state.packed_copies import RUN_BYTES, as_bytes, as_runs, pack
from trainckpt.storage.direct_io import at_address
from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.state.packed_copies import Run


# ---- calls to CUDA
#
# Each thread makes a device current before it calls CUDA for it: else the runtime would set up the
# first device of the host and take memory there. Each call also uses the relaxed capture mode: else
# it would fail a graph recording of another thread.


PORTABLE = 1  # cudaHostRegisterPortable: for all devices
RELAXED = 2  # cudaStreamCaptureModeRelaxed


class CudaCalls:
    """The calls to CUDA, with one copy stream per device besides those of training."""

    kind = "cuda"  # of device

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


# ---- copies through two pinned buffers
#
#     brought_back    device -> host: the GPU fills one buffer while the caller reads the other
#     upload          host -> device: this thread fills one buffer while the GPU reads the other
#
# Without them the driver copies through a small buffer of its own, at a fraction of the link's
# rate, while this thread waits. On devices other than CUDA, or without pinned memory, the same
# copies are made one after the other.


PART_BYTES = 16 << 20  # size of one buffer


def brought_back(source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the bytes of a contiguous tensor, in parts on the CPU, each after its first byte's
    number.

    A part is invalid when the next is taken.
    """
    flat = as_bytes(source)
    buffers = [new_buffer(min(PART_BYTES, len(flat)), pinned=source.is_cuda) for _ in range(2)]

    def fetch(at: int) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        into = buffers[at // PART_BYTES % 2][: len(flat) - at]
        with _on(source):
            into.copy_(flat[at : at + len(into)], non_blocking=True)
            return into, _asked(source)

    following = fetch(0)
    for at in range(0, len(flat), PART_BYTES):
        part, done = following
        if at + PART_BYTES < len(flat):
            # Into the buffer of the part before: the caller no longer uses it.
            following = fetch(at + PART_BYTES)
        _wait(done, source)
        yield at, part


@torch.no_grad()
def on_host(source: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the same values on the CPU."""
    if source.is_cpu or not source.is_contiguous():
        return source.detach().cpu().contiguous()
    into = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    flat = as_bytes(into)
    for at, part in brought_back(source):
        flat[at : at + part.numel()].copy_(part)
    return into


def can_upload(into: torch.Tensor, data: torch.Tensor) -> bool:
    """Return True if `upload` makes this copy: all bytes of `data`, from the CPU to a GPU."""
    return (
        into.is_cuda
        and data.is_cpu
        and into.dtype == data.dtype
        and into.shape == data.shape
        and into.is_contiguous()
        and data.is_contiguous()
        and not (into.is_conj() or into.is_neg() or data.is_conj() or data.is_neg())
    )


@torch.no_grad()
def upload(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, on this thread's stream; return when all are copied.

    Both are contiguous, of one type and shape. Each tensor is one copy, or one for each buffer it
    fills.
    """
    by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for into, data in copies:
        if into.nbytes:
            by_device.setdefault(into.device, []).append((into, data))
    for device_copies in by_device.values():
        _upload(device_copies)


def _upload(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    some = copies[0][0]
    size = min(PART_BYTES, sum(into.nbytes + LINE_BYTES for into, _ in copies))
    buffers = [new_buffer(size, pinned=some.is_cuda) for _ in range(2)]
    read: list[torch.cuda.Event | None] = [None, None]  # when the GPU has read each
    turn = filled = 0
    with _on(some):
        for into, data in copies:
            target, source = as_bytes(into), as_bytes(data)
            done = 0
            while done < source.numel():
                if filled >= size:
                    read[turn] = _asked(some)
                    turn, filled = 1 - turn, 0
                    _wait(read[turn], some)
                step = min(source.numel() - done, size - filled)
                part = buffers[turn][filled : filled + step].copy_(source[done : done + step])
                target[done : done + step].copy_(part, non_blocking=True)
                done, filled = done + step, filled + -(-step // LINE_BYTES) * LINE_BYTES
        _wait(_asked(some), some)  # the script may read it on any stream


def new_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return fresh bytes on the CPU; `pinned`: page-locked for the GPU, if the driver allows it."""
    if pinned:
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _asked(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """Return an event after all work of this thread's stream so far; None without CUDA."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def _wait(event: torch.cuda.Event | None, tensor: torch.Tensor) -> None:
    if event is not None:
        with _on(tensor):
            event.synchronize()


# ---- the copier


def finish(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for the devices of these tensors, on any stream.

    Call it at a boundary, before anything is read: the current stream is not ordered after a
    stream of the script's own.
    """
    platform = CudaCalls()
    if platform.is_used:
        for device in {t.device for t in tensors if t.device.type == platform.kind}:
            platform.finish(device)


class AsyncCopies:
    """The pending device copies of one save. Their sources stay alive until `wait` returns."""

    def __init__(
        self,
        platform: CudaCalls,
        copies: Iterable[tuple[int, torch.Tensor]],
        ends: Iterable[int] = (),
    ) -> None:
        """Group copies by device. `ends`: end addresses of the locked ranges; see `as_runs`."""
        self._platform = platform
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for copy in copies:
            by_device.setdefault(copy[1].device, []).append(copy)
        self._runs = {device: as_runs(copies, ends) for device, copies in by_device.items()}
        self._parts: list[tuple[torch.device, Any]] = []
        self._broken: torch.device | None = None  # some of its copies may have begun

    def start(self) -> None:
        """Begin the copies; call once. After an exception, `wait` for those already begun."""
        for device, runs in self._runs.items():
            self._broken = device
            self._parts.append((device, self._platform.start(device, runs)))
        self._broken = None

    def wait(self) -> None:
        """Return when all copies are complete. Any thread, more than once."""
        for device, part in self._parts:
            self._platform.wait(device, part)
        if self._broken is not None:
            self._platform.finish(self._broken)
        self._runs = {}

    def hold(self) -> None:
        """Delay this thread's later device work until all copies are complete."""
        for device, part in self._parts:
            self._platform.hold(device, part)

    @property
    def is_over(self) -> bool:
        """Return True if all copies are complete."""
        return all(self._platform.is_over(part) for _, part in self._parts)


class _Registered(NamedTuple):
    """Begin and end address of locked whole pages."""

    begin: int
    end: int
    device: torch.device


class DeviceCopier:
    """The device copies of one rank.

    Attributes:
        kind: The kind of device.
        is_replayed: A graph was recorded. Its replays take steps without calling hooks, so
            nothing may be copied during training.
    """

    def __init__(
        self, platform: CudaCalls | None = None, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """Create a copier. `say` receives the first refusal of a registration or copy."""
        self._platform = platform or CudaCalls()
        self.kind, self.is_replayed = self._platform.kind, False
        self._say = say
        self._devices: set[torch.device] = set()
        self._registered: list[_Registered] = []  # by address
        self._is_refused = False
        self._last = AsyncCopies(self._platform, ())

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Add the devices of tensors saved from now on."""
        if self._platform.is_used:
            devices = {tensor.device for tensor in tensors}
            self._devices |= {d for d in devices if d.type == self.kind}

    def register(self, memory: memoryview) -> None:
        """Page-lock the part of this memory not locked yet, if any device could write to it.

        Memory grown in place gets a second locked range after the first.
        """
        if not self._devices or self._is_refused or not len(memory):
            return
        address = _address(memory)
        begin, end = self._locked_to(address), _page_up(address + len(memory))
        if begin >= end:
            return
        device = min(self._devices, key=str)
        _keep_from_children(begin, end - begin)
        if why := self._platform.register(begin, end - begin, device):
            self._refuse(f"memory cannot be locked for the GPU, so copies take longer: {why}")
        else:
            self._registered.append(_Registered(begin, end, device))
            self._registered.sort()

    def keep(self, memory: memoryview, num_bytes: int) -> None:
        """Unlock ranges beyond `num_bytes`, before their pages go; 0: all of this memory."""
        if not self._registered or not len(memory):
            return
        address = _address(memory)
        first_gone = _page_up(address + num_bytes) if num_bytes else address
        gone = [
            each
            for each in self._registered
            if address <= each.begin < address + len(memory) and each.end > first_gone
        ]
        if gone:
            with contextlib.suppress(RuntimeError):  # the GPU has failed: it writes no more
                self.settle()
        for each in gone:
            self._unregister(each)

    def close(self) -> None:
        """Unlock all memory, until it is registered again."""
        with contextlib.suppress(RuntimeError):
            self.settle()
        for each in list(self._registered):
            self._unregister(each)

    def settle(self) -> None:
        """Wait for the latest copies: a failed save may have left some pending."""
        self._last.wait()

    def takes(self, source: torch.Tensor, target: int) -> bool:
        """Return True if the device itself can copy this tensor to this address."""
        if not self._registered or source.device not in self._devices:
            return False
        return source.is_contiguous() and self._locked_to(target) >= target + source.nbytes

    def _locked_to(self, address: int) -> int:
        """Return the end of the locked memory reaching from `address` on without a gap."""
        end = address
        for each in self._registered:
            if each.begin <= end < each.end:
                end = each.end
        return end

    def start(self, copies: Iterable[tuple[int, torch.Tensor]]) -> AsyncCopies:
        """Begin copies accepted by `takes`, after all device work of this thread's stream so far.

        If the device refuses a copy, now or earlier, torch copies synchronously instead.
        """
        copies = tuple(copies)
        if not self._is_refused:
            ends = [each.end for each in self._registered]
            self._last = flight = AsyncCopies(self._platform, copies, ends)
            try:
                flight.start()
            except RuntimeError as error:
                flight.wait()  # else it goes on writing to memory with another use by then
                self._refuse(f"the GPU does not copy by itself, so copies take longer: {error}")
            else:
                return flight
        self._last = AsyncCopies(self._platform, ())
        for target, source in copies:
            flat = as_bytes(source)
            _at(target, len(flat)).copy_(flat)
        return self._last

    def copy(self, copies: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Make copies accepted by `takes`, and wait for them."""
        if copies:
            self.start(copies).wait()

    def apart(self) -> AbstractContextManager[None]:
        """Return a context in which this thread's device work waits for no other stream."""
        return self._platform.apart(self._devices)

    def look_for_recorded(self) -> None:
        """Look for graphs recorded before the step hook existed.

        A replay on this device may take a step.
        """
        if self._platform.is_used and self._platform.has_recorded:
            self.is_replayed = True
            self._say(
                "a CUDA graph was recorded before the Checkpointer was made, and may take steps: "
                "saves copy everything while training waits; if it takes none, make the "
                "Checkpointer first"
            )

    def is_recording(self) -> bool:
        """Return True if the coming step is only recorded into a graph."""
        recording = bool(self._devices) and self._platform.is_recording
        self.is_replayed = self.is_replayed or recording
        return recording

    def proves(self, target: int, source: torch.Tensor) -> bool:
        """Return True if a tensor's bytes equal those of its copy. Any thread.

        The comparison is by bytes, so a NaN equals itself.
        """
        with self._platform.on(source.device):
            return all(
                not _compare(target + at, part.data_ptr(), part.numel())
                for at, part in brought_back(source)
            )

    def _refuse(self, why: str) -> None:
        self._is_refused = True
        self._say(why)

    def _unregister(self, each: _Registered) -> None:
        self._registered.remove(each)
        self._platform.unregister(each.begin, each.device)


def _compare(target: int, source: int, num_bytes: int) -> int:
    """Return 0 if the bytes are equal. Runs without the interpreter's lock."""
    return int(libc().memcmp(target, source, num_bytes))


def _keep_from_children(address: int, num_bytes: int) -> None:
    """Exclude pages from forked children.

    With a shared page the next write here would move the page elsewhere, while the GPU goes on
    writing to the old one.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        libc().madvise(address, num_bytes, mmap.MADV_DONTFORK)


def _page_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if len(memory) else 0

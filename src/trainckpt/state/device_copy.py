"""Copy tensors from a GPU to the arena on a separate stream.

    use         names the saved tensors; without a GPU among their devices nothing is done
    register    page-locks arena memory, so that the GPU can write to it
    copy        at a boundary: copies after all earlier GPU work, and waits
        start       during training: copies; `AsyncCopies.hold` delays the steps, not the thread
    keep        before memory loses pages or ends
    finish      before reads at a boundary: waits for the script's GPU work on any stream

Only contiguous tensors are copied this way, and only to registered memory. All others are copied
by torch: on other devices, and after the driver has refused memory or a copy (logged once).
A `DeviceBackend` makes the calls of one kind of device.

Threads: the training thread. Another thread may `register` and `keep` while the training thread
waits for it. The saving thread waits for the copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from trainckpt.state.cuda_calls import CudaCalls
from trainckpt.state.packed_copies import as_runs
from trainckpt.state.pinned import brought_back
from trainckpt.storage.direct_io import at_address
from trainckpt.storage.libc import libc

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.state.packed_copies import Run


class DeviceBackend(Protocol):
    """A kind of device with asynchronous copies."""

    kind: str

    @property
    def is_used(self) -> bool:
        """Return True if tensors may exist on this kind of device."""

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Make the device current for this thread, without disturbing graph captures of others."""

    def finish(self, device: torch.device) -> None:
        """Wait for all work submitted to the device so far, on any stream."""

    def finish_own(self, device: torch.device) -> None:
        """Wait for the work submitted to this thread's current stream."""

    def apart(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Return a context in which this thread's device work waits for no other stream."""

    def register(self, address: int, num_bytes: int, device: torch.device) -> str:
        """Page-lock memory. Return the reason for a refusal, or ""."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Unlock memory registered at this address."""

    def start(self, device: torch.device, runs: Sequence[Run]) -> Any:
        """Begin the copies after the work on this thread's current stream, and return a handle.

        After an exception some copies may have begun: `finish` waits for those.
        """

    def wait(self, device: torch.device, copies: Any) -> None:
        """Wait for the copies of a handle from `start`; any thread."""

    def is_over(self, copies: Any) -> bool:
        """Return True if the copies of a handle from `start` are complete."""

    def hold(self, device: torch.device, copies: Any) -> None:
        """Delay later work on this thread's current stream until the copies are complete."""

    @property
    def is_recording(self) -> bool:
        """Return True if the current stream is recording a graph."""

    @property
    def has_recorded(self) -> bool:
        """Return True if any recorded graph exists: it may be replayed."""


def finish(
    tensors: Iterable[torch.Tensor],
    platform: DeviceBackend | None = None,
    *,
    finished: Collection[torch.device] = (),
) -> set[torch.device]:
    """Wait for the devices of these tensors, on any stream, and return those devices.

    Call it at a boundary, before anything is read: the current stream is not ordered after a
    stream of the script's own.

    Args:
        tensors: On any devices.
        platform: The backend of the devices to wait for.
        finished: Devices already finished, with no later work but on this thread's stream or
            before it. For those only the current stream is waited for.
    """
    platform = platform or CudaCalls()
    if not platform.is_used:
        return set()
    devices = {t.device for t in tensors if t.device.type == platform.kind}
    for device in devices:
        if device in finished:
            platform.finish_own(device)
        else:
            platform.finish(device)
    return devices


class AsyncCopies:
    """The pending device copies of one save. Their sources stay alive until `wait` returns."""

    def __init__(
        self,
        platform: DeviceBackend,
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
        self, platform: DeviceBackend | None = None, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """Create a copier. `say` receives the first refusal of a registration or copy."""
        self._platform: DeviceBackend = platform or CudaCalls()
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

    @property
    def is_ready(self) -> bool:
        """Return True if any memory is locked."""
        return bool(self._registered)

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
            _copy(target, source)
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
                for at, part in brought_back(source, 0, source.nbytes)
            )

    def _refuse(self, why: str) -> None:
        self._is_refused = True
        self._say(why)

    def _unregister(self, each: _Registered) -> None:
        self._registered.remove(each)
        self._platform.unregister(each.begin, each.device)


@torch.no_grad()
def _copy(target: int, source: torch.Tensor) -> None:
    flat = source.detach().reshape(-1).view(torch.uint8)
    torch.frombuffer(at_address(target, flat.numel()), dtype=torch.uint8).copy_(flat)


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

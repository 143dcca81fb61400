"""Side: how bytes on a GPU get to their places in an arena, on a stream of their own.

    use         what is saved lies on such devices; before, nothing is done
    register    memory is locked for the GPU, which then writes to it by itself
    copy        at a boundary: behind what training has asked of the GPU so far; waited for once
    start       beside training: `Flight.hold` has the stream that steps wait, not the thread
    keep        memory is about to lose pages, or to end
    finish      before anything is read at a boundary: on whatever stream training has asked

Only registered memory is written to in this way, and only from tensors whose bytes lie in one run.
Everything else is copied as ever: from other devices, and once the driver has refused memory or a
copy, which is said once. Which calls that takes of a kind of device is the `Platform`'s to know.

Threads: the one that trains; another may `register` and `keep` where that one waits for it; and the
saving thread waits for a flight.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from trainckpt.state.cuda_calls import CudaCalls
from trainckpt.state.packed_copies import as_runs
from trainckpt.state.pinned import brought_back
from trainckpt.tiers.direct import at_address

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.state.packed_copies import Run

_libc = ctypes.CDLL(None if os.name == "posix" else "msvcrt")


class Platform(Protocol):
    """A kind of device whose copies go on by themselves."""

    kind: str

    @property
    def is_used(self) -> bool:
        """Whether there may be tensors on such a device."""

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Where any thread may ask it for something, whatever others record meanwhile."""

    def finish(self, device: torch.device) -> None:
        """Return when all that was asked of it by now is done, on whatever stream."""

    def finish_own(self, device: torch.device) -> None:
        """Return when all that this thread's current stream was asked for is done."""

    def apart(self, devices: Iterable[torch.device]) -> AbstractContextManager[None]:
        """Have what this thread asks of devices wait for nothing that others asked for."""

    def register(self, address: int, num_bytes: int, device: torch.device) -> str:
        """Lock memory; why not, or ""."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Let it go."""

    def start(self, device: torch.device, runs: Sequence[Run]) -> Any:
        """Begin these copies once what this thread's stream was asked for is done.

        If it raises, some of them may have begun: `finish` waits for those.
        """

    def wait(self, device: torch.device, copies: Any) -> None:
        """Return when what `start` gave is done; any thread."""

    def is_over(self, copies: Any) -> bool:
        """Whether it is done."""

    def hold(self, device: torch.device, copies: Any) -> None:
        """What is asked of the device from now on begins when it is done."""

    @property
    def is_recording(self) -> bool:
        """Whether what is asked now is recorded, to be done again and again."""

    @property
    def has_recorded(self) -> bool:
        """Whether there is anything recorded, which may be done again."""


def finish(
    tensors: Iterable[torch.Tensor],
    platform: Platform | None = None,
    *,
    finished: Collection[torch.device] = (),
) -> set[torch.device]:
    """Return the devices of these, which have done what they were asked for, on whatever stream.

    At a boundary, before anything is read: the stream that is current there knows nothing of one on
    which the script has taken its step.

    Args:
        tensors: On any devices.
        platform: Of the devices that are waited for.
        finished: Devices of which nothing was asked since they had finished but on this thread's
            stream, or behind which that comes: that stream alone is waited for.
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


class Flight:
    """Copies under way, of one save. Their sources stay until they are waited for."""

    def __init__(
        self,
        platform: Platform,
        copies: Iterable[tuple[int, torch.Tensor]],
        ends: Iterable[int] = (),
    ) -> None:
        """`ends`: of ranges of locked memory; see `as_runs`."""
        self._platform = platform
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for copy in copies:
            by_device.setdefault(copy[1].device, []).append(copy)
        self._runs = {device: as_runs(copies, ends) for device, copies in by_device.items()}
        self._parts: list[tuple[torch.device, Any]] = []
        self._broken: torch.device | None = None  # some of its copies may have begun

    def start(self) -> None:
        """Once. If it raises, `wait` returns when nothing is copied any more."""
        for device, runs in self._runs.items():
            self._broken = device
            self._parts.append((device, self._platform.start(device, runs)))
        self._broken = None

    def wait(self) -> None:
        """Return when all is copied. Any thread, more than once."""
        for device, part in self._parts:
            self._platform.wait(device, part)
        if self._broken is not None:
            self._platform.finish(self._broken)
        self._runs = {}

    def hold(self) -> None:
        """What this thread asks for from now on begins when all is copied."""
        for device, part in self._parts:
            self._platform.hold(device, part)

    @property
    def is_over(self) -> bool:
        """Whether all is copied."""
        return all(self._platform.is_over(part) for _, part in self._parts)


class _Registered(NamedTuple):
    """Whole pages; addresses."""

    begin: int
    end: int
    device: torch.device


class Side:
    """Of one rank.

    Attributes:
        kind: Of the devices.
        is_replayed: What devices are asked for was recorded: steps may be taken that call no hook,
            so nothing may be copied beside training.
    """

    def __init__(
        self, platform: Platform | None = None, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """`say` hears once that memory cannot be registered."""
        self._platform: Platform = platform or CudaCalls()
        self.kind, self.is_replayed = self._platform.kind, False
        self._say = say
        self._devices: set[torch.device] = set()
        self._registered: list[_Registered] = []  # by address
        self._is_refused = False
        self._last = Flight(self._platform, ())

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are saved from now on."""
        if self._platform.is_used:
            devices = {tensor.device for tensor in tensors}
            self._devices |= {d for d in devices if d.type == self.kind}

    def register(self, memory: memoryview) -> None:
        """Lock what is not locked of it yet, if there is a device that could write to it.

        Memory that grew where it lies has another range locked, behind the one before.
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
        """Before memory loses its pages behind so many bytes; 0: it may end.

        A range that would lose some is locked no more.
        """
        if not self._registered or not len(memory):
            return
        address = _address(memory)
        first_gone = _page_up(address + num_bytes) if num_bytes else address
        gone = [
            each for each in self._registered
            if address <= each.begin < address + len(memory) and each.end > first_gone
        ]  # fmt: skip
        if gone:
            with contextlib.suppress(RuntimeError):  # of a GPU that has failed: it writes no more
                self.settle()
        for each in gone:
            self._unregister(each)

    def close(self) -> None:
        """No memory is locked any more, until it is registered again."""
        with contextlib.suppress(RuntimeError):
            self.settle()
        for each in list(self._registered):
            self._unregister(each)

    def settle(self) -> None:
        """Return when nothing is copied: a save that failed may have left copies under way."""
        self._last.wait()

    @property
    def is_ready(self) -> bool:
        """Whether any memory is locked."""
        return bool(self._registered)

    def takes(self, source: torch.Tensor, target: int) -> bool:
        """Whether a tensor's bytes can be copied to this address by the device itself."""
        if not self._registered or source.device not in self._devices:
            return False
        return source.is_contiguous() and self._locked_to(target) >= target + source.nbytes

    def _locked_to(self, address: int) -> int:
        """The end of the memory that is locked from an address on without a gap."""
        end = address
        for each in self._registered:
            if each.begin <= end < each.end:
                end = each.end
        return end

    def start(self, copies: Iterable[tuple[int, torch.Tensor]]) -> Flight:
        """Begin copies that are taken: of what the device has been asked for by now.

        They are made at once, as ever, where the device has refused any, or does so now.
        """
        copies = tuple(copies)
        if not self._is_refused:
            ends = [each.end for each in self._registered]
            self._last = flight = Flight(self._platform, copies, ends)
            try:
                flight.start()
            except RuntimeError as error:
                flight.wait()  # else it would write on to memory that is used for something else
                self._refuse(f"the GPU does not copy by itself, so copies take longer: {error}")
            else:
                return flight
        self._last = Flight(self._platform, ())
        for target, source in copies:
            _copy(target, source)
        return self._last

    def copy(self, copies: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Make copies that are taken."""
        if copies:
            self.start(copies).wait()

    def apart(self) -> AbstractContextManager[None]:
        """Have what this thread asks of devices wait for nothing that other threads asked for."""
        return self._platform.apart(self._devices)

    def look_for_recorded(self) -> None:
        """Find graphs that were recorded before there was a hook to notice it.

        Any may take steps when it is replayed, on this device.
        """
        if self._platform.is_used and self._platform.has_recorded:
            self.is_replayed = True
            self._say(
                "a CUDA graph was recorded before the Checkpointer was made, and may take steps: "
                "saves copy everything while training waits; if it takes none, make the "
                "Checkpointer first"
            )

    def is_recording(self) -> bool:
        """Whether the step that is about to be taken is only recorded."""
        recording = bool(self._devices) and self._platform.is_recording
        self.is_replayed = self.is_replayed or recording
        return recording

    def proves(self, target: int, source: torch.Tensor, first: int, end: int) -> bool:
        """Whether these bytes of a tensor that was taken are those of its copy. Any thread.

        By their bytes, a NaN equals itself.
        """
        with self._platform.on(source.device):
            return all(
                not _compare(target + at, part.data_ptr(), part.numel())
                for at, part in brought_back(source, first, end)
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
    """0 if the bytes are equal; without the interpreter's lock."""
    return int(
        _libc.memcmp(ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(num_bytes))
    )


def _keep_from_children(address: int, num_bytes: int) -> None:
    """A process that is forked shares no page of it: else the next write here would move the page
    to another place, and the GPU go on writing to the old one.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), mmap.MADV_DONTFORK)


def _page_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if len(memory) else 0

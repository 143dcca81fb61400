"""Side: how bytes on a GPU get to their places in an arena, on a stream of their own.

    use         what is saved lies on such devices; before, nothing is done
    register    memory is locked for the GPU, which then writes to it by itself
    copy        at a boundary: behind what training has asked of the GPU so far; waited for once
    start       beside training: `Flight.hold` has the stream that steps wait, not the thread
    keep        memory is about to lose pages, or to end

Only registered memory is written to in this way, and only from tensors whose bytes lie in one run.
Everything else is copied as ever: from other devices, and where the driver refuses the memory,
which is said once. Which calls that takes of a kind of device is the `Platform`'s to know.

Threads: the one that trains; another may `register` and `keep` where that one waits for it; and the
saving thread waits for a flight.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainckpt.state.cuda_calls import CudaCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PART_BYTES = 16 << 20  # brought back at a time, to be compared


class Platform(Protocol):
    """A kind of device whose copies go on by themselves."""

    kind: str

    @property
    def is_used(self) -> bool:
        """Whether there may be tensors on such a device."""

    def register(self, address: int, num_bytes: int, device: torch.device) -> str:
        """Lock memory; why not, or ""."""

    def unregister(self, address: int, device: torch.device) -> None:
        """Let it go."""

    def start(self, device: torch.device, copies: Sequence[tuple[int, torch.Tensor]]) -> Any:
        """Begin these copies to addresses once what was asked of the device is done."""

    def wait(self, device: torch.device, copies: Any) -> None:
        """Return when what `start` gave is done; any thread."""

    def is_over(self, copies: Any) -> bool:
        """Whether it is done."""

    def hold(self, device: torch.device, copies: Any) -> None:
        """What is asked of the device from now on begins when it is done."""

    @property
    def is_recording(self) -> bool:
        """Whether what is asked now is recorded, to be done again and again."""


class Flight:
    """Copies under way, of one save. Their sources stay until they are waited for."""

    def __init__(self, platform: Platform, copies: Iterable[tuple[int, torch.Tensor]]) -> None:
        self._platform = platform
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for copy in copies:
            by_device.setdefault(copy[1].device, []).append(copy)
        self._sources = by_device
        self._parts = [(device, platform.start(device, c)) for device, c in by_device.items()]

    def wait(self) -> None:
        """Return when all is copied. Any thread, more than once."""
        for device, part in self._parts:
            self._platform.wait(device, part)
        self._sources = {}

    def hold(self) -> None:
        """What this thread asks for from now on begins when all is copied."""
        for device, part in self._parts:
            self._platform.hold(device, part)

    @property
    def is_over(self) -> bool:
        """Whether all is copied."""
        return all(self._platform.is_over(part) for _, part in self._parts)


@dataclass
class _Registered:
    device: torch.device
    good_bytes: int  # from the beginning on, whose pages are those that were locked


class Side:
    """Of one rank.

    Attributes:
        kind: Of the devices.
        is_replayed: What devices are asked for was recorded: steps may be taken that nobody hears
            of, so nothing may be copied beside training.
    """

    def __init__(
        self, platform: Platform | None = None, say: Callable[[str], object] = lambda _: None
    ) -> None:
        """`say` hears once that memory cannot be registered."""
        self._platform: Platform = platform or CudaCalls()
        self.kind, self.is_replayed = self._platform.kind, False
        self._say = say
        self._devices: set[torch.device] = set()
        self._registered: dict[int, _Registered] = {}
        self._is_refused = False
        self._last = Flight(self._platform, ())

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are saved from now on."""
        if self._platform.is_used:
            devices = {tensor.device for tensor in tensors}
            self._devices |= {d for d in devices if d.type == self.kind}

    def register(self, memory: memoryview) -> None:
        """Lock it, if there is a device that could write to it and it is not locked yet."""
        if not self._devices or self._is_refused or not len(memory):
            return
        address = _address(memory)
        known = self._registered.get(address)
        if known is not None and known.good_bytes >= len(memory):
            return
        if known is not None:  # it was shorter for a while, and has other pages since
            self._unregister(address)
        device = min(self._devices, key=str)
        if why := self._platform.register(address, len(memory), device):
            self._is_refused = True
            self._say(f"memory cannot be locked for the GPU, so copies take longer: {why}")
        else:
            self._registered[address] = _Registered(device, len(memory))

    def keep(self, memory: memoryview, num_bytes: int) -> None:
        """Before memory loses its pages behind so many bytes; 0: it may end."""
        if not self._registered or (address := _address(memory)) not in self._registered:
            return
        with contextlib.suppress(RuntimeError):  # of a GPU that has failed: it writes no more
            self.settle()
        known = self._registered[address]
        known.good_bytes = min(known.good_bytes, num_bytes)
        if not known.good_bytes:
            self._unregister(address)

    def close(self) -> None:
        """No memory is locked any more, until it is registered again."""
        with contextlib.suppress(RuntimeError):
            self.settle()
        for address in list(self._registered):
            self._unregister(address)

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
        end = target + source.nbytes
        return source.is_contiguous() and any(
            address <= target and end <= address + known.good_bytes
            for address, known in self._registered.items()
        )

    def start(self, copies: Iterable[tuple[int, torch.Tensor]]) -> Flight:
        """Begin copies that are taken: of what the device has been asked for by now."""
        self._last = flight = Flight(self._platform, copies)
        return flight

    def copy(self, copies: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Make copies that are taken."""
        if copies:
            self.start(copies).wait()

    def is_recording(self) -> bool:
        """Whether the step that is about to be taken is only recorded."""
        recording = bool(self._devices) and self._platform.is_recording
        self.is_replayed = self.is_replayed or recording
        return recording

    def _unregister(self, address: int) -> None:
        self._platform.unregister(address, self._registered.pop(address).device)


def brought_back(source: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """The bytes of a tensor whose bytes lie in one run, in parts on the CPU, and where each began.

    A part is gone when the next is taken.
    """
    flat = source.detach().reshape(-1).view(torch.uint8)
    scratch = _scratch(min(PART_BYTES, flat.numel()), pinned=source.is_cuda)
    for at in range(0, flat.numel(), PART_BYTES):
        part = flat[at : at + PART_BYTES]
        yield at, scratch[: part.numel()].copy_(part)


def _scratch(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        with contextlib.suppress(RuntimeError):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)) if len(memory) else 0

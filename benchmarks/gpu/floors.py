"""Stage B: what link and driver can do by themselves, and trainckpt's copies beside that.

pinned           device to pinned memory of torch's
registered       device to a registered memfd, by trainckpt's own calls
pageable         device to ordinary memory
small_*          so many tensors of 4 KiB: one by one, packed into one copy, by trainckpt's calls
register         locking memory for the GPU, and the longest gap between two launches of small
                 kernels by another thread meanwhile, beside the longest gap without it
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.gpu.device import GB, fastest
from benchmarks.gpu.facts import pcie_link

from trainckpt.state.device_copy import DeviceCopier
from trainckpt.storage.direct_io import populate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.gpu.findings import Findings

SMALL_BYTES = 4096
OF_LINK = 0.9
SMALL_SHARE = 3.0  # of one packed copy: what arranges and packs them is Python
LAUNCHES_TO_SYNCHRONIZE = 32  # so that no launch waits for room in the queue
QUIET_S = 0.2


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Add every floor."""
    num_bytes = device.large_bytes
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device.torch_device)
    pinned = pageable = None
    with findings.attempt("pinned"):
        pinned = num_bytes / fastest(copier(device.pinned(num_bytes), source), device)
        link = None
        if device.on_card:
            with findings.attempt("link"):
                link = pcie_link()["bytes_per_s"]
        if link is None and device.on_card:
            findings.add("pinned", pinned, "bytes/s")
        else:
            findings.at_least("pinned", pinned, "bytes/s", OF_LINK * (link or 0.0))
    with findings.attempt("registered"):
        registered = num_bytes / registered_copy(findings, device, source)
        findings.at_least("registered", registered, "bytes/s", OF_LINK * (pinned or 0.0))
    with findings.attempt("pageable"):
        host = torch.zeros(num_bytes, dtype=torch.uint8)
        pageable = num_bytes / fastest(copier(host, source), device, 3)
        findings.add("pageable", pageable, "bytes/s")
    with findings.attempt("small"):
        small_copies(findings, device)
    with findings.attempt("register"):
        registration(findings, device)


def copier(target: torch.Tensor, source: torch.Tensor) -> Any:
    """Return a function that starts one copy."""
    return lambda: target.copy_(source, non_blocking=True)


def registered_copy(findings: Findings, device: Any, source: torch.Tensor) -> float:
    """Return the seconds of a copy into a registered memfd; check the bytes."""
    with memfd(source.nbytes) as memory, registered_side(device, source, memory) as side:
        copies = [(address_of(memory), source)]
        seconds = fastest(lambda: side.copy(copies), device)
        equal = is_equal(memory, source)
        findings.add("registered_bytes_equal", equal, goal="equal", passed=equal)
    return seconds


def small_copies(findings: Findings, device: Any) -> None:
    """Time copies of many small tensors, in three ways."""
    number = device.num_small
    sources = [
        torch.full((SMALL_BYTES,), at % 251, dtype=torch.uint8, device=device.torch_device)
        for at in range(number)
    ]
    target = device.pinned(number * SMALL_BYTES)
    places = target.split(SMALL_BYTES)

    def one_by_one() -> None:
        for place, source in zip(places, sources, strict=True):
            place.copy_(source, non_blocking=True)

    findings.add("small_one_by_one", fastest(one_by_one, device), "s", why=f"{number} tensors")
    packed = fastest(lambda: target.copy_(torch.cat(sources), non_blocking=True), device)
    findings.add("small_packed", packed, "s")
    with memfd(target.nbytes) as memory, registered_side(device, sources[0], memory) as side:
        address = address_of(memory)
        copies = [(address + at * SMALL_BYTES, source) for at, source in enumerate(sources)]
        seconds = fastest(lambda: side.copy(copies), device)
        equal = is_equal(memory, torch.cat(sources))
        findings.add("small_bytes_equal", equal, goal="equal", passed=equal)
    findings.at_most("small_by_trainckpt", seconds, "s", SMALL_SHARE * packed)


@contextmanager
def registered_side(device: Any, source: torch.Tensor, memory: mmap.mmap) -> Iterator[DeviceCopier]:
    """Give trainckpt's copies from this device, with the memory registered.

    Raises:
        RuntimeError: the driver refuses memory, or copies.
    """
    said: list[str] = []
    side = DeviceCopier(device.platform(), said.append)
    side.use([source])
    side.register(memoryview(memory))
    try:
        if said:
            raise RuntimeError(said[0])
        yield side
    finally:
        side.close()
    if said:
        raise RuntimeError(said[0])


def is_equal(memory: mmap.mmap, source: torch.Tensor) -> bool:
    """Return True if the memory holds the bytes of a tensor."""
    return torch.equal(torch.frombuffer(bytearray(memory), dtype=torch.uint8), source.cpu())


def registration(findings: Findings, device: Any) -> None:
    """Time the registration of a memfd, and what it does to another thread's launches."""
    platform, num_bytes = device.platform(), device.registered_bytes
    with memfd(num_bytes) as memory:
        address = address_of(memory)
        with Launches(device) as quiet:
            time.sleep(QUIET_S)
        with Launches(device) as launches:
            begun = time.perf_counter()
            why = platform.register(address, num_bytes, device.torch_device)
            seconds = time.perf_counter() - begun
        if why:
            raise RuntimeError(f"memory was not registered: {why}")
        platform.unregister(address, device.torch_device)
    findings.add("register_per_gb", seconds / num_bytes * GB, "s")
    findings.add("launch_gap_quiet", quiet.longest_s, "s")
    findings.add("launch_gap_while_registering", launches.longest_s, "s")


class Launches:
    """Launch small kernels from a thread, inside a `with` block.

    Attributes:
        longest_s: The longest time between two launches.
    """

    longest_s = 0.0

    def __init__(self, device: Any) -> None:
        self._device = device

    def __enter__(self) -> Launches:
        self._is_over, self._is_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._launch)
        self._thread.start()
        self._is_on.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _launch(self) -> None:
        value = torch.zeros(256, device=self._device.torch_device)
        self._device.synchronize()
        last, number = time.perf_counter(), 0
        while not self._is_over.is_set():
            value.add_(1)
            number += 1
            if number % LAUNCHES_TO_SYNCHRONIZE == 0:
                self._device.synchronize()
                self._is_on.set()
            now = time.perf_counter()
            self.longest_s, last = max(self.longest_s, now - last), now


@contextmanager
def memfd(num_bytes: int) -> Iterator[mmap.mmap]:
    """Give a memfd's memory, whose pages are there, as an arena's."""
    descriptor = os.memfd_create("trainckpt-floors")
    try:
        os.ftruncate(descriptor, num_bytes)
        os.posix_fallocate(descriptor, 0, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
    populate(memoryview(memory))
    yield memory
    memory.close()


def address_of(memory: mmap.mmap) -> int:
    """Return where it begins."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))

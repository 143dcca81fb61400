"""CRIU as `make criu` installs it; where it cannot be, what needs it is skipped, and says why."""

from __future__ import annotations

import random

import pytest

from trainckpt.process_dump import criu, gpu_state
from trainckpt.process_dump.cuda_driver import CudaDriver


@pytest.fixture(scope="session")
def criu_here():
    """The ability of this machine to dump and restore."""
    found = criu.examine()
    if found.why_not:
        pytest.skip(f"{found.why_not} ({found.cure})")
    return found


@pytest.fixture
def counting(criu_here, tmp_path):
    """A small process of six threads that counts through a connection, and can be dumped."""
    from tests.process_dump.test_refusals import CONNECTED, IDLE_THREADS, PROGRAM, Counting

    text = IDLE_THREADS + CONNECTED + PROGRAM
    found = Counting(tmp_path, criu_here.program, criu_here.version, text)
    try:
        assert found.counts_on()
        yield found
    finally:
        found.end()


@pytest.fixture
def gpu_here():
    """torch, on a machine whose GPUs' state can be set aside."""
    pytest.importorskip("cuda.bindings")
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with CudaDriver() as driver:
        if why := gpu_state.why_not_here(driver.machine())[0]:
            pytest.skip(why)
    return torch


@pytest.fixture
def rng():
    """Which instants are tried is drawn anew each time; the failing seed stands in the output."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)

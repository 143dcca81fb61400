"""CRIU as `make criu` installs it; where it cannot be, what needs it is skipped, and says why."""

from __future__ import annotations

import random

import pytest

from trainckpt.process_dump import criu


@pytest.fixture(scope="session")
def criu_here():
    """The ability of this machine to dump and restore."""
    found = criu.examine()
    if found.why_not:
        pytest.skip(f"{found.why_not} ({found.cure})")
    return found


@pytest.fixture
def rng():
    """Which instants are tried is drawn anew each time; the failing seed stands in the output."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    return random.Random(seed)

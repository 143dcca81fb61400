"""One Slurm for the tests of each worker, and the runs that nobody stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import running, why_not
from tests.start_commands.conftest import straight  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def cluster():
    """Slurm's daemons; where they are installed and do not start, that is an error, not a skip."""
    if reason := why_not():
        pytest.skip(reason)
    # Not below pytest's own folder: the path of munge's socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running(Path(folder)) as cluster:
        yield cluster

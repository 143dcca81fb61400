"""One control plane for the tests of each worker, and the runs that nobody stopped."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest

from tests.kubernetes.cluster import NODES, running, why_not
from tests.start_commands.conftest import straight  # noqa: F401 - fixtures

numbers = itertools.count(1)


@pytest.fixture(scope="session")
def control_plane():
    """Where it is installed and does not start, that is an error, not a skip."""
    if reason := why_not():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="kube-") as folder, running(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def cluster(control_plane):
    """Two nodes that take pods, and none there yet."""
    for node in NODES:
        control_plane.cordon(node, off=True)
    yield control_plane
    control_plane.clear()


@pytest.fixture
def namespace(cluster):
    """A new one."""
    name = f"t{next(numbers)}"
    cluster.api.create("namespaces", {"metadata": {"name": name}})
    return name

"""One control plane for the tests of each worker, and the runs that nobody stopped."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest

from tests.kubernetes.cluster import NODES, running, why_not
from tests.start_commands.conftest import straight  # noqa: F401 - fixtures

HOSTS = Path("/etc/hosts")
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
    """Two nodes that take pods, and none there yet; what they do stays in the pods."""
    hosts = HOSTS.read_bytes()
    for node in NODES:
        control_plane.cordon(node, off=True)
    yield control_plane
    control_plane.clear()
    assert HOSTS.read_bytes() == hosts, f"a pod has written this machine's {HOSTS}"


@pytest.fixture
def namespace(cluster):
    """A new one."""
    name = f"t{next(numbers)}"
    cluster.api.create("namespaces", {"metadata": {"name": name}})
    return name

"""A Ray cluster on this machine: a head for drivers, and nodes with a place for one worker each."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pathlib import Path

STORE_BYTES = 80_000_000
MARK = "RAY_CHAOS_FOLDER"  # in the environment of every process of a cluster
PREEMPTION = 2  # Ray's number of that reason for a drain


class Nodes:
    """The nodes of one cluster, beside its head.

    Args:
        folder: Names the cluster's processes.
        number: Of nodes to begin with.
    """

    def __init__(self, folder: Path, number: int) -> None:
        from ray.cluster_utils import Cluster

        self._folder = str(folder)
        self._short = tempfile.mkdtemp(prefix="r", dir="/tmp")  # a socket's path: 107 bytes
        os.environ.update({MARK: self._folder, "RAY_TMPDIR": self._short})
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._leaving: list[tuple[Any, float]] = []
        self.staying: list[Any] = []  # those that no drain has taken
        for _ in range(number):
            self.add()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        node = self._cluster.add_node(
            num_cpus=1, resources={"place": 1}, object_store_memory=STORE_BYTES
        )
        self.staying.append(node)

    def remove(self, node: Any) -> None:
        """Kill a node with all that runs on it."""
        if node in self.staying:
            self.staying.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, grace_s: float) -> None:
        """Announce that a node leaves, as before a preemption; `remove_drained` removes it."""
        from ray._raylet import GcsClient

        client = GcsClient(address=self.address)
        deadline_ms = int((time.time() + grace_s) * 1000)
        accepted, why = client.drain_node(node.node_id, PREEMPTION, "spot", deadline_ms)
        assert accepted, why
        self.staying.remove(node)
        self._leaving.append((node, time.monotonic() + grace_s))

    def remove_drained(self) -> None:
        """Remove the drained nodes whose time is over."""
        for node, until_s in list(self._leaving):
            if time.monotonic() >= until_s:
                self._leaving.remove((node, until_s))
                self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._short, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Every process of the cluster and its drivers that lives."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get(MARK) == self._folder:
                    found.append(process)
            except psutil.Error:
                continue
        return found

"""Describe a cluster and its job: sizes, bandwidths, and how long a failed part is missing.

The defaults are assumptions about a cluster of 2026, meant to be replaced by what is measured:
docs/planning.md has each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster with one training job on all of it.

    Attributes:
        gpus: Their number.
        state_bytes: Model and optimizer, each byte counted once.
        step_s: Duration of a training step.
        gpus_per_host: Of one host.
        hosts_per_switch: Hosts that a failed switch cuts off.
        copy_bytes_per_s: From one GPU to its host's memory.
        network_bytes_per_s: Of one host, to other hosts and to the store.
        store_bytes_per_s: Of the shared store, by all hosts together.
        overhead_s: Stall of a save before a byte is copied, and of a restore in memory.
        restart_s: From the failure of a process until its successor begins to restore.
        replace_s: The same after the failure of a host or a switch, with a spare at hand.
        repair_s: Until a failed host is a spare again.
        outage_s: Duration of a failure of the store.
        spares: Hosts that wait for a failure; None: there always is one.
    """

    gpus: int
    state_bytes: float
    step_s: float
    gpus_per_host: int = 8
    hosts_per_switch: int = 16
    copy_bytes_per_s: float = 25e9
    network_bytes_per_s: float = 12.5e9
    store_bytes_per_s: float = 40e9
    overhead_s: float = 0.05
    restart_s: float = 60.0
    replace_s: float = 300.0
    repair_s: float = 4 * 3600.0
    outage_s: float = 600.0
    spares: int | None = None

    @property
    def hosts(self) -> int:
        """Return the number of hosts."""
        return -(-self.gpus // self.gpus_per_host)

    @property
    def switches(self) -> int:
        """Return the number of switches."""
        return -(-self.hosts // self.hosts_per_switch)

    @property
    def to_store_bytes_per_s(self) -> float:
        """Return the most that all hosts together send to the store, or read from it."""
        return min(self.store_bytes_per_s, self.hosts * self.network_bytes_per_s)

    @property
    def capture_s(self) -> float:
        """Return the stall of a save that only copies each GPU's part to memory."""
        return self.overhead_s + self.state_bytes / self.gpus / self.copy_bytes_per_s

    @property
    def peer_copy_s(self) -> float:
        """Return the time in which each host sends its part to another host."""
        return self.state_bytes / self.hosts / self.network_bytes_per_s

    @property
    def store_copy_s(self) -> float:
        """Return the time in which the state goes to the store, or comes from it, undisturbed."""
        return self.state_bytes / self.to_store_bytes_per_s

    def partner_of(self, host: int) -> int:
        """Return the host that holds this host's copy: under another switch, if there are two."""
        stride = self.hosts_per_switch if self.switches > 1 else 1
        return (host + stride) % self.hosts

"""Draw the faults of a cluster, by kind: at random, or from a trace file.

Each kind's faults are one process for the whole cluster, not one for each part: the superposition
of many rare, independent failures is a Poisson process (Palm and Khintchine). With a Weibull shape
below 1 the times between the cluster's faults are Weibull's instead, as logs of large machines show
(Schroeder and Gibson, DSN 2006: shapes of 0.7 to 0.8); the mean stays as given.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.format.duration import parse_duration

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping
    from random import Random

# What a fault takes away: a process; a host and its memory; all hosts under a switch; the store,
# for a while; the memory of the whole cluster.
RANK, HOST, SWITCH, STORE, CLUSTER = "rank", "host", "switch", "store", "cluster"
KINDS = (RANK, HOST, SWITCH, STORE, CLUSTER)


@dataclass(frozen=True)
class Fault:
    """One fault: seconds since the beginning, and its kind."""

    at_s: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class FaultModel:
    """How faults come.

    Attributes:
        means_s: Kind -> mean time between faults of this kind in the whole cluster.
        shape: Weibull shape of the times between them; 1: a Poisson process.
        uniform_s: Every fault comes this long after the one before: between the two, uniformly.
        trace: The faults themselves; then the other fields only describe them.
    """

    means_s: Mapping[str, float]
    shape: float = 1.0
    uniform_s: tuple[float, float] | None = None
    trace: tuple[Fault, ...] = ()

    @property
    def mtbf_s(self) -> float:
        """Return the mean time between faults that end an attempt; those of the store do not."""
        rate = sum(1.0 / mean_s for kind, mean_s in self.means_s.items() if kind != STORE)
        return 1.0 / rate if rate else math.inf

    @property
    def is_poisson(self) -> bool:
        """Return True if the closed forms hold for these faults."""
        return self.shape == 1.0 and self.uniform_s is None and not self.trace

    def rate(self, kind: str) -> float:
        """Return the faults of this kind in a second."""
        return 1.0 / self.means_s[kind] if kind in self.means_s else 0.0

    def draw(self, random: Random) -> Iterator[Fault]:
        """Yield the faults in order, without end unless they are a trace."""
        if self.trace:
            return iter(self.trace)
        if self.uniform_s is not None:
            return self._at_uniform_times(*self.uniform_s, random)
        streams = [self._stream(kind, random) for kind in sorted(self.means_s)]
        return heapq.merge(*streams, key=lambda fault: fault.at_s)

    def _stream(self, kind: str, random: Random) -> Iterator[Fault]:
        scale_s = self.means_s[kind] / math.gamma(1.0 + 1.0 / self.shape)
        at_s = 0.0
        while True:
            at_s += random.weibullvariate(scale_s, self.shape)
            yield Fault(at_s, kind)

    def _at_uniform_times(self, least_s: float, most_s: float, random: Random) -> Iterator[Fault]:
        kinds = list(self.means_s)
        weights = [1.0 / self.means_s[kind] for kind in kinds]
        at_s = 0.0
        while True:
            at_s += random.uniform(least_s, most_s)
            yield Fault(at_s, random.choices(kinds, weights)[0])


def split(mtbf_s: float, shares: Mapping[str, float]) -> dict[str, float]:
    """Return each kind's mean time between faults, from that of all and the shares of each."""
    whole = sum(shares.values())
    return {kind: mtbf_s * whole / share for kind, share in shares.items() if share > 0}


def read_trace(path: str | os.PathLike[str]) -> FaultModel:
    """Read a trace: on each line a JSON object `{"at": SECONDS or "2 h", "kind": "host"}`.

    Raises:
        ConfigurationError: the file is not readable, or empty.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the trace {path} is not readable: {error}") from error
    faults = [
        _parse(line, f"line {n} of {path}") for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not faults:
        raise ConfigurationError(f"the trace {path} holds no fault")
    faults.sort(key=lambda fault: fault.at_s)
    return of_trace(faults)


def of_trace(faults: list[Fault]) -> FaultModel:
    """Return the model of these faults; its means are theirs."""
    last_s = max(1.0, faults[-1].at_s)
    kinds = {fault.kind for fault in faults}
    means_s = {kind: last_s / sum(fault.kind == kind for fault in faults) for kind in sorted(kinds)}
    return FaultModel(means_s=means_s, trace=tuple(faults))


def _parse(line: str, what: str) -> Fault:
    try:
        body = json.loads(line)
        at, kind = body["at"], body["kind"]
        at_s = float(at) if isinstance(at, int | float) else parse_duration(str(at))
        fault = Fault(at_s, str(kind))
    except (ValueError, KeyError, TypeError):
        fault = None
    if fault is None or fault.kind not in KINDS or not 0 <= fault.at_s < math.inf:
        raise ConfigurationError(
            f"{what} is no fault",
            hint=f'one JSON object: {{"at": "2 h", "kind": "host"}}; kinds: {", ".join(KINDS)}',
        )
    return fault

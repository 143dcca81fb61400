"""Arguments that describe a cluster and its faults, of the verbs that plan."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.format.duration import parse_duration
from trainckpt.planning.cluster import Cluster
from trainckpt.planning.faults import (
    CLUSTER,
    HOST,
    KINDS,
    RANK,
    SWITCH,
    FaultModel,
    read_trace,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Kinds of the faults of Llama 3, as far as its table tells (docs/planning.md).
SHARES = {RANK: 15.0, HOST: 76.0, SWITCH: 8.0, CLUSTER: 1.0}
HOST_FAULTS_A_DAY = 6.5e-3  # of one host, on RSC-1 (Kokolis et al., HPCA 2025)
DAY_S = 24 * 3600.0
GIGA = 1e9

# option -> field of `Cluster`, unit of the option in that of the field, help
_NUMBERS = {
    "--gpus-per-host": ("gpus_per_host", 1, "default 8"),
    "--hosts-per-switch": ("hosts_per_switch", 1, "hosts lost with one switch; default 16"),
    "--copy-gb-s": ("copy_bytes_per_s", GIGA, "from one GPU to its host; default 25"),
    "--network-gb-s": ("network_bytes_per_s", GIGA, "of one host; default 12.5"),
    "--store-gb-s": ("store_bytes_per_s", GIGA, "of the shared store as a whole; default 40"),
    "--spares": ("spares", 1, "hosts that wait for a failure; default: always one"),
}
_DURATIONS = {
    "--overhead": ("overhead_s", "stall of a save beside its copy; default 0.05 s"),
    "--restart": ("restart_s", "from the end of a process until it restores; default 60 s"),
    "--replace": ("replace_s", "from the loss of a host until it restores; default 5 min"),
    "--repair": ("repair_s", "until a lost host is a spare; default 4 h"),
    "--outage": ("outage_s", "of the store; default 10 min"),
}


def duration(text: str) -> float:
    """Parse an option's value, such as `90 s` or `3 h`; a bare number is seconds."""
    try:
        return parse_duration(f"{text} s" if text.replace(".", "", 1).isdecimal() else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as '3 h'") from None


def positive(text: str) -> float:
    """Parse an option's value as a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def whole(text: str) -> int:
    """Parse an option's value as a number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return int(text)


def shares(text: str) -> dict[str, float]:
    """Parse the shares of the kinds of faults: `rank=15,host=77`."""
    found = {}
    for word in text.split(","):
        kind, _, share = word.partition("=")
        if kind.strip() not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
        found[kind.strip()] = positive(share)
    return found


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a cluster, its job and its faults."""
    job = parser.add_argument_group("the job and its cluster")
    job.add_argument("--gpus", type=whole, metavar="N", help="16 to 100,000, say")
    job.add_argument("--state-gb", type=positive, metavar="GB", help="model and optimizer, once")
    job.add_argument("--step-seconds", type=positive, metavar="S", help="default 1")
    for option, (field, unit, text) in _NUMBERS.items():
        parse: Callable[[str], float] = positive if unit == GIGA else whole
        job.add_argument(option, dest=field, type=parse, metavar="N", help=text)
    for option, (field, text) in _DURATIONS.items():
        job.add_argument(option, dest=field, type=duration, metavar="TIME", help=text)
    faults = parser.add_argument_group("faults")
    faults.add_argument("--mtbf", type=duration, metavar="TIME", help="of the whole cluster")
    faults.add_argument(
        "--faults", type=shares, metavar="SHARES", help="of the kinds: rank=15,host=76,switch=8"
    )
    faults.add_argument(
        "--weibull", type=positive, metavar="SHAPE", help="of the times between faults; default 1"
    )
    faults.add_argument("--trace", metavar="FILE", help='faults, a line each: {"at": S, "kind": K}')


def cluster_of(arguments: argparse.Namespace, preset: Cluster | None = None) -> Cluster:
    """Return the cluster; options come before the preset's values.

    Raises:
        ConfigurationError: the number of GPUs or the size of the state is missing.
    """
    given = {"gpus": arguments.gpus, "step_s": arguments.step_seconds}
    given["state_bytes"] = arguments.state_gb and arguments.state_gb * GIGA
    for field, unit, _ in _NUMBERS.values():
        value = getattr(arguments, field)
        given[field] = value if value is None or unit == 1 else value * unit
    given |= {field: getattr(arguments, field) for field, _ in _DURATIONS.values()}
    given = {field: value for field, value in given.items() if value is not None}
    if any(given.get(field) == 0 for field in ("gpus", "gpus_per_host", "hosts_per_switch")):
        raise ConfigurationError("a cluster without GPUs or hosts", hint="name numbers from 1 on")
    if preset is not None:
        return replace(preset, **given)
    if not given.get("gpus") or not given.get("state_bytes"):
        raise ConfigurationError(
            "the number of GPUs or the size of the state is missing",
            hint="--gpus N --state-gb GB, and --step-seconds S",
        )
    return Cluster(**{"step_s": 1.0, **given})


def faults_of(
    arguments: argparse.Namespace, cluster: Cluster, preset: FaultModel | None = None
) -> FaultModel:
    """Return the faults: the trace, or those of the mean time between faults."""
    if arguments.trace:
        return read_trace(arguments.trace)
    if preset is not None and not (arguments.mtbf or arguments.faults):
        found = preset
    else:
        mtbf_s = arguments.mtbf or DAY_S / (cluster.hosts * HOST_FAULTS_A_DAY)
        found = FaultModel(means_s=split(mtbf_s, arguments.faults or SHARES))
    return replace(found, shape=arguments.weibull) if arguments.weibull else found

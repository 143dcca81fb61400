"""Clusters and faults that were published, ready to simulate.

    llama-3     16,384 GPUs for 54 days, 419 faults (Llama 3, arXiv 2407.21783, table 5)
    opt-175b    992 GPUs for 60 days, 105 faults (OPT, arXiv 2205.01068, section 2.5)
    h200-64     64 GPUs for 3,000 steps, a fault each 2,700 to 4,500 s (Clockwork's comparison of
                TorchPass, TorchFT and checkpoint restarts, 2026)

Each assumption beyond its source stands beside it, and in docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainckpt.planning.cluster import Cluster
from trainckpt.planning.faults import CLUSTER, HOST, RANK, SWITCH, FaultModel, split

if TYPE_CHECKING:
    from collections.abc import Mapping


DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Preset:
    """One published run.

    Attributes:
        cluster: Where it ran.
        faults: What struck it.
        days: How long; None: until `steps` are done.
        steps: How far; None: for `days`.
        every_s: System -> place -> interval, where the run had one.
        assumed: What the source does not say, for people.
    """

    cluster: Cluster
    faults: FaultModel
    days: float | None = None
    steps: int | None = None
    every_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()


# Of its table 5: software and watchdogs end a process (63), switches and cables a rack (35); the
# rest are parts of one host.
_LLAMA_3 = Preset(
    Cluster(
        gpus=16_384,
        state_bytes=405e9 * 12,
        step_s=5.0,
        hosts_per_switch=2,
        restart_s=120.0,
        replace_s=120.0,
    ),
    FaultModel(means_s=split(54 * DAY_S / 419, {RANK: 63, HOST: 317, SWITCH: 35, CLUSTER: 4})),
    days=54,
    assumed=(
        "12 bytes of state a parameter, and steps of 5 s",
        "four of the host's faults took all memory of the cluster",
        "two minutes from any fault until processes restore",
        "a store of 40 GB/s, as ByteCheckpoint's load of such a model in 129 s needs",
        "a stall of 50 ms beside the copy, which is this project's goal on a GPU",
    ),
)

_OPT_175B = Preset(
    Cluster(
        gpus=992,
        state_bytes=175e9 * 14,
        step_s=14.4,
        copy_bytes_per_s=12e9,
        restart_s=300.0,
        replace_s=1800.0,
    ),
    FaultModel(means_s=split(60 * DAY_S / 105, {RANK: 15, HOST: 77, SWITCH: 8})),
    days=60,
    assumed=(
        "35 manual restarts, and the 70 automatic ones that the authors estimate",
        "steps of 14.4 s: 2 million tokens at 147 TFLOP/s a GPU; 14 bytes of state a parameter",
        "kinds of faults as in Llama 3",
        "half an hour until a host is replaced, 5 minutes until processes are",
    ),
)

_H200_64 = Preset(
    Cluster(
        gpus=64,
        state_bytes=109e9 * 14,
        step_s=393 * 60 / 3000,
        copy_bytes_per_s=50e9,
        restart_s=1350.0,
        replace_s=1350.0,
    ),
    FaultModel(means_s={HOST: 3600.0}, uniform_s=(2700.0, 4500.0)),
    steps=3000,
    every_s={"async": {"store": 100 * 393 * 60 / 3000}},
    assumed=(
        "3,000 steps take 393 minutes: TorchPass needed 405, with 6 faults of at most 2 minutes",
        "22.5 minutes until a restart restores: AWS names 15 to 30 (HyperPod, December 2025)",
        "14 bytes of state a parameter; saves are asynchronous",
    ),
)

PRESETS = {"llama-3": _LLAMA_3, "opt-175b": _OPT_175B, "h200-64": _H200_64}

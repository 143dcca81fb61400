"""The scenarios that are recorded: each kind of run and stop whose result must not change."""

from __future__ import annotations

from tests.guards.record import Scenario

TERM, KILL, PAUSE = "2.0:SIGTERM", "3.0:SIGKILL", "2.0:PAUSE"
DDP, FSDP = ("--parallel", "ddp"), ("--parallel", "fsdp")
IN_MEMORY = {"TRAINCKPT_MEMORY_EVERY": "1 step"}

SCENARIOS = [
    Scenario(name="one rank, SIGTERM", stop=TERM),
    Scenario(name="one rank, SIGKILL", stop=KILL),
    Scenario(name="one rank, window", stop=TERM, options={"TRAINCKPT_STOP_AT": "window"}),
    Scenario(name="2 ranks, DDP, SIGTERM", stop=TERM, ranks=2, flags=DDP),
    Scenario(name="2 ranks, DDP, SIGKILL", stop=KILL, ranks=2, flags=DDP),
    Scenario(name="3 ranks, DDP, SIGTERM", stop=TERM, ranks=3, flags=DDP),
    Scenario(name="2 to 3 ranks, DDP", stop=TERM, ranks=2, resumed_ranks=3, flags=DDP),
    Scenario(name="2 ranks, FSDP2, SIGTERM", stop=TERM, ranks=2, flags=FSDP),
    Scenario(name="2 ranks, FSDP2, SIGKILL", stop=KILL, ranks=2, flags=FSDP),
    Scenario(name="2 to 3 ranks, FSDP2", stop=TERM, ranks=2, resumed_ranks=3, flags=FSDP),
    Scenario(name="LoRA, references", stop=TERM, script="lora_gpt.py"),
    Scenario(name="encrypted", stop=TERM, encrypted=True),
    Scenario(name="encrypted, 2 ranks", stop=KILL, ranks=2, flags=DDP, encrypted=True),
    Scenario(name="S3", stop=TERM, on_s3=True),
    Scenario(
        name="partner",
        stop=KILL,
        ranks=2,
        flags=FSDP,
        options={"TRAINCKPT_REDUNDANCY": "partner", "TRAINCKPT_FAILURE_DOMAIN": "rank"},
    ),
    Scenario(
        name="XOR",
        stop=KILL,
        ranks=3,
        flags=FSDP,
        options={"TRAINCKPT_REDUNDANCY": "xor:3", "TRAINCKPT_FAILURE_DOMAIN": "rank"},
    ),
    Scenario(name="process dump", stop=PAUSE, flags=("--save-every", "100")),
]

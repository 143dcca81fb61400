"""How this attempt was launched, as its record keeps it: enough to launch it again.

Secrets are redacted before anything is stored: variables and arguments whose name says key,
token, secret, password or credential keep their name and lose their value.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REDACTED = "<redacted>"
# Whole words: `--max-tokens` and `--tokenizer` are no secrets, `HF_TOKEN` and `hub.token` are.
_SECRET = re.compile(
    r"(?:^|[-_.])(?:(?:api|access|private|secret|encryption)?[-_]?key|token|secret|passw(?:or)?d"
    r"|passphrase|credentials?|auth|cookie)(?:$|[-_.](?:id|file)?$)",
    re.IGNORECASE,
)
_URL_SECRET = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KEPT = re.compile(
    r"TRAINCKPT_|OMP_NUM_THREADS|MKL_|TORCH|CUDA_|CUBLAS_|NCCL_|GLOO_|PYTHONHASHSEED|PYTHONPATH|SLURM_JOB_ID"
)
_OURS_ALONE = re.compile(r"TRAINCKPT_(SUPERVISOR|PROVE|RESUME_AT|RESTART)|TORCHELASTIC_|TORCH_NCCL")


def describe(
    everyone: Sequence[tuple[str, int]], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Facts of this attempt for its record.

    Args:
        everyone: Host and process id of each rank, in rank order.
        environment: Of rank 0; None is this process's.
    """
    environment = os.environ if environment is None else environment
    torchrun = "TORCHELASTIC_RUN_ID" in environment
    return {
        "argv": redact_arguments(sys.orig_argv),
        "cwd": os.getcwd(),  # noqa: PTH109 - a record, not a path to open
        "env": redact_environment(environment),
        "launch": {
            "kind": "torchrun" if torchrun else "python",
            "nproc": int(environment.get("LOCAL_WORLD_SIZE", len(everyone))),
        },
        "world": len(everyone),
        "hosts": [host for host, _ in everyone],
        "pids": [pid for _, pid in everyone],
        "started": time.time(),
    }


def redact_arguments(argv: Sequence[str]) -> list[str]:
    """The command, with the value of every secret-sounding option replaced."""
    shown, hide_next = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = bool(equals or name.startswith("-")) and _SECRET.search(name) is not None
        if hide_next and not argument.startswith("--"):
            shown.append(REDACTED)
        elif secret and equals:
            shown.append(f"{name}={REDACTED}")
        else:
            shown.append(_URL_SECRET.sub(REDACTED, argument))
        hide_next = secret and not equals
    return shown


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that shape a training run, secrets replaced; nothing else is kept."""
    return {
        name: REDACTED if _SECRET.search(name) else _URL_SECRET.sub(REDACTED, value)
        for name, value in sorted(environment.items())
        if _KEPT.match(name) and not _OURS_ALONE.match(name)
    }


def evidence_of_restart(environment: Mapping[str, str] | None = None) -> str:
    """What says that a launcher started this run again, or ""."""
    environment = os.environ if environment is None else environment
    for name in ("TRAINCKPT_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 0:
            return f"{name}={count}"
    return ""


def start_name(environment: Mapping[str, str] | None = None) -> str:
    """Names this start of the processes among all that may share torchrun's store."""
    environment = os.environ if environment is None else environment
    return "/".join(environment.get(f"TORCHELASTIC_{n}", "") for n in ("RUN_ID", "RESTART_COUNT"))


def recorded_command(facts: Mapping[str, Any]) -> tuple[list[str], str, int]:
    """The recorded command, kind of launch and number of processes, checked.

    Raises:
        ConfigurationError: it cannot be run again as recorded.
    """
    argv, launch = facts.get("argv"), facts.get("launch")
    if not isinstance(argv, list) or len(argv) < 2 or not isinstance(launch, dict):
        raise ConfigurationError(
            "the attempt's record has no command", hint="start the script again as before"
        )
    if any(REDACTED in str(argument) for argument in argv):
        raise ConfigurationError(
            f"the recorded command holds a secret that was not stored: {' '.join(argv)}",
            hint="start the script again as before; it resumes by itself",
        )
    kind, nproc = launch.get("kind"), launch.get("nproc")
    if kind not in ("torchrun", "python") or type(nproc) is not int or nproc < 1:
        raise ConfigurationError(f"the recorded launch {launch} is not readable")
    return [str(argument) for argument in argv], str(kind), nproc

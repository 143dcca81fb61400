"""The launch of this attempt, as its record holds it: enough to launch it again.

    python      the script alone
    torchrun    ranks of torchrun, or of anything that sets torchelastic's variables
    accelerate  the same, with the ACCELERATE_... variables by which `accelerate launch` passes its
                choices to the script
    srun        tasks of a Slurm step; only Slurm can start those
    ray         workers of a Ray cluster; only a driver script can start those

Secrets are redacted before anything is stored (`storage/redact.py`).

`command_hash` identifies a command, so that one command's notes never count for another. The same
script with the same arguments may train several runs: the options in its environment, the run
directory's name and the working directory count too. Secrets do not, since others see the hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.storage import compile_folder
from trainckpt.storage.redact import REDACTED, is_secret, redact_arguments, redact_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainckpt.attempt.options import Options


AT_VARIABLE = "TRAINCKPT_RESUME_AT"
ACCEPT_OLDER_VARIABLE = "TRAINCKPT_ACCEPT_OLDER"
DUMPS_VARIABLE = "TRAINCKPT_CAN_DUMP"  # its supervisor can dump it
PYTHON, TORCHRUN, ACCELERATE, SRUN, RAY = "python", "torchrun", "accelerate", "srun", "ray"
RAY_VARIABLE = "RAY_JOB_ID"  # in every worker process, and in no driver
START_AGAIN = "start the script again as before"
_RECORDED = re.compile(
    r"TRAINCKPT_|OMP_NUM_THREADS|MKL_|TORCH|CUDA_|CUBLAS_|NCCL_|GLOO_|PYTHONHASHSEED|PYTHONPATH"
    r"|SLURM_JOB_ID|ACCELERATE_|FSDP_"
)
_OWN_VARIABLES = re.compile(
    r"TRAINCKPT_(SUPERVISOR|LAUNCHED|COMMAND|CAN_DUMP|PROVE|RESUME_AT|RESTART|ACCEPT_OLDER|RUN|CACHE)$"
    r"|TORCHELASTIC_|TORCH_ELASTIC_|TORCH_NCCL"
)


def describe(
    everyone: Sequence[tuple[str, int]], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return facts of this attempt for its record.

    Args:
        everyone: Host and process id of each rank, in rank order.
        environment: Of rank 0; None is this process's.
    """
    environment = os.environ if environment is None else environment
    local = environment.get("LOCAL_WORLD_SIZE", "")
    return {
        "argv": redact_arguments(sys.orig_argv),
        "cwd": os.getcwd(),  # noqa: PTH109 - a record, not a path to open
        "env": redact_environment(environment),
        "launch": {
            "kind": kind_of_launch(environment),
            "nproc": int(local) if re.fullmatch("[0-9]{1,9}", local) else len(everyone),
            **({"dumps": True} if DUMPS_VARIABLE in environment else {}),
        },
        "world": len(everyone),
        "hosts": [host for host, _ in everyone],
        "pids": [pid for _, pid in everyone],
        "started": time.time(),
    }


def script_arguments() -> list[str]:
    """Return the script's own arguments, with secrets replaced.

    A worker of Ray has none: its command is Ray's own, with other ports on each node.
    """
    return [] if kind_of_launch(os.environ) == RAY else redact_arguments(sys.argv[1:])


def kind_of_launch(environment: Mapping[str, str]) -> str:
    """Return the kind of launcher, by the variables it sets. Pure."""
    if "TORCHELASTIC_RUN_ID" in environment:
        accelerate = any(name.startswith("ACCELERATE_") for name in environment)
        return ACCELERATE if accelerate else TORCHRUN
    if RAY_VARIABLE in environment:
        return RAY
    # A job's own script, started by no step, has the number of a process too.
    in_job_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return SRUN if "SLURM_PROCID" in environment and not in_job_script else PYTHON


def missing_supervisor(environment: Mapping[str, str]) -> list[str]:
    """Return the features lost because `trainckpt run` did not start these processes. Pure.

    Returns:
        Sentences for people; none where there is a supervisor.
    """
    kind = kind_of_launch(environment)
    if environment.get("TRAINCKPT_SUPERVISOR") or kind == RAY:  # Ray restarts its workers itself
        return []
    if kind in (TORCHRUN, ACCELERATE):
        launcher = "torchrun" if kind == TORCHRUN else "accelerate launch (through torchrun)"
        patience = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
        return [
            (
                f"{launcher} returns 1 for every code, so schedulers do not see the 75 of a stop, "
                "except in the attempt's record"
            ),
            (
                f"{launcher} dies of SIGUSR1, and kills the ranks {patience} s after a SIGTERM, "
                "saved or not (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)"
            ),
            "torchrun's own restarts (--max-restarts) treat a stop as a failure",
        ]
    if kind == SRUN:
        return [
            (
                "only Slurm restarts failed ranks (--requeue), and srun returns the highest code "
                "of any task, or its signal"
            ),
            (
                "only Slurm enforces a deadline from outside: it kills the ranks after KillWait, "
                "or GraceTime when preempted, saved or not"
            ),
        ]
    return ["no automatic restart, and a deadline cannot be enforced from outside"]


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that shape a training run, with secrets replaced."""
    return {
        name: REDACTED if is_secret(name) else redact_text(value)
        for name, value in sorted(environment.items())
        if _RECORDED.match(name)
        and not _OWN_VARIABLES.match(name)
        and not compile_folder.is_ours(name, environment)
    }


def recorded_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of an attempt's facts, for an attempt that goes on from it.

    Variables of its Slurm job are left out: that job is over.
    """
    recorded = facts.get("env")
    known = recorded if isinstance(recorded, dict) else {}
    return {name: str(v) for name, v in known.items() if not name.startswith("SLURM_")}


# Kept even if redacted: without it secrets would be written in the clear, so an error is better.
ENCRYPT_TO_VARIABLE = "TRAINCKPT_ENCRYPT_TO"


def recorded_options(facts: Mapping[str, Any]) -> Options:
    """Return the options recorded in an attempt's facts; without facts, this process's own.

    A resume may run in another folder and shell. The variables of the launch count, except those
    set here, and secrets, which are not stored.

    Raises:
        ConfigurationError: one is unreadable.
    """
    from trainckpt.attempt.options import read_options

    recorded_variables = {
        name: value
        for name, value in recorded_environment(facts).items()
        if name == ENCRYPT_TO_VARIABLE or REDACTED not in value
    }
    return read_options({}, {**recorded_variables, **os.environ}, recorded_cwd(facts))


def recorded_cwd(facts: Mapping[str, Any]) -> Path:
    """Return the folder in which the command was launched."""
    cwd = facts.get("cwd")
    return Path(cwd) if isinstance(cwd, str) else Path.cwd()


def evidence_of_restart(environment: Mapping[str, str] | None = None) -> str:
    """Return the variable that shows that a launcher restarted this run, or ""."""
    environment = os.environ if environment is None else environment
    for name in ("TRAINCKPT_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        count = environment.get(name, "")
        if re.fullmatch("[0-9]{1,9}", count) and int(count) > 0:
            return f"{name}={count}"
    return ""


def recorded_command(facts: Mapping[str, Any]) -> tuple[list[str], str, int]:
    """Return the recorded command, kind of launch and number of processes, checked.

    Raises:
        ConfigurationError: the launch cannot be repeated as recorded.
    """
    argv, launch = facts.get("argv"), facts.get("launch")
    if not isinstance(argv, list) or len(argv) < 1 or not isinstance(launch, dict):
        raise ConfigurationError("the attempt's record has no command", hint=START_AGAIN)
    kind, nproc = launch.get("kind"), launch.get("nproc")
    if kind == SRUN:
        raise ConfigurationError(
            f"the run was started by srun, which only Slurm can do again: {shown_command(argv)}",
            hint="run the srun line again; the script resumes by itself",
        )
    if kind == RAY:
        raise ConfigurationError(
            "the run was started by Ray, which only a driver script can do again",
            hint="run the script that calls trainer.fit() again, with the same name and "
            "storage_path in its RunConfig; the run resumes by itself",
        )
    if any(REDACTED in str(argument) for argument in argv):
        raise ConfigurationError(
            f"the recorded command holds a secret that was not stored: {shown_command(argv)}",
            hint=f"{START_AGAIN}; it resumes by itself",
        )
    if kind not in (TORCHRUN, PYTHON, ACCELERATE) or type(nproc) is not int or nproc < 1:
        raise ConfigurationError(f"the recorded launch {launch} is not readable", hint=START_AGAIN)
    return [str(argument) for argument in argv], str(kind), nproc


def shown_command(argv: Sequence[object]) -> str:
    """Return a command for people, without its secrets."""
    return " ".join(redact_arguments([str(argument) for argument in argv]))


COMMAND_VARIABLE = "TRAINCKPT_COMMAND"  # set by the supervisor for its ranks
PREFIX = "TRAINCKPT_"
DIGITS = 16


def command_hash(
    argv: Sequence[str], cwd: str, run: str | None, environment: Mapping[str, str]
) -> str:
    """Return the hash. Pure.

    Args:
        argv: The launched command, in the form in which attempts record it.
        cwd: Its working directory.
        run: Its run directory, where the launcher names it.
        environment: Environment of the launcher.
    """
    shown = redact_environment(environment)
    options = {name: value for name, value in shown.items() if name.startswith(PREFIX)}
    text = json.dumps([redact_arguments(argv), cwd, run, options], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]

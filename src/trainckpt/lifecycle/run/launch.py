"""How this attempt was launched, as its record keeps it: enough to launch it again.

    python      the script alone
    torchrun    ranks of torchrun, or of anything that sets torchelastic's variables
    accelerate  the same, with the ACCELERATE_... variables in which `accelerate launch` hands its
                choices to the script
    srun        tasks of a Slurm step; only Slurm can start those

Secrets are redacted before anything is stored: variables and arguments whose name says key,
token, secret, password or credential keep their name and lose their value, wherever such a pair
stands in a text; so do passwords in URLs and values that look like the keys of known services.
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.tiers.redacted import keys_redacted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REDACTED = "<redacted>"
AT_VARIABLE = "TRAINCKPT_RESUME_AT"
ACCEPT_OLDER_VARIABLE = "TRAINCKPT_ACCEPT_OLDER"
DUMPS_VARIABLE = "TRAINCKPT_CAN_DUMP"  # its supervisor can dump it
PYTHON, TORCHRUN, ACCELERATE, SRUN = "python", "torchrun", "accelerate", "srun"
START_AGAIN = "start the script again as before"
_WORDS = (
    r"(?:(?:api|access|private|secret|encryption|auth|signing|ssh)?[-_]?key"
    r"|(?:access|api|auth|bearer|refresh|session)?[-_]?token|secret|\w*passw(?:or)?d|pwd"
    r"|passphrase|credentials?|auth|cookie)"
)
# Whole words: `--max-tokens` and `--tokenizer` are no secrets, `HF_TOKEN` and `hub.token` are.
_SECRET = re.compile(rf"(?:^|[^A-Za-z0-9]){_WORDS}(?:$|[-_.](?:id|file)?$)", re.IGNORECASE)
_CAMEL_SECRET = re.compile(r"[a-z](?:Key|Token|Secret|Password|Credentials?)$")
# The same as `name=value` or `"name": "value"` somewhere in a text.
_PAIR = re.compile(
    rf"((?:^|[\s;&?,{{\[\"'])[-\w.]*?(?<![A-Za-z0-9]){_WORDS}(?:[-_.]id)?"
    r"(?:[\"']\s*[=:]\s*[\"']?|[=:](?=\S)[\"']?))[^\s\"'&,;}\]]+",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b((?:Bearer|Basic)\s+)[-\w.~+/=]{8,}", re.IGNORECASE)
# A user, with or without a password; but Azure's abfs://container@account holds neither.
_URL_SECRET = re.compile(
    r"(?<=://)(?:(?<!abfs://)(?<!abfss://)(?<!az://)[^/?#\s]+|[^/?#\s:@]*:[^/?#\s]+)(?=@)"
)
_KNOWN_KEY = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA|AIza|eyJ)[-\w]{12,}"
    r"(?:\.[-\w]+)*"
)
_KEPT = re.compile(
    r"TRAINCKPT_|OMP_NUM_THREADS|MKL_|TORCH|CUDA_|CUBLAS_|NCCL_|GLOO_|PYTHONHASHSEED|PYTHONPATH"
    r"|SLURM_JOB_ID|ACCELERATE_|FSDP_"
)
_OURS_ALONE = re.compile(
    r"TRAINCKPT_(SUPERVISOR|COMMAND|CAN_DUMP|PROVE|RESUME_AT|RESTART|ACCEPT_OLDER|RUN)$"
    r"|TORCHELASTIC_|TORCH_ELASTIC_|TORCH_NCCL"
)


def describe(
    everyone: Sequence[tuple[str, int]], environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Facts of this attempt for its record.

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


def kind_of_launch(environment: Mapping[str, str]) -> str:
    """Who started the processes, by the variables that they leave. Pure."""
    if "TORCHELASTIC_RUN_ID" in environment:
        accelerate = any(name.startswith("ACCELERATE_") for name in environment)
        return ACCELERATE if accelerate else TORCHRUN
    # A job's own script, started by no step, has the number of a process too.
    in_job_script = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return SRUN if "SLURM_PROCID" in environment and not in_job_script else PYTHON


def missing_supervisor(environment: Mapping[str, str]) -> list[str]:
    """What is lost because these processes were not started by `trainckpt run`. Pure.

    Returns:
        Sentences for people; none where a supervisor is there.
    """
    if environment.get("TRAINCKPT_SUPERVISOR"):
        return []
    kind = kind_of_launch(environment)
    if kind in (TORCHRUN, ACCELERATE):
        launcher = "torchrun" if kind == TORCHRUN else "accelerate launch (through torchrun)"
        patience = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
        return [
            (
                f"{launcher} returns 1 whatever the ranks return: a scheduler that looks for the "
                "code of a stop (75) does not see it; the attempt's record has it"
            ),
            (
                f"{launcher} kills the ranks {patience} s after a SIGTERM, saved or not "
                "(TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets another time), and dies of SIGUSR1"
            ),
            "restarts are torchrun's own (--max-restarts): it takes a stop for a failure",
        ]
    if kind == SRUN:
        return [
            (
                "nobody restarts failed ranks but Slurm (--requeue), and srun returns the highest "
                "code of any task, or its signal"
            ),
            (
                "nobody outside the ranks keeps a deadline but Slurm: after KillWait, or GraceTime "
                "when preempted, it kills them, saved or not"
            ),
        ]
    return [
        (
            "a script that fails is not started again, and nobody outside it keeps a deadline: a "
            "call that holds the interpreter's lock also holds up the stop"
        ),
    ]


def redact_arguments(argv: Sequence[str]) -> list[str]:
    """The command, with the value of every secret-sounding option replaced."""
    shown, hide_next = [], False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        secret = bool(equals or name.startswith("-")) and _is_secret(name)
        if hide_next and not argument.startswith("--"):
            shown.append(REDACTED)
        elif secret and equals:
            shown.append(f"{redact_text(name)}={REDACTED}")
        else:
            shown.append(redact_text(argument))
        hide_next = secret and not equals
    return shown


def redact_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that shape a training run, secrets replaced; nothing else is kept."""
    return {
        name: REDACTED if _is_secret(name) else redact_text(value)
        for name, value in sorted(environment.items())
        if _KEPT.match(name) and not _OURS_ALONE.match(name)
    }


def recorded_environment(facts: Mapping[str, Any]) -> dict[str, str]:
    """The variables of an attempt's facts, for whoever goes on with it.

    Not those of its Slurm job, which is over: what goes on is no part of that job.
    """
    recorded = facts.get("env")
    known = recorded if isinstance(recorded, dict) else {}
    return {name: str(v) for name, v in known.items() if not name.startswith("SLURM_")}


def redact_text(text: str) -> str:
    """A text with the secrets in it replaced: pairs, passwords in URLs, well-known keys."""
    text = keys_redacted(_URL_SECRET.sub(REDACTED, text))
    text = _PAIR.sub(rf"\g<1>{REDACTED}", text)
    text = _BEARER.sub(rf"\g<1>{REDACTED}", text)
    return _KNOWN_KEY.sub(REDACTED, text)


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None or _CAMEL_SECRET.search(name) is not None


def evidence_of_restart(environment: Mapping[str, str] | None = None) -> str:
    """What says that a launcher started this run again, or ""."""
    environment = os.environ if environment is None else environment
    for name in ("TRAINCKPT_RESTART", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        count = environment.get(name, "")
        if re.fullmatch("[0-9]{1,9}", count) and int(count) > 0:
            return f"{name}={count}"
    return ""


def recorded_command(facts: Mapping[str, Any]) -> tuple[list[str], str, int]:
    """The recorded command, kind of launch and number of processes, checked.

    Raises:
        ConfigurationError: it cannot be run again as recorded.
    """
    argv, launch = facts.get("argv"), facts.get("launch")
    if not isinstance(argv, list) or len(argv) < 1 or not isinstance(launch, dict):
        raise ConfigurationError("the attempt's record has no command", hint=START_AGAIN)
    kind, nproc = launch.get("kind"), launch.get("nproc")
    if kind == SRUN:
        raise ConfigurationError(
            f"the run was started by srun, which only Slurm can do again: {shown(argv)}",
            hint="run the srun line again; the script resumes by itself",
        )
    if any(REDACTED in str(argument) for argument in argv):
        raise ConfigurationError(
            f"the recorded command holds a secret that was not stored: {shown(argv)}",
            hint=f"{START_AGAIN}; it resumes by itself",
        )
    if kind not in (TORCHRUN, PYTHON, ACCELERATE) or type(nproc) is not int or nproc < 1:
        raise ConfigurationError(f"the recorded launch {launch} is not readable", hint=START_AGAIN)
    return [str(argument) for argument in argv], str(kind), nproc


def shown(argv: Sequence[object]) -> str:
    """A command for people, without its secrets."""
    return " ".join(redact_arguments([str(argument) for argument in argv]))

"""Who launched the ranks, what that costs without a supervisor, and what is never recorded."""

from __future__ import annotations

import pytest

from trainckpt.attempt import launch
from trainckpt.errors import ConfigurationError
from trainckpt.storage.redact import redact_arguments

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "bf16"}
SRUN = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
EVERYONE = [("h", 1), ("h", 2)]


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "python"),
        (TORCHRUN, "torchrun"),
        (ACCELERATE, "accelerate"),
        (SRUN, "srun"),
        ({"SLURM_PROCID": "0"}, "srun"),
        ({**SRUN, **TORCHRUN}, "torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, "python"),  # in the job's own script
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "python"),
    ],
)
def test_the_launcher_is_known_by_its_variables(environment, kind):
    assert launch.describe(EVERYONE, environment)["launch"]["kind"] == kind


def test_what_accelerate_handed_over_is_kept_for_the_next_launch():
    facts = launch.describe(EVERYONE, ACCELERATE)
    assert facts["env"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert launch.recorded_command(facts) == (facts["argv"], "accelerate", 2)


def test_a_run_of_srun_is_not_launched_without_srun():
    with pytest.raises(ConfigurationError) as refused:
        launch.recorded_command(launch.describe(EVERYONE, SRUN))
    assert refused.value.exit_code == 78
    assert "run the srun line again" in refused.value.hint


def test_what_is_lost_without_a_supervisor_is_said_for_each_launcher():
    """And nothing where there is one."""
    said = " ".join(launch.missing_supervisor(TORCHRUN))
    assert "returns 1" in said
    assert "30 s after a SIGTERM" in said
    assert "--max-restarts" in said
    patient = {**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}
    assert "90 s after a SIGTERM" in " ".join(launch.missing_supervisor(patient))
    assert "accelerate launch" in launch.missing_supervisor(ACCELERATE)[0]
    assert "KillWait" in " ".join(launch.missing_supervisor(SRUN))
    assert "no automatic restart" in " ".join(launch.missing_supervisor({}))
    for environment in (TORCHRUN, ACCELERATE, SRUN, {}):
        assert launch.missing_supervisor({**environment, "TRAINCKPT_SUPERVISOR": "/f"}) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "s3cr3t"],
        ["--accessToken=s3cr3t"],
        ["+wandb.api_key=s3cr3t"],
        ["sh", "-c", "A=1 HF_TOKEN=s3cr3t python train.py"],
        ["PGPASSWORD=s3cr3t"],
        ["https://me:s3cr3t@host/x"],
        ["https://me:p@s3cr3t@host/x?token=x"],
        ["https://host/x?a=1&token=s3cr3t"],
        ['{"api_key": "s3cr3t", "lr": 1}'],
        ["--header", "Authorization: Bearer s3cr3t-and-more"],
        ["--hub", "hf_s3cr3tabcdefghijklmnop"],
    ],
)
def test_secrets_are_found_wherever_they_stand(argv):
    assert "s3cr3t" not in " ".join(redact_arguments(argv))
    assert "s3cr3t" not in launch.shown_command(argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-tokens", "5", "--tokenizer=gpt2", "--keyboard=us"],
        ["data/a@b.txt", "s3://bucket/key", "https://host/x?mail=a@b"],
        ["-c", "key = 3\nprint(key)"],
        ["model.key_dim=64", "--lr=0.1"],
    ],
)
def test_what_only_looks_like_a_secret_stays(argv):
    """A command that lost an argument cannot be launched again."""
    assert redact_arguments(argv) == argv

"""What an attempt's record says of its launch, and what it must never say."""

from __future__ import annotations

import json

import pytest

from tests.end_to_end.training import attempt, record
from trainckpt.attempt import launch
from trainckpt.errors import ConfigurationError
from trainckpt.storage.redact import redact_arguments


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--api-key", "s3cr3t", "x"], ["--api-key", "<redacted>", "x"]),
        (["--api-key=s3cr3t"], ["--api-key=<redacted>"]),
        (["--hf_token", "--next", "y"], ["--hf_token", "--next", "y"]),
        (["--password=a=b"], ["--password=<redacted>"]),
        (["s3://user:s3cr3t@host/x"], ["s3://<redacted>@host/x"]),
        (["--url=https://me:s3cr3t@h/"], ["--url=https://<redacted>@h/"]),
        (["--lr", "0.1"], ["--lr", "0.1"]),
    ],
)
def test_secrets_in_arguments_are_redacted(argv, shown):
    assert redact_arguments(argv) == shown


def test_only_variables_that_shape_a_run_are_kept_and_their_secrets_are_not():
    environment = {
        "AWS_SECRET_ACCESS_KEY": "s",
        "HOME": "/h",
        "TRAINCKPT_TOKEN": "s",
        "CUDA_X": "1",
        "TRAINCKPT_STOP_AT": "auto",
        "TORCH_X": "http://a:s@h/",
        "TRAINCKPT_RESTART": "3",
    }
    assert launch.redact_environment(environment) == {
        "TRAINCKPT_TOKEN": "<redacted>",
        "CUDA_X": "1",
        "TRAINCKPT_STOP_AT": "auto",
        "TORCH_X": "http://<redacted>@h/",
    }


def test_nothing_secret_stands_in_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "train.py", "--wandb-api-key", "s3cr3t"])
    monkeypatch.setenv("TRAINCKPT_SECRET", "s3cr3t")
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    attempt(tmp_path)
    assert "s3cr3t" not in json.dumps(record(tmp_path, 1))
    for path in tmp_path.rglob("*.json"):
        assert b"s3cr3t" not in path.read_bytes()


def test_the_command_of_a_ray_worker_has_no_arguments_of_the_script(monkeypatch):
    monkeypatch.setattr("sys.argv", ["default_worker.py", "--node-manager-port=33447"])
    assert launch.script_arguments() == ["--node-manager-port=33447"]
    monkeypatch.setenv(launch.RAY_VARIABLE, "01000000")
    assert launch.script_arguments() == []


def test_a_recorded_command_can_be_run_again():
    facts = launch.describe(
        [("h", 1), ("h", 2)], {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
    )
    argv, kind, nproc = launch.recorded_command(json.loads(json.dumps(facts)))
    assert (argv, kind, nproc) == (facts["argv"], "torchrun", 2)


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"argv": ["python", "x", "--key", "<redacted>"], "launch": {"kind": "python", "nproc": 1}},
        {"argv": ["python", "x"], "launch": {"kind": "sh", "nproc": 1}},
        {"argv": ["python", "x"], "launch": {"kind": "python", "nproc": 0}},
        {"argv": "rm -rf", "launch": {}},
    ],
)
def test_a_command_that_cannot_is_refused(facts):
    with pytest.raises(ConfigurationError):
        launch.recorded_command(facts)

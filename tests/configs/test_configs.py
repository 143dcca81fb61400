"""Every file in `configs/` is one its scheduler takes, and its policy does right by our exit codes.

A real Slurm is given the scripts for it in tests/slurm. For Kubernetes the fields that the API
documents stand here, so that one that is misspelt, or in another place, is found.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainckpt.cli.main import parse
from trainckpt.errors import ConfigurationError, NothingToResume, UnusableSnapshot
from trainckpt.lifecycle.options import read_options
from trainckpt.supervisor.command import split_torchrun_options

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.rglob("*") if path.is_file())
KUBERNETES = sorted((CONFIGS / "kubernetes").iterdir())
AGAIN = read_options({}, {}).exit_code
IN_VAIN = {c.exit_code for c in (UnusableSnapshot, NothingToResume, ConfigurationError)}
CRASHES = (1, 69, 71, 137, 143)


def named(path: Path) -> str:
    return str(path.relative_to(CONFIGS))


def text_of(name: str) -> str:
    return (CONFIGS / name).read_text(encoding="utf-8")


def pairs(text: str) -> dict[str, str]:
    """`name = value` lines, as units and submit files have them; of a repeated name, the last."""
    found = re.findall(r"^(\w+) ?= ?(.*)$", text, re.MULTILINE)
    return dict(found)


@pytest.mark.parametrize("path", FILES, ids=named)
def test_each_begins_with_lines_on_what_it_does(path):
    lines = path.read_text(encoding="utf-8").removeprefix("#!/bin/bash\n").splitlines()
    assert all(re.match(r"# \S", line) for line in lines[:2])


# ---- the command, and how long it has


def commands() -> dict[str, list[str]]:
    """What follows `trainckpt` in each file."""
    found = {named(path): container(path)["command"][1:] for path in KUBERNETES}
    found["htcondor.sub"] = shlex.split(pairs(text_of("htcondor.sub"))["arguments"].strip('"'))[1:]
    for path in FILES:
        lines = path.read_text(encoding="utf-8").replace("\\\n", " ")
        line = re.search(r"^.*[ /]trainckpt (run .*)$", lines, re.MULTILINE)
        if named(path) not in found and line:
            found[named(path)] = shlex.split(re.sub(r"\$\{?\w+(:-\w+)?\}?", "1", line[1]))
    return found


def test_each_command_is_one_that_trainckpt_run_takes():
    found = commands()
    assert {named(path) for path in FILES} - found.keys() == {"trainckpt.toml"}
    for name, words in found.items():
        arguments = parse(words)
        _, script = split_torchrun_options(arguments.command)
        assert script[0] in ("train.py", "1", "$@"), name


def grace_s(variables: dict[str, str]) -> float:
    grace = read_options({}, variables).grace
    assert grace is not None
    return grace


@pytest.mark.parametrize("path", KUBERNETES, ids=named)
def test_a_pod_says_the_same_grace_to_kubernetes_and_to_us(path):
    variables = {entry["name"]: entry["value"] for entry in container(path)["env"]}
    assert grace_s(variables) < pod(path)["terminationGracePeriodSeconds"]


def test_a_service_and_a_condor_job_have_more_time_than_the_run_takes():
    unit = pairs(text_of("systemd/train.service"))
    name, value = unit["Environment"].strip('"').split("=")
    assert grace_s({name: value}) < int(unit["TimeoutStopSec"])
    submit = pairs(text_of("htcondor.sub"))
    assert grace_s(condor_variables(submit)) < int(submit["job_max_vacate_time"])


# ---- policies


def rule_for(rules: list[dict[str, Any]], code: int) -> str | None:
    """What a pod failure policy does about an exit code; None: it counts against the limit."""
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
    return None


@pytest.mark.parametrize("name", ["job.yaml", "kueue.yaml"])
def test_a_job_starts_again_uncounted_after_a_stop_and_fails_where_another_start_would(name):
    spec = yaml.safe_load(text_of(f"kubernetes/{name}"))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert rule_for(rules, AGAIN) == "Ignore"
    assert {rule_for(rules, code) for code in IN_VAIN} == {"FailJob"}
    assert {rule_for(rules, code) for code in CRASHES} == {None}
    assert {"action": "Ignore", "onPodConditions": DISRUPTED} in rules
    assert spec["backoffLimit"] > 0
    assert spec.get("suspend", False) == (name == "kueue.yaml")


def test_a_job_set_starts_again_as_a_whole_uncounted_after_a_stop_of_any_pod():
    spec = yaml.safe_load(text_of("kubernetes/jobset.yaml"))["spec"]
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert rule_for(rules, AGAIN) == "FailJob"  # its reason is then PodFailurePolicy
    assert {"action": "FailJob", "onPodConditions": DISRUPTED} in rules
    assert {rule_for(rules, code) for code in (*IN_VAIN, *CRASHES)} == {None}
    assert job["backoffLimit"] == 0  # BackoffLimitExceeded: counted by the set
    words = container(CONFIGS / "kubernetes/jobset.yaml")["command"]
    assert words[words.index("--nnodes") + 1] == str(job["parallelism"]) == str(job["completions"])


def test_sky_pilot_recovers_from_a_stop():
    recovery = yaml.safe_load(text_of("skypilot.yaml"))["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [AGAIN]


def test_condor_takes_a_stop_for_a_checkpoint_and_keeps_the_place():
    submit = pairs(text_of("htcondor.sub"))
    code = read_options({}, condor_variables(submit)).exit_code
    assert submit["checkpoint_exit_code"] == str(code)
    assert submit["transfer_checkpoint_files"] == "runs"
    held = {int(number) for number in re.findall(r"ExitCode == (\d+)", submit["on_exit_hold"])}
    assert held == IN_VAIN
    assert submit["kill_sig"] == "SIGTERM"
    assert text_of("htcondor.sub").endswith("\nqueue\n")


def condor_variables(submit: dict[str, str]) -> dict[str, str]:
    return dict(entry.split("=") for entry in shlex.split(submit["environment"].strip('"')))


def test_a_service_starts_again_after_a_stop_and_a_crash_but_not_in_vain():
    unit = pairs(text_of("systemd/train.service"))
    assert unit["RestartForceExitStatus"] == unit["SuccessExitStatus"] == str(AGAIN)
    assert {int(code) for code in unit["RestartPreventExitStatus"].split()} == IN_VAIN
    assert (unit["Restart"], unit["KillMode"]) == ("on-failure", "mixed")


def test_systemd_finds_nothing_wrong_with_the_service(tmp_path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze not installed (as root, `make test` installs it by apt)")
    command = str(Path(sys.executable).with_name("trainckpt"))
    text = text_of("systemd/train.service").replace("/srv/train/.venv/bin/trainckpt", command)
    unit = tmp_path / "train.service"
    unit.write_text(text)
    done = subprocess.run(
        [tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "train.service" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
    unit.write_text(text.replace("KillMode=mixed", "KillMode=gently"))
    done = subprocess.run(
        [tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert "kill mode" in done.stderr


# ---- Kubernetes: the documented fields, of those that there are


DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
TEXT, NUMBER, FLAG = str, int, bool
CONTAINER = {
    "name": TEXT, "image": TEXT, "command": [TEXT], "env": [{"name": TEXT, "value": TEXT}],
    "resources": {"requests": dict, "limits": dict},
    "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
}  # fmt: skip
POD = {
    "restartPolicy": TEXT, "terminationGracePeriodSeconds": NUMBER, "containers": [CONTAINER],
    "volumes": [
        {
            "name": TEXT, "persistentVolumeClaim": {"claimName": TEXT},
            "emptyDir": {"medium": TEXT, "sizeLimit": TEXT},
        }
    ],
}  # fmt: skip
RULE = {
    "action": TEXT, "onExitCodes": {"containerName": TEXT, "operator": TEXT, "values": [NUMBER]},
    "onPodConditions": [{"type": TEXT, "status": TEXT}],
}  # fmt: skip
JOB_SPEC = {
    "suspend": FLAG, "parallelism": NUMBER, "completions": NUMBER, "completionMode": TEXT,
    "backoffLimit": NUMBER, "podFailurePolicy": {"rules": [RULE]}, "template": {"spec": POD},
}  # fmt: skip
METADATA = {"name": TEXT, "labels": dict}
JOB = {"apiVersion": TEXT, "kind": TEXT, "metadata": METADATA, "spec": JOB_SPEC}
SET_RULE = {"name": TEXT, "action": TEXT, "onJobFailureReasons": [TEXT]}
JOB_SET = {
    **JOB,
    "spec": {
        "failurePolicy": {"maxRestarts": NUMBER, "rules": [SET_RULE]},
        "replicatedJobs": [{"name": TEXT, "replicas": NUMBER, "template": {"spec": JOB_SPEC}}],
    },
}


def wrong(value: Any, shape: Any, where: str = "") -> list[str]:
    """What there is in `value` that `shape` does not have."""
    if isinstance(shape, dict) and isinstance(value, dict):
        strange = [f"{where}.{key}" for key in value.keys() - shape.keys()]
        known = value.keys() & shape.keys()
        return strange + [w for k in known for w in wrong(value[k], shape[k], f"{where}.{k}")]
    if isinstance(shape, list) and isinstance(value, list):
        return [w for item in value for w in wrong(item, shape[0], f"{where}[]")]
    fits = isinstance(shape, type) and type(value) is shape
    return [] if fits else [f"{where}: {value!r}"]


def job_spec(path: Path) -> dict[str, Any]:
    spec = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    jobs = spec.get("replicatedJobs")
    return jobs[0]["template"]["spec"] if jobs else spec


def pod(path: Path) -> dict[str, Any]:
    return job_spec(path)["template"]["spec"]


def container(path: Path) -> dict[str, Any]:
    (only,) = pod(path)["containers"]
    return only


@pytest.mark.parametrize("path", KUBERNETES, ids=named)
def test_a_manifest_has_only_documented_fields_of_the_right_type(path):
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    kinds = {"Job": ("batch/v1", JOB), "JobSet": ("jobset.x-k8s.io/v1alpha2", JOB_SET)}
    version, shape = kinds[found["kind"]]
    assert found["apiVersion"] == version
    assert wrong(found, shape) == []
    assert wrong({**found, "sepc": 1}, shape) == [".sepc"]


@pytest.mark.parametrize("path", KUBERNETES, ids=named)
def test_a_pod_failure_policy_obeys_the_rules_of_its_api(path):
    spec = job_spec(path)
    assert pod(path)["restartPolicy"] == "Never"
    for rule in spec["podFailurePolicy"]["rules"]:
        assert rule["action"] in ("Ignore", "FailJob", "Count", "FailIndex")
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        if codes := rule.get("onExitCodes"):
            assert codes["containerName"] == container(path)["name"]
            assert codes["operator"] in ("In", "NotIn")
            assert codes["values"] == sorted(set(codes["values"]))
            assert 0 not in codes["values"]
    mounts = {mount["name"] for mount in container(path)["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod(path)["volumes"]}

"""Every file in `configs/` is one its scheduler takes, and its policy does right by our exit codes.

A real Slurm is given the scripts for it in tests/slurm, a real Kubernetes its Job in
tests/kubernetes. Here Jobs of Kubernetes are held against the schemas of its API, HTCondor itself
makes a job of the submit file (`condor_jobs.py`), and systemd looks at the unit. What stands around
the Job in a JobSet is written down here; SkyPilot's task is played in tests/preemption.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from trainckpt.attempt.options import read_options
from trainckpt.cli.main import parse
from trainckpt.errors import ConfigurationError, NothingToResume, UnusableSnapshot
from trainckpt.launcher.torchrun_command import split_torchrun_options

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
WATCHED_BY = ("prometheus", "grafana")  # their files launch nothing: tests/metrics
FILES = sorted(p for p in CONFIGS.rglob("*") if p.is_file() and p.parent.name not in WATCHED_BY)
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


def test_the_page_on_spot_machines_shows_sky_pilot_s_task_as_it_is():
    task = "".join(
        line
        for line in text_of("skypilot.yaml").splitlines(keepends=True)
        if not line.startswith("#")
    )
    page = (CONFIGS.parent / "docs" / "spot.md").read_text(encoding="utf-8")
    assert f"```yaml\n{task}```\n" in page


def test_condor_takes_a_stop_for_a_checkpoint_and_keeps_the_place():
    submit = pairs(text_of("htcondor.sub"))
    code = read_options({}, condor_variables(submit)).exit_code
    assert submit["checkpoint_exit_code"] == str(code)
    assert submit["transfer_checkpoint_files"] == "runs"
    held = {int(number) for number in re.findall(r"ExitCode == (\d+)", submit["on_exit_hold"])}
    assert held == IN_VAIN
    assert submit["kill_sig"] == "SIGTERM"
    assert text_of("htcondor.sub").endswith("\nqueue\n")


def condor_jobs(*texts: str) -> list[Any]:
    """The job that HTCondor makes of each submit file, or, as a text, why it makes none."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("condor_jobs.py"))],
        input=json.dumps(texts),
        env={**os.environ, "CONDOR_CONFIG": os.devnull},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_condor_makes_a_job_of_the_submit_file_in_which_every_line_counts():
    """A line that is misspelt is one that nothing is made of, or that is refused."""
    text = text_of("htcondor.sub")
    lines = [line for line in text.splitlines(keepends=True) if " = " in line and line[0] != "#"]
    less = [text.replace(line, "") for line in lines]
    misspelt = [text.replace("SIGTERM", "SIGTREM"), text.replace("== 78)", "== )")]
    job, bad_signal, bad_rule, *made = condor_jobs(text, *misspelt, *less)
    assert job["SuccessCheckpointExitCode"] == "85"
    assert (job["TransferCheckpoint"], job["WhenToTransferOutput"]) == ("runs", "ON_EXIT_OR_EVICT")
    assert (job["KillSig"], job["JobMaxVacateTime"]) == ("SIGTERM", "120")
    assert "invalid signal SIGTREM" in bad_signal
    assert "OnExitHold" in bad_rule
    unheeded = {line.strip() for line, other in zip(lines, made, strict=True) if other == job}
    assert unheeded == {"universe = vanilla", "should_transfer_files = YES"}  # the defaults


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


# ---- Kubernetes


DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]
NEWEST = int(kubernetes_validate.latest_version().split(".")[1])
API_VERSIONS = [f"1.{n}" for n in range(31, NEWEST + 1)]  # podFailurePolicy is stable from 1.31 on
TEXT, NUMBER = str, int
# Of a JobSet only what stands around its Job, which is looked at as one.
SET_RULE = {"name": TEXT, "action": TEXT, "onJobFailureReasons": [TEXT]}
JOB_SET = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT},
    "spec": {
        "failurePolicy": {"maxRestarts": NUMBER, "rules": [SET_RULE]},
        "replicatedJobs": [{"name": TEXT, "replicas": NUMBER, "template": {"spec": dict}}],
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


def refused_by_kubernetes(job: dict[str, Any]) -> set[str]:
    """What the schemas of its API say is wrong, in any version."""
    found = set()
    for version in API_VERSIONS:
        try:
            kubernetes_validate.validate(job, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.add(error.message)
    return found


@pytest.mark.parametrize("path", KUBERNETES, ids=named)
def test_the_schemas_of_kubernetes_take_each_job_and_refuse_what_is_misspelt(path):
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": job_spec(path)}
    assert found["kind"] == ("JobSet" if path.stem == "jobset" else "Job")
    assert refused_by_kubernetes(found if found["kind"] == "Job" else job) == set()
    rule = job["spec"]["podFailurePolicy"]["rules"][0]
    rule["onExitCode"] = rule.pop("onExitCodes")
    (message,) = refused_by_kubernetes(job)
    assert "'onExitCode' was unexpected" in message


def test_a_job_set_has_only_documented_fields_of_the_right_type():
    found = yaml.safe_load(text_of("kubernetes/jobset.yaml"))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert wrong(found, JOB_SET) == []
    assert wrong({**found, "sepc": 1}, JOB_SET) == [".sepc"]


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


def pasted() -> list[dict[str, Any]]:
    """The manifests in the docs."""
    page = (CONFIGS.parent / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [yaml.safe_load(block) for block in blocks]


def test_the_docs_have_a_claim_a_job_one_for_kueue_and_a_job_set():
    claim, job, queued, job_set = pasted()
    assert refused_by_kubernetes(claim) == refused_by_kubernetes(job) == set()
    assert refused_by_kubernetes(queued) == set()
    assert queued["metadata"]["labels"].keys() == {"kueue.x-k8s.io/queue-name"}
    assert queued["spec"].pop("suspend")
    (only,) = queued["spec"]["template"]["spec"]["containers"]
    del only["resources"]
    assert queued["spec"] == job["spec"]
    assert wrong(job_set, JOB_SET) == []
    (one,) = job_set["spec"]["replicatedJobs"]
    inner = {**one["template"], "apiVersion": "batch/v1", "kind": "Job", "metadata": {}}
    assert refused_by_kubernetes(inner) == set()


@pytest.mark.parametrize(("number", "name"), [(1, "job"), (2, "kueue"), (3, "jobset")])
def test_a_job_to_paste_from_the_docs_has_the_policy_of_the_whole_one(number, name):
    body = pasted()[number]
    whole = yaml.safe_load(text_of(f"kubernetes/{name}.yaml"))["spec"]
    spec = body["spec"]
    assert spec.get("failurePolicy") == whole.get("failurePolicy")
    if body["kind"] == "JobSet":
        (spec,), (whole,) = (
            [each["template"]["spec"] for each in one["replicatedJobs"]] for one in (spec, whole)
        )
    for field in ("podFailurePolicy", "backoffLimit", "parallelism", "completions"):
        assert spec.get(field) == whole.get(field)
    (container,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert grace_s(variables) < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    parse(container["command"][1:])

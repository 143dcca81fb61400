"""The manifests of `configs/kubernetes`, made to train one run of the example on this machine.

What is changed: the script and its arguments, the number of ranks, and what a test is about. A
claim is bound to a folder of this machine, which every pod sees as /runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.daemons import wait_for
from tests.start_commands.pace import SLOW
from trainckpt.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kubernetes.cluster import Cluster
    from tests.start_commands.started import Run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests" / "kubernetes" / "job.py")
LIMIT_S = 240.0  # for anything Kubernetes or a pod does
MOUNT = "/runs"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / "kubernetes" / name).read_text(encoding="utf-8"))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod_of(job)["containers"]
    return only


def run_without_supervisor(job: dict[str, Any]) -> None:
    """The script itself is process 1."""
    command = container_of(job)["command"]
    container_of(job)["command"] = ["python", *command[command.index("--") + 1 :]]


def set_variable(job: dict[str, Any], name: str, value: str) -> None:
    others = [entry for entry in container_of(job).get("env", []) if entry["name"] != name]
    container_of(job)["env"] = [*others, {"name": name, "value": value}]


def train(job: dict[str, Any], run: Run, pods: int = 1, claim: str = "runs") -> None:
    """Have the containers train `run`, with their manifest's own launcher."""
    for volume in pod_of(job)["volumes"]:
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = claim
    command = container_of(job)["command"]
    launcher = command[: command.index("--") + 1]
    launcher[launcher.index("--nproc") + 1] = str(run.ranks // pods)
    arguments = [word.replace(str(run.folder), MOUNT) for word in run.argv]
    container_of(job)["command"] = [*launcher, SCRIPT, *arguments]


def save_each_step(job: dict[str, Any]) -> None:
    words = container_of(job)["command"]
    words[words.index("--save-every") + 1] = "1"


def urgent_pod(priority: str) -> dict[str, Any]:
    """One that wants all GPUs of a node, by a PriorityClass of its own name."""
    container = {
        "name": "urgent",
        "image": "x",
        "command": ["true"],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
    spec = {"restartPolicy": "Never", "priorityClassName": priority, "containers": [container]}
    return {"metadata": {"name": priority}, "spec": spec}


def pause(run: Run) -> None:
    """`trainckpt pause`, from a machine that sees the run's folder."""
    assert main(["pause", run.place]) == 0


def last_committed_step(run: Run, attempt: int) -> int:
    """Of the snapshots that this attempt took between steps; 0: it has committed none."""
    found = Path(run.place).glob(f"snapshots/s*~{attempt}.*/manifest.json")
    names = [file.parent.name.partition("~")[0][1:] for file in found]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def resumed_from(run: Run, attempt: int) -> dict[str, int] | None:
    """Where an attempt went on, by its trace; None: it has not begun."""
    file = run.folder / "trace" / "attempts.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        if json.loads(line)["attempt"] == attempt:
            return json.loads(line)["resumed_from"]
    return None


def assert_repeated_exactly(run: Run, straight: Run) -> None:
    """What was trained twice was trained alike, and the end is the same to the bit."""
    for rank in range(run.ranks):
        lines, wanted = (set(each.trace(rank).splitlines()) for each in (run, straight))
        assert lines == wanted
        final = f"trace/final{rank}.json"
        assert (run.folder / final).read_bytes() == (straight.folder / final).read_bytes()


def bind_claim(cluster: Cluster, namespace: str, folder: Path, name: str) -> None:
    """A claim whose volume is a folder of this machine."""
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    volume = f"{name}-{namespace}"
    spec = {"capacity": size, "accessModes": modes, "hostPath": {"path": str(folder)}}
    cluster.api.create("persistentvolumes", {"metadata": {"name": volume}, "spec": spec})
    claim = {
        "accessModes": modes,
        "resources": {"requests": size},
        "volumeName": volume,
        "storageClassName": "",
    }
    body = {"metadata": {"name": name}, "spec": claim}
    cluster.api.create("persistentvolumeclaims", body, namespace)


def submitted(
    cluster: Cluster, namespace: str, run: Run, change: Callable[[Any], None]
) -> Training:
    """Submit `job.yaml` for `run` to the real Job controller, as `change` wants it."""
    training = Training(cluster, namespace, run)
    job = manifest("job.yaml")
    train(job, run)
    change(job)
    cluster.api.create("jobs", job, namespace)
    return training


class Training:
    """One run in one namespace, and the pods that train it.

    Attributes:
        claim: The name of the claim on its folder.
    """

    def __init__(self, cluster: Cluster, namespace: str, run: Run, claim: str = "runs") -> None:
        self.cluster, self.namespace, self.run, self.claim = cluster, namespace, run, claim
        (run.folder / SLOW).touch()
        bind_claim(cluster, namespace, run.folder, claim)

    def pods(self) -> list[dict[str, Any]]:
        return self.cluster.api.list("pods", self.namespace)

    def running(self) -> str:
        """The one pod that runs and is not being deleted."""
        names = [
            pod["metadata"]["name"]
            for pod in self.pods()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        assert len(names) == 1, self.said()
        return names[0]

    def ended(self, pod: str) -> dict[str, Any]:
        """How its container ended, also if the pod is gone; {} while it runs."""
        status = self.cluster.statuses(self.namespace).get(pod)
        return status["containerStatuses"][0]["state"].get("terminated", {}) if status else {}

    def until_trained(self, more: int) -> None:
        wanted = self.run.trained() + more
        wait_for(lambda: self.run.trained() >= wanted, LIMIT_S, self.said)

    def until_committed(self) -> None:
        """Until the first attempt has committed a step."""
        wait_for(lambda: last_committed_step(self.run, 1) > 0, LIMIT_S, self.said)

    def until_ended(self, pod: str) -> dict[str, Any]:
        wait_for(lambda: self.ended(pod), LIMIT_S, self.said)
        return self.ended(pod)

    def until_stopped(self, pod: str, attempt: int) -> None:
        """Saved, 75, and the pod's status says so; from then on the run is as fast as it can."""
        ended = self.until_ended(pod)
        (self.run.folder / SLOW).unlink(missing_ok=True)
        assert ended["exitCode"] == 75, self.said()
        self.run.assert_stopped(attempt)
        message = json.loads(ended["message"])
        outcome = self.run.record(attempt).outcome
        assert message["snapshot"] == outcome["snapshot"]

    def status(self, job: str = "train") -> dict[str, Any]:
        """What the real Job controller says of it."""
        return self.cluster.api.get("jobs", job, self.namespace)["status"]

    def until_over(self, job: str = "train") -> list[tuple[str, str]]:
        """Its conditions and their reasons, once it has one: complete or failed."""
        wait_for(lambda: self.status(job).get("conditions"), LIMIT_S, self.said)
        return [(each["type"], each.get("reason", "")) for each in self.status(job)["conditions"]]

    def until_complete(self, job: str = "train") -> None:
        assert self.until_over(job) == [("Complete", "")], self.said()

    def said(self) -> str:
        pods = [
            (p["metadata"]["name"], p["spec"].get("nodeName"), p["status"]) for p in self.pods()
        ]
        return f"{json.dumps(pods, indent=1)}\n{self.cluster.logs(self.namespace)}"

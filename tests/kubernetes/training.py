"""The manifests of `configs/kubernetes`, made to train one run of the example on this machine.

What is changed: the script and its arguments, the number of ranks, and what a test is about. The
claim `runs` is bound to a folder of this machine, which every pod sees as /runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.slurm.cluster import wait_for
from tests.start_commands.pace import SLOW
from trainckpt.cli.main import main

if TYPE_CHECKING:
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


def set_variable(job: dict[str, Any], name: str, value: str) -> None:
    others = [entry for entry in container_of(job)["env"] if entry["name"] != name]
    container_of(job)["env"] = [*others, {"name": name, "value": value}]


def train(job: dict[str, Any], run: Run, pods: int = 1) -> None:
    """Have the containers train `run`, with their manifest's own launcher."""
    command = container_of(job)["command"]
    launcher = command[: command.index("--") + 1]
    launcher[launcher.index("--nproc") + 1] = str(run.ranks // pods)
    arguments = [word.replace(str(run.folder), MOUNT) for word in run.argv]
    container_of(job)["command"] = [*launcher, SCRIPT, *arguments]


def save_each_step(job: dict[str, Any]) -> None:
    words = container_of(job)["command"]
    words[words.index("--save-every") + 1] = "1"


def pause(run: Run) -> None:
    """`trainckpt pause`, from a machine that sees the run's folder."""
    assert main(["pause", run.place]) == 0


def committed(run: Run) -> bool:
    return any(Path(run.place).glob("snapshots/*/manifest.json"))


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


def bind_claim(cluster: Cluster, namespace: str, folder: Path) -> None:
    """A claim `runs` whose volume is a folder of this machine."""
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    volume = f"runs-{namespace}"
    spec = {"capacity": size, "accessModes": modes, "hostPath": {"path": str(folder)}}
    cluster.api.create("persistentvolumes", {"metadata": {"name": volume}, "spec": spec})
    claim = {
        "accessModes": modes,
        "resources": {"requests": size},
        "volumeName": volume,
        "storageClassName": "",
    }
    body = {"metadata": {"name": "runs"}, "spec": claim}
    cluster.api.create("persistentvolumeclaims", body, namespace)


class Training:
    """One run in one namespace, and the pods that train it."""

    def __init__(self, cluster: Cluster, namespace: str, run: Run) -> None:
        self.cluster, self.namespace, self.run = cluster, namespace, run
        (run.folder / SLOW).touch()
        bind_claim(cluster, namespace, run.folder)

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

    def until_complete(self, job: str = "train") -> None:
        def conditions() -> dict[str, str]:
            status = self.cluster.api.get("jobs", job, self.namespace)["status"]
            return {each["type"]: each["status"] for each in status.get("conditions", [])}

        wait_for(conditions, LIMIT_S, self.said)
        assert conditions() == {"Complete": "True"}, self.said()

    def said(self) -> str:
        pods = [
            (p["metadata"]["name"], p["spec"].get("nodeName"), p["status"]) for p in self.pods()
        ]
        return f"{json.dumps(pods, indent=1)}\n{self.cluster.logs(self.namespace)}"

"""Controllers of ours for JobSet, TrainJob and a queue of Kueue's, by their published rules.

The objects are those of `custom_resources.py` at the real API server: a person or a queue changes
`spec.suspend` there, and reads `status.conditions`. The Jobs of a set are `job_controller.Job`s.

    JobSet      each step: a failed Job asks the failure policy, by the reason of its failure; all
                complete is Completed; else missing Jobs are made, and all get the set's `suspend`
    restart     the Jobs are made anew once all old pods have ended. `restarts` counts each,
                `restartsCountTowardsMax` those that no rule ignores
    TrainJob    makes the JobSet of its runtime, hands on `suspend`, and takes over how it ended
    Queue       admits by priority while there are GPUs, by `suspend: false`. Whoever is preempted
                is suspended, and its GPUs are free once its pods have ended

A set that is suspended stays a set to which its failure policy applies: where a rule fails the Job
on exit code 75, the suspension ends in a restart, and its Jobs are made suspended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tests.kubernetes.job_controller import COMPLETE, Job

if TYPE_CHECKING:
    from tests.kubernetes.api_client import Api

IGNORED = "RestartJobSetAndIgnoreMaxRestarts"
STAY = "FailJobSet"
ENDS = ("Completed", "Complete", "Failed")


class Resource:
    """One custom resource of the server.

    Attributes:
        api: Where it is.
        namespace: The same.
        name: The same.
    """

    KIND = ""

    def __init__(self, api: Api, namespace: str, manifest: dict[str, Any]) -> None:
        self.api, self.namespace, self.name = api, namespace, manifest["metadata"]["name"]
        api.create(self.KIND, manifest, namespace)

    def read(self) -> dict[str, Any]:
        return self.api.get(self.KIND, self.name, self.namespace)

    def suspend(self, wanted: bool = True) -> None:
        """What `kubectl patch` does."""
        body = {"spec": {"suspend": wanted}}
        self.api.patch(self.KIND, self.name, body, self.namespace, how="merge")

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Of each type its status and reason."""
        found = self.read().get("status", {}).get("conditions", [])
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    @property
    def ended(self) -> str:
        """The type of its last condition, or ""."""
        return next((name for name in ENDS if name in self.conditions()), "")

    def set_condition(self, name: str, status: str, reason: str) -> None:
        known = self.conditions()
        if known.get(name) != (status, reason):
            known[name] = (status, reason)
            listed = [{"type": n, "status": s, "reason": r} for n, (s, r) in known.items()]
            self.set_status({"conditions": listed})

    def set_status(self, status: dict[str, Any]) -> None:
        body, name = {"status": status}, f"{self.name}/status"
        self.api.patch(self.KIND, name, body, self.namespace, how="merge")

    def record_suspension(self, wanted: bool, reasons: tuple[str, str]) -> None:
        """Have `status` say so; one that never was suspended has no such condition."""
        if wanted or "Suspended" in self.conditions():
            self.set_condition("Suspended", str(wanted), reasons[not wanted])


class JobSet(Resource):
    """A JobSet; `step` does what is to be done now."""

    KIND = "jobsets"

    def __init__(self, api: Api, namespace: str, manifest: dict[str, Any]) -> None:
        super().__init__(api, namespace, manifest)
        self._jobs: list[Job] = []

    def step(self) -> None:
        if self.ended:
            return
        for job in self._jobs:
            job.step()
        spec = self.read()["spec"]
        failed = [job.ended for job in self._jobs if job.ended not in ("", COMPLETE)]
        if failed:
            self._restart_or_fail(spec.get("failurePolicy", {}), failed[0])
        elif self._jobs and all(job.ended for job in self._jobs):
            self.set_condition("Completed", "True", "AllJobsCompleted")
        else:
            self._jobs = self._jobs or self._make_jobs(spec)
            wanted = spec.get("suspend", False)
            for job in self._jobs:
                job.suspend(wanted)
            self.record_suspension(wanted, ("SuspendedJobs", "ResumeJobs"))

    def pods(self) -> list[dict[str, Any]]:
        return [pod for job in self._jobs for pod in job.pods()]

    def restarts(self) -> tuple[int, int]:
        """All, and those that count."""
        status = self.read().get("status", {})
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    def _restart_or_fail(self, policy: dict[str, Any], reason: str) -> None:
        rules = [
            rule["action"]
            for rule in policy.get("rules", [])
            if reason in rule.get("onJobFailureReasons", [reason])
        ]
        action = rules[0] if rules else "RestartJobSet"
        restarts, counted = self.restarts()
        if action != IGNORED and counted >= policy.get("maxRestarts", 0):
            self.set_condition("Failed", "True", "ReachedMaxRestarts")
        elif action == STAY:
            self.set_condition("Failed", "True", "FailJobSetFailurePolicyAction")
        elif any(job.pods() for job in self._jobs):
            for job in self._jobs:  # the others' pods end too
                job.suspend()
        else:
            self._jobs = []
            counted += action != IGNORED
            self.set_status({"restarts": restarts + 1, "restartsCountTowardsMax": counted})

    def _make_jobs(self, spec: dict[str, Any]) -> list[Job]:
        restarts, _ = self.restarts()
        made = []
        for each in spec["replicatedJobs"]:
            for index in range(each.get("replicas", 1)):
                name = f"{self.name}-{each['name']}-{index}"
                job = Job(self.api, self.namespace, each["template"], name, subdomain=self.name)
                job.pods_made = 100 * restarts  # their names; the old ones may still be there
                job.suspend(spec.get("suspend", False))
                made.append(job)
        return made


class TrainJob(Resource):
    """A TrainJob of a namespaced TrainingRuntime, whose trainer's container is the only one."""

    KIND = "trainjobs"

    def __init__(self, api: Api, namespace: str, manifest: dict[str, Any]) -> None:
        super().__init__(api, namespace, manifest)
        self.set: JobSet | None = None

    def step(self) -> None:
        if self.ended:
            return
        spec = self.read()["spec"]
        wanted = spec["suspend"]
        if self.set is None:
            self.set = JobSet(self.api, self.namespace, self._job_set(spec))
        elif self.set.read()["spec"].get("suspend", False) != wanted:
            self.set.suspend(wanted)
        self.set.step()
        self.record_suspension(wanted, ("Suspended", "Resumed"))
        ends = {"Completed": "Complete", "Failed": "Failed"}
        for theirs, (_, reason) in self.set.conditions().items():
            if theirs in ends:
                self.set_condition(ends[theirs], "True", reason)

    def pods(self) -> list[dict[str, Any]]:
        return [] if self.set is None else self.set.pods()

    def _job_set(self, spec: dict[str, Any]) -> dict[str, Any]:
        runtime = self.api.get("trainingruntimes", spec["runtimeRef"]["name"], self.namespace)
        template = runtime["spec"]["template"]["spec"]
        trainer = spec.get("trainer", {})
        for each in template["replicatedJobs"]:
            (container,) = each["template"]["spec"]["template"]["spec"]["containers"]
            container.update({key: trainer[key] for key in ("command", "image") if key in trainer})
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {**template, "suspend": spec["suspend"]},
        }


class Suspendable(Protocol):
    def suspend(self, wanted: bool = True) -> None: ...
    def pods(self) -> list[dict[str, Any]]: ...
    def step(self) -> None: ...

    @property
    def ended(self) -> str: ...


class Queue:
    """A ClusterQueue with `withinClusterQueue: LowerPriority`, and so many GPUs."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._wanted: dict[Suspendable, tuple[int, int]] = {}  # priority, GPUs
        self._admitted: set[Suspendable] = set()

    def submit(self, job: Suspendable, *, priority: int, gpus: int) -> None:
        """Kueue's webhook suspends what comes with the label of a queue."""
        job.suspend()
        self._wanted[job] = priority, gpus

    def step(self) -> None:
        for job in self._wanted:
            job.step()
        waiting = [job for job in self._wanted if job not in self._admitted and not job.ended]
        for job in sorted(waiting, key=lambda job: -self._wanted[job][0]):
            priority, gpus = self._wanted[job]
            if gpus <= self._free():
                job.suspend(False)
                self._admitted.add(job)
                continue
            lower = [j for j in self._admitted if self._wanted[j][0] < priority and not j.ended]
            for victim in lower:
                victim.suspend()
                self._admitted.remove(victim)
            break  # whoever waits behind it does not take what is freed for it

    def _free(self) -> int:
        holding = [j for j in self._wanted if not j.ended and (j in self._admitted or j.pods())]
        return self._gpus - sum(self._wanted[job][1] for job in holding)

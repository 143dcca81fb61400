"""A Job controller of ours, by the published rules of Kubernetes 1.31.

The Job controller of the real server here, 1.20, knows neither `suspend` nor `podFailurePolicy`.
This one makes its pods at that server and deletes them there; its scheduler places them. It keeps:

    suspend             active pods are deleted, with their own grace; none is made until it ends
    podFailurePolicy    the first rule that fits a failed pod decides: Ignore, FailJob or Count. So
                        it does for a pod that a suspension ended
    podReplacementPolicy Failed, the only one with rules: a new pod once the old one has ended
    backoffLimit        of counted failures; without the growing delay
    completionMode      Indexed: each pod has an index, and a host name with it
    finalizer           on each pod, so that none is gone before it was counted
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kubernetes.api_client import Api

FINALIZER = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
ENDED = ("Succeeded", "Failed")
COMPLETE, BY_RULE, TOO_MANY = "Complete", "PodFailurePolicy", "BackoffLimitExceeded"


class Job:
    """One Job; `step` does what is to be done now.

    Args:
        subdomain: Of its pods' host names.

    Attributes:
        suspended: As `spec.suspend`.
        failed: Pods that failed and were counted.
        ended: "", `COMPLETE`, or the reason why the Job failed.
        pods_made: How many so far.
    """

    def __init__(
        self, api: Api, namespace: str, manifest: dict[str, Any], name: str, *, subdomain: str = ""
    ) -> None:
        self._api, self._namespace, self._name = api, namespace, name
        self._spec, self._subdomain = manifest["spec"], subdomain
        self.suspended = self._spec.get("suspend", False)
        self.failed = self.pods_made = 0
        self._succeeded: set[int] = set()  # indices
        self.ended = ""

    def suspend(self, wanted: bool = True) -> None:
        """What `kubectl patch` does."""
        self.suspended = wanted

    def step(self) -> None:
        for pod in self.pods():
            if pod["status"]["phase"] in ENDED:
                self._count(pod)
        active = self.pods()
        if self.suspended or self.ended:
            for pod in active:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._api.delete("pods", pod["metadata"]["name"], self._namespace)
            return
        taken = self._succeeded | {index_of(pod) for pod in active}
        free = [index for index in range(self._spec.get("completions", 1)) if index not in taken]
        for index in free[: self._spec.get("parallelism", 1) - len(active)]:
            self._make_pod(index)

    def pods(self) -> list[dict[str, Any]]:
        """Those that have not been counted, also if they are being deleted."""
        return self._api.list("pods", self._namespace, labelSelector=f"job-name={self._name}")

    def _count(self, pod: dict[str, Any]) -> None:
        action = ""
        if pod["status"]["phase"] == "Succeeded":
            self._succeeded.add(index_of(pod))
        else:
            action = action_for(self._spec.get("podFailurePolicy", {}).get("rules", []), pod)
            self.failed += action == "Count"
        if not self.ended:
            if action == "FailJob":
                self.ended = BY_RULE
            elif self.failed > self._spec["backoffLimit"]:
                self.ended = TOO_MANY
            elif len(self._succeeded) == self._spec.get("completions", 1):
                self.ended = COMPLETE
        name = pod["metadata"]["name"]
        gone = {"metadata": {"finalizers": None, "labels": {"job-name": None}}}
        self._api.patch("pods", name, gone, self._namespace, how="merge")

    def _make_pod(self, index: int) -> None:
        self.pods_made += 1
        metadata = {
            "name": f"{self._name}-{self.pods_made}",
            "labels": {"job-name": self._name},
            "annotations": {INDEX: str(index)},
            "finalizers": [FINALIZER],
        }
        spec = self._spec["template"]["spec"]
        if self._spec.get("completionMode") == "Indexed":
            spec = {**spec, "hostname": f"{self._name}-{index}", "subdomain": self._subdomain}
        self._api.create("pods", {"metadata": metadata, "spec": spec}, self._namespace)


def index_of(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def action_for(rules: list[dict[str, Any]], pod: dict[str, Any]) -> str:
    """What a pod failure policy does about a failed pod."""
    for rule in rules:
        if fits_code(rule.get("onExitCodes"), pod) or fits_condition(rule, pod):
            return rule["action"]
    return "Count"


def fits_code(codes: dict[str, Any] | None, pod: dict[str, Any]) -> bool:
    for container in pod["status"]["containerStatuses"] if codes else ():
        code = container["state"]["terminated"]["exitCode"]
        named = codes.get("containerName") in (None, container["name"])
        if code and named and (code in codes["values"]) == (codes["operator"] == "In"):
            return True
    return False


def fits_condition(rule: dict[str, Any], pod: dict[str, Any]) -> bool:
    have = {(each["type"], each["status"]) for each in pod["status"]["conditions"]}
    wanted = {(each["type"], each["status"]) for each in rule.get("onPodConditions", [])}
    return bool(have & wanted)


def disrupt(api: Api, pod: str, namespace: str) -> None:
    """Evict a pod, with the condition that a newer server's eviction gives it."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    api.patch("pods", f"{pod}/status", {"status": {"conditions": [condition]}}, namespace)
    api.evict(pod, namespace)

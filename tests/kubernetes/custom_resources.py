"""JobSet and TrainJob as types of the real API server, by what their published CRDs say.

Written down here is what a suspension goes through: the names, the fields of `spec` that the
manifests of `configs/kubernetes` and the tests set, the conditions of `status`. A Job's and a
runtime's template is any object: `tests/configs` holds those against Kubernetes' own schemas. The
server checks types and choices, and drops fields that are not named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.kubernetes.api_client import ApiError

if TYPE_CHECKING:
    from tests.kubernetes.api_client import Api

TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
ANY = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
ACTIONS = ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
JOB_FAILURES = [
    *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
    *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
]


def fields(*, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    more = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **more}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def choice(*words: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(words)}


CONDITIONS = several(
    fields(
        required=("type", "status", "reason"),
        type=TEXT,
        status=choice("True", "False", "Unknown"),
        reason=TEXT,
        message=TEXT,
    )
)
JOB_SET = fields(
    suspend=FLAG,
    failurePolicy=fields(
        maxRestarts=NUMBER,
        rules=several(
            fields(
                required=("name", "action"),
                name=TEXT,
                action=choice(*ACTIONS),
                onJobFailureReasons=several(choice(*JOB_FAILURES)),
                targetReplicatedJobs=several(TEXT),
            )
        ),
    ),
    replicatedJobs=several(
        fields(required=("name", "template"), name=TEXT, replicas=NUMBER, template=ANY)
    ),
)
TRAIN_JOB = fields(
    required=("runtimeRef",),
    suspend={**FLAG, "default": False},
    runtimeRef=fields(
        required=("name",),
        name=TEXT,
        kind={**TEXT, "default": "ClusterTrainingRuntime"},
        apiGroup={**TEXT, "default": "trainer.kubeflow.org"},
    ),
    trainer=fields(
        image=TEXT,
        command=several(TEXT),
        args=several(TEXT),
        numNodes=NUMBER,
        env=several(fields(required=("name",), name=TEXT, value=TEXT)),
    ),
)
STATUS = fields(conditions=CONDITIONS, restarts=NUMBER, restartsCountTowardsMax=NUMBER)
KINDS = {
    ("jobset.x-k8s.io", "v1alpha2", "JobSet"): JOB_SET,
    ("trainer.kubeflow.org", "v1alpha1", "TrainJob"): TRAIN_JOB,
    ("trainer.kubeflow.org", "v1alpha1", "TrainingRuntime"): fields(template=fields(spec=JOB_SET)),
}


def define(api: Api) -> None:
    """Have the server know these types."""
    for (group, version, kind), spec in KINDS.items():
        singular = kind.lower()
        schema = fields(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=spec)
        schema["properties"]["status"] = STATUS
        body = {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{singular}s.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"plural": f"{singular}s", "singular": singular, "kind": kind},
                "versions": [
                    {
                        "name": version,
                        "served": True,
                        "storage": True,
                        "schema": {"openAPIV3Schema": schema},
                        "subresources": {"status": {}},
                    }
                ],
            },
        }
        api.create("customresourcedefinitions", body)


def defined(api: Api) -> bool:
    """Return True once the server takes objects of each type."""
    try:
        for _, _, kind in KINDS:
            api.list(f"{kind.lower()}s", "default")
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True

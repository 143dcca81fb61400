"""The API server over HTTPS: JSON objects by their paths, with a token. Standard library only."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_S = 60.0
PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
}
GROUPS = {
    "customresourcedefinitions": "/apis/apiextensions.k8s.io/v1",
    "jobs": "/apis/batch/v1",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2",
    "leases": "/apis/coordination.k8s.io/v1",
    "priorityclasses": "/apis/scheduling.k8s.io/v1",
    "trainingruntimes": "/apis/trainer.kubeflow.org/v1alpha1",
    "trainjobs": "/apis/trainer.kubeflow.org/v1alpha1",
}


class ApiError(Exception):
    """The server refused a request; `status` is HTTP's."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


class Api:
    """One API server."""

    def __init__(self, port: int, certificate: Path, token: str) -> None:
        self.port, self._token = port, token
        self._context = ssl.create_default_context(cafile=str(certificate))

    def ask(
        self, method: str, path: str, body: Any = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """One request; its answer.

        Raises:
            ApiError: it was refused.
            OSError: there was no answer.
        """
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=TIMEOUT_S, context=self._context
        )
        try:
            headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, headers)
            answer = connection.getresponse()
            said = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise ApiError(answer.status, said)
        return json.loads(said) if said.startswith("{") else {"text": said}

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any]:
        return self.ask("GET", path_of(kind, namespace, name))

    def list(self, kind: str, namespace: str = "", **selectors: str) -> list[dict[str, Any]]:
        return self.ask("GET", f"{path_of(kind, namespace)}?{urlencode(selectors)}")["items"]

    def create(self, kind: str, body: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        return self.ask("POST", path_of(kind, namespace), body)

    def patch(
        self, kind: str, name: str, body: Any, namespace: str = "", *, how: str = "strategic"
    ) -> dict[str, Any]:
        """`name` may have a subresource, as in `n1/status`."""
        return self.ask("PATCH", path_of(kind, namespace, name), body, PATCHES[how])

    def delete(self, kind: str, name: str, namespace: str = "", **options: Any) -> None:
        """It may be gone already, or be another one of that name than `preconditions` say."""
        try:
            self.ask("DELETE", path_of(kind, namespace, name), options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def evict(self, pod: str, namespace: str) -> None:
        """What `kubectl drain` asks for each pod."""
        metadata = {"name": pod, "namespace": namespace}
        body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": metadata}
        self.ask("POST", path_of("pods", namespace, f"{pod}/eviction"), body)


def path_of(kind: str, namespace: str, name: str = "") -> str:
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{GROUPS.get(kind, '/api/v1')}{scope}/{kind}" + (f"/{name}" if name else "")

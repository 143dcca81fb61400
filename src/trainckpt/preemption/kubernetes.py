"""Kubernetes: a pod's grace period after SIGTERM, and a termination message for its status.

The kubelet sends SIGTERM to process 1 of each container when the pod is deleted, drained, evicted,
preempted, or its Job suspended, and SIGKILL after `terminationGracePeriodSeconds`. No variable
tells a container that number, so its manifest has to state it twice: once to Kubernetes and once as
TRAINCKPT_GRACE. Without that, Kubernetes' own default applies, minus the time of a preStop hook.

`kubectl get pod -o yaml` shows the termination log as the container's `state.terminated.message`,
even with the run directory out of reach.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_VARIABLE = "KUBERNETES_SERVICE_HOST"  # in every container, unless its pod refuses
DEFAULT_GRACE_S = 30.0
TERMINATION_LOG = Path("/dev/termination-log")
MAX_BYTES = 4096  # of all containers together, Kubernetes keeps 12 KiB


def in_pod(environment: Mapping[str, str]) -> bool:
    """Return True if Kubernetes started this container."""
    return bool(environment.get(SERVICE_VARIABLE))


def granted_s(environment: Mapping[str, str]) -> float | None:
    """Return a pod's default grace period after SIGTERM, in seconds; None outside a pod."""
    return DEFAULT_GRACE_S if in_pod(environment) else None


def last_word(
    environment: Mapping[str, str], outcome: Mapping[str, Any], log: Path = TERMINATION_LOG
) -> None:
    """Leave how the attempt ended in the pod's status. Nothing happens elsewhere."""
    if not in_pod(environment):
        return
    text = json.dumps(dict(outcome))[:MAX_BYTES]
    with contextlib.suppress(OSError):
        if log.is_file():  # the kubelet has made it
            log.write_text(text, encoding="utf-8")

"""Kubernetes: how long a pod's processes have after SIGTERM, and a last word for its status.

The kubelet sends SIGTERM to process 1 of each container when the pod is deleted, drained, evicted,
preempted, or its Job suspended, and SIGKILL when `terminationGracePeriodSeconds` are over. No
variable tells a container that number, so its manifest has to say it twice: once to Kubernetes and
once as TRAINCKPT_GRACE. Without that, Kubernetes' own default is taken, from which a preStop hook
takes its part.

What is written to the termination log is shown by `kubectl get pod -o yaml` as the container's
`state.terminated.message`, also when the run's place is out of reach.

Floor 1. Uses: nothing of ours. Used by: lifecycle.
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
    """Whether Kubernetes started this container."""
    return bool(environment.get(SERVICE_VARIABLE))


def granted_s(environment: Mapping[str, str]) -> float | None:
    """What a pod gets after SIGTERM where nobody said more; None: this is no pod."""
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

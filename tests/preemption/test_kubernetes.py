"""In a pod: the time after SIGTERM, and the last word in its status."""

from __future__ import annotations

import json

from trainckpt.preemption.kubernetes import last_word
from trainckpt.stop.deadline import granted_s

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def test_a_pod_grants_what_kubernetes_does_where_nobody_said_more():
    assert granted_s({}) is None
    assert granted_s(POD) == 30.0
    assert granted_s({**POD, "TRAINCKPT_SUPERVISOR": "/x"}) == 30.0


def test_the_shorter_of_the_launchers_patience_and_the_pods_counts():
    torchrun = {"TORCHELASTIC_RUN_ID": "x"}
    assert granted_s({**torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}) == 600.0
    assert granted_s({**POD, **torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}) == 30.0
    assert granted_s({**POD, **torchrun, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}) == 20.0


def test_the_outcome_is_left_where_the_kubelet_looks_and_nowhere_else(tmp_path):
    log = tmp_path / "termination-log"
    last_word(POD, {"outcome": "stopped"}, log)
    assert not log.exists()
    log.touch()
    last_word({}, {"outcome": "stopped"}, log)
    assert log.read_text() == ""
    last_word(POD, {"outcome": "stopped", "exit_code": 75}, log)
    assert json.loads(log.read_text()) == {"outcome": "stopped", "exit_code": 75}
    last_word(POD, {"reason": "x" * 10000}, log)
    assert len(log.read_text()) == 4096

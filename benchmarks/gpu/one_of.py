"""pytest plugin: run every n-th test, and write the outcome of each to a JSON file.

The environment has the plan: {"at": 0, "number": 4, "result": FILE}. The file is rewritten after
each test, so that a process that is killed leaves those before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import write_json

PLAN = "TRAINCKPT_GPU_TESTS"

_plan = json.loads(os.environ.get(PLAN, '{"at": 0, "number": 1, "result": ""}'))
_outcomes: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keep this process's share of the tests."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    share = marked[_plan["at"] :: _plan["number"]]
    config.hook.pytest_deselected(items=[item for item in items if item not in share])
    items[:] = share


def pytest_runtest_logreport(report: Any) -> None:
    """Note what became of a test: the worst of its phases, and their time."""
    found = _outcomes.setdefault(
        report.nodeid, {"test": report.nodeid, "outcome": "passed", "seconds": 0.0, "why": ""}
    )
    found["seconds"] = round(found["seconds"] + report.duration, 2)
    if report.outcome != "passed" and found["outcome"] != "failed":
        found["outcome"], found["why"] = report.outcome, why(report)
    if _plan["result"] and report.when == "teardown":
        write_json(Path(_plan["result"]), list(_outcomes.values()))


def why(report: Any) -> str:
    """Return the reason of a skip, or the text of an error."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return str(report.longrepr)

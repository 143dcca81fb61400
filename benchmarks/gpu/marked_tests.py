"""Stage C: the tests marked gpu, in four processes; one that is skipped has failed.

Only files that hold such tests are collected: others may import what this machine lacks. Each
process collects all of them and runs every fourth test (`one_of`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.one_of import PLAN

if TYPE_CHECKING:
    from benchmarks.gpu.findings import Findings

ROOT = Path(__file__).parents[2]
MARK = "mark" + ".gpu"  # not this file itself
SHOWN_CHARACTERS = 1200
NO_TESTS = 5  # pytest's exit code


def run(findings: Findings, device: Any, folder: Path, ends: float) -> None:
    """Run them and add each that did not pass."""
    files = marked_files()
    if not device.on_card:  # `make test` collects them all anyway
        files = files[-2:]
    number = 4 if device.on_card else 1
    results = [folder / f"{at}.json" for at in range(number)]
    processes = [start(files, at, number, results[at], folder) for at in range(number)]
    for process in processes:
        process.wait(max(1.0, ends - time.monotonic() - 2.0))
    tests = [one for path in results if path.exists() for one in json.loads(path.read_text())]
    findings.add("files", len(files))
    findings.add("tests", len(tests), goal="more than 0", passed=bool(tests))
    codes = [process.returncode for process in processes]
    failed = any(one["outcome"] == "failed" for one in tests)
    ended_well = all(code in (0, NO_TESTS) or (code == 1 and failed) for code in codes)
    findings.add("exit_codes", codes, passed=ended_well, why=said(folder, codes))
    findings.add("slowest", [[one["test"], one["seconds"]] for one in slowest(tests)], "s")
    if not device.on_card:
        wrong = [one for one in tests if one["outcome"] == "failed"]
        findings.add("failed", [one["test"] for one in wrong], goal="none", passed=not wrong)
        findings.needs_card("skipped", f"{len(tests) - len(wrong)} tests")
        return
    for outcome in ("failed", "skipped"):
        found = [one for one in tests if one["outcome"] == outcome]
        findings.add(outcome, len(found), goal="0", passed=not found)
    for one in tests:
        if one["outcome"] != "passed":
            why = one["why"][-SHOWN_CHARACTERS:]
            findings.add(one["test"], one["outcome"], passed=False, why=why)


def marked_files() -> list[str]:
    """Return the test files that have tests marked gpu."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if MARK in path.read_text()]


def start(
    files: list[str], at: int, number: int, result: Path, folder: Path
) -> subprocess.Popen[bytes]:
    """Start pytest for one share of the tests."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "benchmarks.gpu.one_of",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        *files,
    ]
    plan = {"at": at, "number": number, "result": str(result)}
    environment = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    with (folder / f"{at}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**environment, PLAN: json.dumps(plan)},
        )


def said(folder: Path, codes: list[int | None]) -> str:
    """Return the last lines of the processes that did not end well."""
    wrong = [at for at, code in enumerate(codes) if code not in (0, NO_TESTS)]
    logs = [(folder / f"{at}.log").read_text(errors="replace") for at in wrong]
    return "\n".join(log[-SHOWN_CHARACTERS:] for log in logs)


def slowest(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the five that took longest."""
    return sorted(tests, key=lambda one: -one["seconds"])[:5]

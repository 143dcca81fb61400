"""Judge trainckpt on a GPU, in minutes; or rehearse that on the CPU, in seconds.

    python -m benchmarks.gpu --json OUT [--minutes 7] [--device cuda|cpu] [--stages A,B,...]

Stages, in this order, each in a process of its own:

    A facts     driver, link, CRIU, versions, memory
    B floors    what the link and the driver can do, and trainckpt's copies beside it
    C tests     pytest -m gpu; a test that is skipped has failed
    D proofs    `trainckpt prove`, four programs at once
    E peers     stall, slowdown and memory of a save of 4 GB, beside torch.save and DCP
    F dumps     dump and restore of a training; the driver's calls alone
    G probes    faults that were predicted for GPUs, one by one

Time that a stage leaves is the later ones'. At its limit a stage is killed with all it started.
OUT is rewritten after each stage. Exit code 0 if all stages passed. docs/gpu.md reads the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.findings import NEEDS_CARD, Findings, write_json

from trainckpt.launcher.processes import orphans_come_here
from trainckpt.process_dump import process_tree

SHOWN_LOG_CHARACTERS = 1500
POLL_S = 0.05
KILLED_WITHIN_S = 10.0  # a process that waits for a driver may stay
PASSED, FAILED = "passed", "failed"


class Stage(NamedTuple):
    """Module of a stage, and its share of the minutes."""

    module: str
    share: int


STAGES = {
    "A": Stage("facts", 40),
    "B": Stage("floors", 30),
    "C": Stage("marked_tests", 80),
    "D": Stage("proofs", 75),
    "E": Stage("peers", 170),
    "F": Stage("dumps", 45),
    "G": Stage("probes", 40),
}


def main() -> int:
    """Run all stages, or be one of them."""
    arguments = parse()
    if arguments.inside:
        return be_stage(arguments)
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "device": arguments.device,
        "card": "",
        "machine": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "minutes": arguments.minutes,
        "passed": False,
        "stages": [],
    }
    ends = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="trainckpt-gpu-", dir=arguments.folder) as folder:
        left = list(arguments.stages)
        while left:
            shares = sum(STAGES[each].share for each in left)
            limit_s = max(1.0, ends - time.monotonic()) * STAGES[left[0]].share / shares
            stage = run_stage(left.pop(0), limit_s, Path(folder), arguments.device)
            result["stages"].append(stage)
            if stage["stage"] == "A":
                result["card"] = value_of(stage, "card") or ""
            result["passed"] = all(one["status"] == PASSED for one in result["stages"])
            write_json(arguments.json, result)
            tell(f"{stage['stage']} {stage['status']} in {stage['seconds']} s {stage['reason']}")
    print(table(result))
    return 0 if result["passed"] else 1


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--minutes", type=float, default=7.0, help="for all stages (%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(STAGES))
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="for what stages write")
    parser.add_argument("--inside", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=600.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := [each for each in arguments.stages if each not in STAGES]:
        parser.error(f"no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    return arguments


def run_stage(letter: str, limit_s: float, folder: Path, device: str) -> dict[str, Any]:
    """Run one stage in a process of its own, and judge it."""
    figures, log, scratch = folder / f"{letter}.json", folder / f"{letter}.log", folder / letter
    scratch.mkdir()
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--inside",
        letter,
        "--device",
        device,
        "--json",
        str(figures),
        "--folder",
        str(scratch),
        "--limit-s",
        f"{limit_s:.1f}",
    ]
    tell(f"{letter} {STAGES[letter].module}: at most {limit_s:.0f} s")
    begun = time.monotonic()
    code = run_limited(command, limit_s, log)
    found = json.loads(figures.read_text()) if figures.exists() else []
    status, reason = judge(found, code, limit_s)
    stage = {
        "stage": letter,
        "title": STAGES[letter].module,
        "status": status,
        "reason": reason,
        "seconds": round(time.monotonic() - begun, 1),
        "limit_s": round(limit_s, 1),
        "figures": found,
    }
    if status != PASSED:
        stage["log"] = log.read_text(errors="replace")[-SHOWN_LOG_CHARACTERS:]
    return stage


def run_limited(command: list[str], limit_s: float, log: Path) -> int | None:
    """Run a command; return its exit code, or None at its limit. Nothing of it is left running."""
    with log.open("wb") as output, orphans_come_here():
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        kill_descendants()
    return code


def judge(figures: list[dict[str, Any]], code: int | None, limit_s: float) -> tuple[str, str]:
    """Return the status of a stage and the reason, from its figures and its exit code. Pure."""
    failed = [one["name"] for one in figures if one["passed"] is False]
    if code is None:
        return FAILED, f"killed at its limit of {limit_s:.0f} s"
    if code != 0:
        return FAILED, f"ended with {code}"
    if failed:
        return FAILED, ", ".join(failed)
    if not figures:
        return FAILED, "it has no figures"
    return PASSED, ""


def kill_descendants() -> None:
    """Kill whatever this process's stage has left running, in whatever session."""
    me, until = os.getpid(), time.monotonic() + KILLED_WITHIN_S
    while (others := process_tree.processes(me)[1:]) and time.monotonic() < until:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


def be_stage(arguments: argparse.Namespace) -> int:
    """Be one stage: measure, and write the figures."""
    letter, on_card = arguments.inside, arguments.device == "cuda"
    findings = Findings(arguments.json, on_card=on_card)
    try:
        from benchmarks.gpu.device import open_device

        module = import_module(f"benchmarks.gpu.{STAGES[letter].module}")
        ends = time.monotonic() + arguments.limit_s
        module.run(findings, open_device(arguments.device), arguments.folder, ends)
    except Exception:  # noqa: BLE001 - whatever fails is the stage's reason
        findings.add("stage", None, passed=False, why=traceback.format_exc())
    return 0


def value_of(stage: dict[str, Any], name: str) -> Any:
    """Return a figure's value, or None."""
    return next((one["value"] for one in stage["figures"] if one["name"] == name), None)


def table(result: dict[str, Any]) -> str:
    """Return all figures as lines of text."""
    lines = [f"{result['card'] or result['device']}  {result['machine']}  {result['started']}"]
    for stage in result["stages"]:
        took = f"({stage['seconds']} of {stage['limit_s']} s)"
        lines += [
            "",
            " ".join([*(stage[k] for k in ("stage", "title", "status")), took, stage["reason"]]),
        ]
        for one in stage["figures"]:
            mark = {True: "pass", False: "FAIL", None: ""}[one["passed"]]
            value = f"{show(one['value'])} {one['unit']}".strip()
            shown = f"  {mark:<5}{one['name']:<34}{value}"
            if one["goal"]:
                shown += f"  ({one['goal']})"
            if one["why"] and (one["passed"] is False or NEEDS_CARD in one["why"]):
                shown += f"  {one['why'].strip().splitlines()[-1][:160]}"
            lines.append(shown)
    return "\n".join([*lines, "", PASSED if result["passed"] else FAILED])


def show(value: Any) -> str:
    """Return a figure's value as text of a line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)[:120]


def tell(line: str) -> None:
    """Print a line of progress."""
    print(f"gpu: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

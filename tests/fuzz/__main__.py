"""The command: each parser in a process of its own, one after the other; a table of the results."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

FINDINGS = Path(__file__).parent / "findings"
NOTED_BYTES = 1 << 22
COLUMNS = (
    "parser",
    "inputs",
    "seconds",
    "outcomes",
    "branches",
    "corpus",
    "peak_mb",
    "largest_mb",
    "slowest_ms",
    "findings",
)


def main(arguments: list[str] | None = None) -> int:
    """Fuzz; 1 if anything was found."""
    asked = _arguments(arguments)
    if asked.child:
        return _child(asked)
    from tests.fuzz.table import NAMES

    names = NAMES if asked.parser == "all" else asked.parser.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        print(f"fuzz: no parser {unknown}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    groups = [names] if asked.together else [[name] for name in names]
    rows = [row for group in groups for row in _in_child(group, asked)]
    if asked.json:
        print(json.dumps({"seed": asked.seed, "parsers": rows}, indent=2))
    else:
        print("".join(f"{c:>12}" for c in COLUMNS))
        for row in rows:
            cells = {**row, "findings": len(row["findings"])}
            print("".join(f"{cells.get(c, ''):>12}" for c in COLUMNS))
    for row in rows:
        for finding in row["findings"]:
            print(f"fuzz: {row['parser']}: {finding}", file=sys.stderr)
    return int(any(row["findings"] for row in rows))


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    parser.add_argument("--parser", default="all", help="a name, several with commas, or all")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="in one process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--findings", type=Path, default=FINDINGS, help="where they are written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _in_child(names: list[str], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of these parsers; a process that died is a finding too."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "input"
        note.write_bytes(bytes(NOTED_BYTES))
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            "--child",
            str(note),
            "--parser",
            ",".join(names),
            "--inputs",
            str(asked.inputs),
            "--seed",
            str(asked.seed),
            "--findings",
            str(asked.findings),
        ]
        env = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        env = {k: v for k, v in env.items() if not k.startswith("TRAINCKPT_")}
        patience_s = 120 + len(names) * asked.inputs / 50
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
        try:
            out, _ = process.communicate(timeout=patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        with contextlib.suppress(ValueError):
            found: list[dict[str, Any]] = json.loads(out)
            return found
        name = names[0] if len(names) == 1 else "all"
        return [{"parser": name, "findings": [_died(name, process.returncode, note, asked)]}]


def _died(name: str, code: int, note: Path, asked: argparse.Namespace) -> str:
    from tests.fuzz.engine import Finding

    data = note.read_bytes()
    data = data[8 : 8 + int.from_bytes(data[:8], "little")]
    how = signal.Signals(-code).name if code < 0 else f"code {code}"
    return _write(Finding(name, f"died {how}", "process", data), asked.findings)


def _write(finding: Any, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / finding.file_name).write_bytes(finding.data)
    return f"{finding.what} in {finding.where}: {folder / finding.file_name}"


def _child(asked: argparse.Namespace) -> int:
    from tests.fuzz.coverage import Coverage

    coverage = Coverage()
    coverage.install()
    from tests.fuzz import engine, table

    engine.silence()
    logging.disable()
    with Path(asked.child).open("r+b") as file:
        noted = mmap.mmap(file.fileno(), NOTED_BYTES)

        def note(data: bytes) -> None:
            part = data[: NOTED_BYTES - 8]
            noted[: 8 + len(part)] = len(part).to_bytes(8, "little") + part

        rows = []
        for name in asked.parser.split(","):
            coverage.forget()
            parser = table.parser(name)
            result = engine.fuzz(parser, asked.inputs, asked.seed, coverage, note)
            written = [_write(finding, asked.findings) for finding in result.findings]
            rows.append({**asdict(result), "findings": written})
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

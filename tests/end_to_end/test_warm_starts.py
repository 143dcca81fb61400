"""Warm starts: what one host has compiled, another does not compile again; the bits are the same.

The "other host" is the same one with an empty folder for compile caches. Work is counted in source
files given to the C++ compiler, not in time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytestmark = [pytest.mark.long, pytest.mark.timeout(800)]  # up to three launches that compile

SCRIPT = Path(__file__).with_name("compiled_script.py")
COMPILER = """#!/bin/sh
case "$*" in *.cpp*) echo "$*" >> "$COMPILED" ;; esac
exec g++ "$@"
"""


class Hosts:
    """Launches the script with the compile caches of a host; all of them share a run and a tier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiler = folder / "c++"
        self.compiler.write_text(COMPILER)
        self.compiler.chmod(0o755)

    def launch(self, host: str, run: str = "run", **variables: str):
        """Return the exit code, the lines of the steps, the files compiled, and the log."""
        losses, compiled = (self.folder / f"{host}.{kind}" for kind in ("losses", "compiled"))
        launcher = [sys.executable, "-m", "trainckpt", "run", "--compile-cache", "tiers", "--"]
        ended = subprocess.run(
            [*launcher, str(SCRIPT), run, f"{run}-tier", str(losses)],
            cwd=self.folder,
            env={
                **os.environ,
                "TRAINCKPT_CACHE": str(self.folder / f"cache-{host}"),
                "CXX": str(self.compiler),
                "COMPILED": str(compiled),
                **variables,
            },
            timeout=HANG_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = [json.loads(line) for line in losses.read_text().splitlines()]
        num_compiled = len(compiled.read_text().splitlines()) if compiled.exists() else 0
        return ended.returncode, lines, num_compiled, ended.stdout


def losses_by_step(lines):
    return {line["step"]: line["loss"] for line in lines}


def test_another_host_compiles_at_most_a_third_and_computes_the_same_bits(tmp_path):
    hosts = Hosts(tmp_path)
    code, straight, _, log = hosts.launch("straight", run="straight")
    assert code == 0, log

    code, first, compiled_first, log = hosts.launch("first", KILLED_AT_STEP="4")
    assert code == 137, log
    assert first[-1]["miss"] > 0
    assert first[-1]["hit"] == 0

    code, second, compiled_second, log = hosts.launch("second")
    assert code == 0, log
    assert "compile cache: fetched" in log
    assert "this resume is bitwise" in log
    assert (second[-1]["hit"], second[-1]["miss"]) == (first[-1]["miss"], 0)
    assert 3 * compiled_second <= compiled_first

    expected, resumed = losses_by_step(straight), losses_by_step(second)
    assert len(set(expected.values())) == len(expected)
    assert min(resumed) > 0
    assert resumed == {step: expected[step] for step in resumed}
    assert {**losses_by_step(first), **resumed} == expected


def test_a_changed_copy_is_named_and_everything_is_compiled_again(tmp_path):
    hosts = Hosts(tmp_path)
    assert hosts.launch("first", KILLED_AT_STEP="4")[0] == 137
    (archive,) = (tmp_path / "run-tier" / "compile-cache").glob("*.tar.gz")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)

    code, second, _, log = hosts.launch("second")
    assert code == 0, log
    assert archive.name in log
    assert "its bytes are not those that were stored" in log
    assert second[-1]["miss"] > 0
    assert second[-1]["hit"] == 0

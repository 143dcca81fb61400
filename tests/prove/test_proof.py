"""Whole proofs, from the command line, of real scripts; those that cannot train need no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.limits import HANG_S
from trainckpt.cli.main import main
from trainckpt.cli.prove import report
from trainckpt.prove.compare import Difference
from trainckpt.prove.proof import Proof, Stop

ROOT = Path(__file__).resolve().parents[2]
EXACT = r"exact: \d+ micro-batches on \d+ ranks, resumed from step \d+ micro-batch \d+, bitwise identical"  # fmt: skip  # noqa: E501


@pytest.fixture
def trainckpt(tmp_path):
    """Run the command in an empty folder, with a folder of its own for temporary files.

    That one has a short path: sockets of data loader workers lie in it, and theirs are limited.
    """
    (tmp_path / "cwd").mkdir()
    temporary = tempfile.mkdtemp(prefix="t-")
    (tmp_path / "tmp").symlink_to(temporary)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    paths = [str(ROOT / "src"), kept.get("PYTHONPATH", "")]
    own = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TMPDIR": temporary,
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "trainckpt.cli.main", *map(str, arguments)],
            env=kept | own,
            cwd=tmp_path / "cwd",
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    yield run
    shutil.rmtree(temporary)


def left_over(tmp_path):
    """What a proof left in the folder for temporary files; torch's own caches do not count."""
    return [p for p in (tmp_path / "tmp").iterdir() if p.name.startswith("trainckpt")]


def test_demo_ends_with_the_line_that_says_exact(trainckpt, tmp_path):
    """It needs no clone, returns 0, and leaves nothing behind."""
    done = trainckpt("demo", "--stops", "1")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(EXACT, done.stdout.splitlines()[-1])
    assert left_over(tmp_path) == []
    assert list((tmp_path / "cwd").iterdir()) == []


def test_a_script_that_fails_is_shown_with_its_last_lines(trainckpt, tmp_path):
    """What it said last, and where the whole log is."""
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no such data set')")
    done = trainckpt("prove", "--json", "--", script)
    assert done.returncode == 78
    told = json.loads(done.stdout)
    assert "the script ended with 1 (straight)" in told["error"]
    assert "ValueError: no such data set" in told["error"]
    log = Path(told["hint"].removeprefix("the whole log is "))
    assert "no such data set" in log.read_text()
    assert told["code"] == 78


def test_a_script_without_a_checkpointer_is_told_what_to_do(trainckpt, tmp_path):
    """There is nothing to prove, and nothing is left behind."""
    script = tmp_path / "empty.py"
    script.write_text("print('done')")
    done = trainckpt("prove", script)
    assert done.returncode == 78
    assert "0 boundaries of a Checkpointer" in done.stderr
    assert "with trainckpt.Checkpointer(" in done.stderr
    assert done.stdout == ""
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--stops", "0", "--", "x.py"], "'0' is not a number from 1 on"),
        (["--nproc", "none", "--", "x.py"], "'none' is not a number from 1 on"),
        (["--bogus", "--", "x.py"], "prove does not know --bogus"),
        ([], "no script was given"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(arguments, why, capsys):
    """One sentence, a hint, 78."""
    assert main(["prove", *arguments]) == 78
    error = capsys.readouterr().err
    assert why in error
    assert "next: " in error


def test_a_folder_that_is_in_use_is_not_used_again(tmp_path, capsys):
    """Records of two proofs in one file would prove nothing."""
    (tmp_path / "straight").mkdir()
    assert main(["prove", "--keep", str(tmp_path), "--", "x.py"]) == 78
    assert "is not empty" in capsys.readouterr().err


def test_a_verdict_as_json_is_one_document(capsys):
    """All that is known, and the line for people in it."""
    difference = Difference(1, 5, 1, 2, ("torch RNG",))
    stops = (Stop(5, 1, 2, "SIGTERM", 0),)
    proof = Proof(
        exact=False, micro_batches=9, ranks=2, stops=stops, difference=difference, folder="/x"
    )
    assert report(proof, as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("not exact: differs first at step 1 micro-batch 2 on rank 1")
    assert told["difference"]["parts"] == ["torch RNG"]
    assert told["stops"] == [{"at": 5, "step": 1, "micro": 2, "signal": "SIGTERM", "rank": 0}]
    assert told["folder"] == "/x"


def test_the_verdict_names_a_stop_inside_a_window():
    """Where there is one: it is the harder case, and the one people ask about."""
    stops = (Stop(3, 1, 0, "SIGTERM", 0), Stop(5, 1, 2, "SIGKILL", 0))
    assert Proof(exact=True, micro_batches=9, ranks=2, stops=stops).verdict() == (
        "exact: 9 micro-batches on 2 ranks, resumed from step 1 micro-batch 2, bitwise identical"
    )

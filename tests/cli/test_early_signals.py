"""A signal before anything is launched: while the verb is imported, and while `resume` looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

# Real commands, by their entry point; what stands first in `text` sends the signal from inside.
COMMAND = """
    import os, signal, sys, threading
    from trainckpt.cli import main
    kill = lambda *numbers: [os.kill(os.getpid(), number) for number in numbers]
    module_of, sys.argv = main.module_of, ["trainckpt", *sys.argv[1:]]
    def imported_after(*numbers):
        def module(verb):
            if numbers and verb not in done:
                done.add(verb)
                kill(*numbers)
            return module_of(verb)
        done = set()
        main.module_of = module
"""


@pytest.fixture
def command(tmp_path):
    """Run the command; its exit code, and what it said."""

    def run(text: str, *argv: str, **variables: str):
        whole = textwrap.dedent(COMMAND) + textwrap.dedent(text) + "\nmain.entry()\n"
        done = subprocess.run(
            [sys.executable, "-c", whole, *argv],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **variables},
            cwd=tmp_path,
            timeout=120,
        )
        return done.returncode, done.stderr

    return run


@pytest.fixture
def script(tmp_path):
    """One that uses trainckpt, and shows that it was begun."""
    (tmp_path / "train.py").write_text("import trainckpt\nopen('begun', 'w').close()\n")
    return "train.py"


@pytest.fixture
def slurm(tmp_path):
    """A job, and what its command was asked."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n'
        "[ \"$1\" != show ] || printf 'JobId=7\\n   JobState=RUNNING\\n   StdErr=/x\\n'\n"
    )
    scontrol.chmod(0o755)
    path = f"{scontrol.parent}:{os.environ['PATH']}"
    return {"PATH": path, "SLURM_JOB_ID": "7", "TRAINCKPT_PROVE": ""}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_while_run_is_imported_is_a_stop(command, script, tmp_path, number):
    """Nothing is begun, and the scheduler is told to start it again."""
    code, said = command(f"imported_after({int(number)})", "run", "--", script)
    assert (code, said) == (
        75,
        "trainckpt: a signal came before the command was started; exit code 75\n",
    )
    assert not (tmp_path / "begun").exists()


def test_a_job_that_is_stopped_so_early_is_queued_again(command, script, slurm, tmp_path):
    code, _ = command("imported_after(15)", "run", "--", script, **slurm)
    assert code == 75
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "requeue 7"


def test_a_second_interrupt_while_it_is_imported_ends_it_at_once(command, script):
    hangs = "imported_after(2, 2)\nmodule_of = lambda verb: threading.Event().wait(60)"
    assert command(hangs, "run", "--", script) == (130, "")


@pytest.mark.parametrize("verb", ["list", "verify"])
def test_other_verbs_are_interrupted_as_ever(command, verb):
    assert command("imported_after(2)", verb, "runs/none")[0] == 130


def test_a_command_that_names_no_script_ends_as_without_the_signal(command):
    assert command("imported_after(15)", "run")[0] == 78


HANGS = """
    from trainckpt.run_directory import run_url
    def hangs(*_):
        kill(*numbers)
        threading.Event().wait(100)
    run_url.open_run_tier = hangs
"""


@pytest.mark.parametrize(("numbers", "code"), [((15,), 75), ((10,), 75), ((2,), 75)])
def test_a_signal_while_resume_looks_is_a_stop_however_long_that_takes(command, numbers, code):
    """A store that does not answer holds it up for a minute."""
    begun = time.monotonic()
    found, said = command(f"numbers = {numbers}\n{textwrap.dedent(HANGS)}", "resume", "runs/a")
    assert (found, said) == (
        code,
        f"trainckpt: a signal came before the command was started; exit code {code}\n",
    )
    assert time.monotonic() - begun < 60


def test_a_resume_that_is_stopped_while_it_looks_has_the_code_asked_for_and_is_queued_again(
    command, slurm, tmp_path
):
    text, wanted = f"numbers = [15]\n{textwrap.dedent(HANGS)}", {"TRAINCKPT_EXIT_CODE": "85"}
    code, _ = command(text, "resume", "runs/a", **wanted, **slurm)
    assert code == 85
    assert (tmp_path / "asked").read_text().splitlines() == ["show job 7", "requeue 7"]


def test_what_resume_finds_out_while_it_looks_is_its_error(command):
    code, said = command("", "resume", "runs/a")
    assert code == 66
    assert "error: " in said

"""What the command costs to start: only what a verb needs is imported, and torch by few."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

import trainckpt
from trainckpt.attempt.status_files import has_imported
from trainckpt.cli import main, output

FREE_OF_TORCH = ["list", "show", "verify", "pause", "config"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The smallest run that was ever saved."""
    import torch

    place = tmp_path_factory.mktemp("small") / "run"
    with trainckpt.Checkpointer(place, model=torch.nn.Linear(2, 2)) as ckpt:
        ckpt.boundary()
    return place


def test_no_verb_imports_torch_to_read_its_arguments_and_those_that_only_look_never_do(run):
    code = (
        "import sys\n"
        "from trainckpt.cli import main\n"
        "for verb in main.VERBS:\n"
        "    main.module_of(verb)\n"
        "    assert 'torch' not in sys.modules, verb\n"
        "for verb in sys.argv[2:]:\n"
        "    code = main.main([verb] if verb == 'config' else [verb, sys.argv[1]])\n"
        "    assert code == (66 if verb == 'pause' else 0), (verb, code)\n"
        "    assert 'torch' not in sys.modules, verb\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), *FREE_OF_TORCH],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_import_is_seen_by_a_supervisor_although_torch_is_not_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(tmp_path))
    code = "import sys, trainckpt; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert has_imported(tmp_path)


def test_the_front_door_names_the_checkpointer_before_it_is_loaded():
    code = (
        "import sys, trainckpt\n"
        "assert 'Checkpointer' in dir(trainckpt) and 'torch' not in sys.modules\n"
        "from trainckpt import Checkpointer\n"
        "assert trainckpt.Checkpointer is Checkpointer\n"
        "from trainckpt import *\n"
        "assert Checkpointer.__module__ == 'trainckpt.checkpointer'\n"
        "assert not hasattr(trainckpt, 'Checkpoint')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("verb", main.VERBS)
def test_the_help_of_a_verb_is_a_line_of_its_modules_header(verb):
    assert f"{verb}: {main.VERBS[verb]}." in main.module_of(verb).__doc__.splitlines()


@pytest.mark.parametrize("columns", [200, 80, 40, 20])
def test_a_table_has_every_letter_on_a_narrow_terminal_too(columns):
    """What does not fit is broken by the terminal, never cut or spread over columns of a letter."""
    name = "optimizer/model/self_attn.out_proj.weight/exp_avg_sq"
    code = f"""if True:
        from trainckpt.cli import output as show
        show.table(("tensor", "type", "when", "files"),
                   [({name!r}, "F32", "2026-11-26 12:26:20", "rank00000.safetensors")])
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    shown = os.read(ours, 1 << 16).decode()
    os.close(theirs)
    os.close(ours)
    (row,) = [line for line in shown.splitlines() if name in line]
    assert row.split() == [name, "F32", "2026-11-26", "12:26:20", "rank00000.safetensors"]


def test_brackets_in_a_table_are_no_markup(capsys):
    output.table(("name",), [("blocks[bold]0[/bold]",)], title="runs/[red]x")
    shown = capsys.readouterr().out
    assert "blocks[bold]0[/bold]" in shown
    assert "runs/[red]x" in shown

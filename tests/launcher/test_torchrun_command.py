"""torchrun's command line: restarts are ours, and the script is looked at."""

from __future__ import annotations

import sys

import pytest

from trainckpt.cli.main import parse
from trainckpt.errors import ConfigurationError
from trainckpt.launcher.torchrun_command import (
    is_elastic,
    is_silent,
    mentions_us,
    recorded_form,
    restarts_ranks,
    take_max_restarts,
    torchrun_command,
)


@pytest.mark.parametrize(
    ("options", "kept", "number"),
    [
        ([], [], 0),
        (["--max-restarts=3"], [], 3),
        (["--standalone", "--max_restarts", "2", "--tee=3"], ["--standalone", "--tee=3"], 2),
        (["--max-restarts", "0", "--max_restarts=4"], [], 4),
    ],
)
def test_restarts_are_taken_from_torchrun_in_every_spelling(options, kept, number):
    """The last one counts, as in any command line."""
    assert take_max_restarts(options, {}) == (kept, number)


def test_restarts_are_taken_from_torchruns_variable_too():
    assert take_max_restarts([], {"PET_MAX_RESTARTS": "5"}) == ([], 5)
    assert take_max_restarts(["--max-restarts=1"], {"PET_MAX_RESTARTS": "5"}) == ([], 1)


def test_a_number_of_restarts_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match="--max-restarts 'x'"):
        take_max_restarts(["--max-restarts", "x"], {})


@pytest.mark.parametrize(
    ("options", "elastic"),
    [
        (["--nnodes", "1:4"], True),
        (["--tee=3", "--nnodes=2:3"], True),
        (["--nnodes=2:2"], False),
        (["--nnodes", "2", "--rdzv-id", "1:4"], False),
        ([], False),
    ],
)
def test_a_launch_whose_number_of_agents_may_change_is_known_by_its_nodes(options, elastic):
    assert is_elastic(options, {}) is elastic
    assert is_elastic([], {"PET_NNODES": "1:4"})
    command = torchrun_command(1, options, ["train.py", "--nnodes", "1:4"])
    assert restarts_ranks(command) is elastic
    assert not restarts_ranks(["python", "train.py", "--nnodes=1:4"])


def test_a_command_is_recorded_as_torchrun_starts_it():
    python = [sys.executable, "-u"]
    assert recorded_form(["--tee=3"], ["train.py", "-m"]) == [*python, "train.py", "-m"]
    assert recorded_form(["-m"], ["package.train"]) == [*python, "-m", "package.train"]
    assert recorded_form(["--no_python"], ["sh", "x.sh"]) == ["sh", "x.sh"]


@pytest.mark.parametrize("ours", [True, False])
def test_a_script_that_speaks_of_trainckpt_is_known_before_it_runs(tmp_path, ours):
    """However it is launched; its arguments do not count."""
    text = "import trainckpt" if ours else "import torch"
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(text)
    (tmp_path / "other.py").write_text("import trainckpt")
    cwd = str(tmp_path)
    for options, command in (
        ([], ["train.py", "--out", "trainckpt", "other.py"]),
        (["-m"], ["package.train"]),
        (["--no-python"], [sys.executable, "-u", "train.py"]),
        (["--no-python"], ["sh", "train.py"]),
        (["--no-python"], ["python", "-c", text]),
    ):
        assert mentions_us(torchrun_command(2, options, command), cwd) is ours
    assert mentions_us([sys.executable, "train.py"], cwd) is ours


@pytest.mark.parametrize("word", ["nowhere.py", "x" * 5000])
def test_a_script_that_is_not_there_says_nothing(tmp_path, word):
    assert not mentions_us(torchrun_command(2, [], [word]), str(tmp_path))
    assert not is_silent([sys.executable, "-c", word], str(tmp_path))


@pytest.mark.parametrize(
    ("argv", "run", "command"),
    [
        (["train.py", "--run", "x"], None, ["train.py", "--run", "x"]),
        (["--run", "R", "train.py", "--run", "x"], "R", ["train.py", "--run", "x"]),
        (
            ["--tee=3", "--run=R", "--", "train.py", "--run", "x"],
            "R",
            ["--tee=3", "--", "train.py", "--run", "x"],
        ),
        (
            ["--max-restarts", "1", "train.py", "--run", "x"],
            None,
            ["--max-restarts", "1", "train.py", "--run", "x"],
        ),
    ],
)
def test_a_scripts_own_option_run_stays_the_scripts(argv, run, command):
    """Ours stands before the script and before torchrun's options."""
    found = parse(["run", *argv])
    assert (found.run, found.command) == (run, command)

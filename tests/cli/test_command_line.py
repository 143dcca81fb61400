"""The command line itself: help, refusals, and what is passed to torchrun."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from trainckpt.cli.main import VERBS, main, parse
from trainckpt.errors import ConfigurationError
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.launcher.torchrun_command import (
    FLAGS,
    WITH_VALUE,
    split_torchrun_options,
    torchrun_command,
)
from trainckpt.run_directory.run_url import open_directory
from trainckpt.snapshot import attempt_history
from trainckpt.storage.redact import redact_arguments


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_works_and_says_checkpoint(verb, capsys):
    """The word that users look for."""
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"] if verb else ["--help"])
    assert left.value.code == 0
    assert "checkpoint" in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "required: VERB"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["list"], "required: RUN"),
        (["list", "--frobnicate", "x"], "list does not know --frobnicate"),
        (["run", "--nproc", "-1", "x.py"], "is not a number from 1 on"),
        (
            ["run", "--frobnicate", "x.py"],
            "neither trainckpt run nor torchrun has an option --frobnicate",
        ),
        (["run"], "no script was given"),
        (["run", "--max-restarts=0"], "no script was given"),
    ],
)
def test_what_cannot_work_is_78_with_a_hint(argv, why, capsys):
    """As a sentence, or as JSON where that was asked for."""
    assert main(argv) == 78
    said = capsys.readouterr()
    assert said.out == ""
    assert why in said.err
    assert "next: " in said.err
    if argv:
        assert main([argv[0], "--json", *argv[1:]]) == 78
        error = json.loads(capsys.readouterr().out)
        assert why in error["error"]
        assert error["code"] == 78


@pytest.fixture
def no_reader():
    """A pipe whose reader has gone, as after Ctrl-C at `trainckpt ... | tee log`."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


def command(*argv: object, **streams: object) -> int:
    """The exit code of the command itself; nothing that it prints waits in a buffer."""
    line = [sys.executable, "-um", "trainckpt.cli.main", *map(str, argv)]
    known = {k: v for k, v in os.environ.items() if not k.startswith("TRAINCKPT_")}
    done = subprocess.run(line, env=known, timeout=120, check=False, **streams)
    return done.returncode


def test_that_nobody_reads_what_run_says_changes_neither_its_restarts_nor_its_exit_code(
    no_reader, tmp_path
):
    script = f"echo x >>{tmp_path}/starts; exit 3"
    argv = ["run", "--max-restarts", "1", "--no-python", "--", "sh", "-c", script]
    assert command(*argv, stdout=no_reader, stderr=no_reader) == 3
    assert (tmp_path / "starts").read_text() == "x\nx\n"


def test_a_verdict_that_nobody_reads_is_no_success(no_reader, make_run):
    run = make_run(steps=1)
    next(run.rglob("rank00000.safetensors")).write_bytes(b"")
    for stream in ("stdout", "stderr"):
        assert command("verify", run, **{stream: no_reader}) != 0
    assert command("list", run, stdout=no_reader) == 0
    assert command("list", run / "nowhere", stderr=no_reader) == 66


def test_closed_streams_change_no_exit_code_and_are_nobody_elses(tmp_path):
    """A script that prints has somewhere to print to, which is no file of ours."""
    script = f"echo said && touch {tmp_path}/said"
    for verb in (["run", "--no-python", "--", "sh", "-c", script], ["list", tmp_path]):
        line = shlex.join([sys.executable, "-m", "trainckpt", *map(str, verb)])
        done = subprocess.run(f"{line} >&- 2>&- <&-", shell=True, timeout=120, check=False)
        assert done.returncode == (66 if verb[0] == "list" else 0)
    assert (tmp_path / "said").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_that_is_full_is_74_and_the_exit_code_of_a_run_stays(
    make_run, monkeypatch, unbuffered
):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    run = make_run(steps=1)
    line = [sys.executable, "-m", "trainckpt"]
    with Path("/dev/full").open("wb") as full:
        how = {"stdout": full, "stderr": subprocess.PIPE, "timeout": 120, "check": False}
        done = subprocess.run([*line, "list", "--json", str(run)], **how)
        assert done.returncode == 74
        assert b"stdout cannot be written to: No space left on device" in done.stderr
        if unbuffered:
            done = subprocess.run([*line, "run", "--json", "--no-python", "--", "true"], **how)
            assert done.returncode == 0


def test_a_stdout_that_knows_ascii_alone_gets_the_tables_all_the_same(make_run, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    run = make_run("größe", steps=1)
    line = [sys.executable, "-m", "trainckpt", "list", str(run)]
    done = subprocess.run(line, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr" in done.stdout


@pytest.mark.parametrize(
    ("script", "why", "hint"),
    [
        (["sh", "-c", "true"], "sh is a program", "--no-python -- sh -c true"),
        (["nowhere.py"], "there is no script nowhere.py in ", "trainckpt run -- train.py"),
    ],
)
def test_what_is_no_python_script_is_refused_before_anything_is_launched(script, why, hint, capsys):
    assert main(["run", "--", *script]) == 78
    said = capsys.readouterr().err
    assert why in said
    assert hint in said


@pytest.mark.parametrize("variable", ["PET_MODULE", "PET_NO_PYTHON"])
def test_what_torchruns_variables_say_is_no_script_is_launched(variable, monkeypatch, tmp_path):
    """A module or a program: whether it is there torchrun finds out."""
    monkeypatch.setenv(variable, "1")
    name = f"{tmp_path.name}.nowhere"  # a program of that name, or a module
    assert main(["run", "--", name]) not in (0, 70, 78)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("trainckpt 0")


def test_the_scripts_own_json_option_is_not_ours(capsys):
    """After `--` nothing is ours."""
    assert main(["run", "--frobnicate", "--", "x.py", "--json"]) == 78
    assert capsys.readouterr().out == ""


def run_command(*argv: str) -> list[str]:
    """What `trainckpt run ARGV` would launch, after the interpreter."""
    arguments = parse(["run", *argv])
    options, command = split_torchrun_options(arguments.command)
    return torchrun_command(arguments.nproc, options, command)[1:]


TORCHRUN = ["-m", "trainckpt.launcher.torchrun_agent"]


def test_torchrun_options_pass_through_in_their_order():
    """With `=` or a value of their own, before the script, with or without `--`."""
    assert run_command("--nproc", "2", "--max-restarts=0", "train.py", "--lr", "1") == [
        *TORCHRUN,
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--",
        "train.py",
        "--lr",
        "1",
    ]
    assert run_command("--max-restarts=0", "--nproc-per-node=2", "--", "train.py", "--json") == [
        *TORCHRUN,
        "--max-restarts=0",
        "--nproc-per-node=2",
        "--",
        "train.py",
        "--json",
    ]
    assert run_command("--rdzv-backend", "c10d", "--standalone", "-m", "package.train") == [
        *TORCHRUN,
        "--nproc-per-node=1",
        "--rdzv-backend",
        "c10d",
        "--standalone",
        "-m",
        "--",
        "package.train",
    ]
    assert run_command("--no-python", "./train.sh") == [
        *TORCHRUN,
        "--nproc-per-node=1",
        "--no-python",
        "--",
        "./train.sh",
    ]


def test_the_common_options_of_torchrun_are_known_as_torchrun_takes_them():
    """So that its parser, and torch with it, need not be imported before the launch."""
    known = get_args_parser()._option_string_actions
    assert [known[name].nargs for name in FLAGS] == [0] * len(FLAGS)
    assert [known[name].nargs for name in WITH_VALUE] == [None] * len(WITH_VALUE)


def test_a_command_is_split_without_torch():
    """It would take a second in which nothing is launched."""
    code = (
        "import sys; from trainckpt.cli import run;"
        "from trainckpt.launcher import torchrun_command as command;"
        "command.split_torchrun_options(['--nnodes', '2', '--standalone', '-m', 'train']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_rare_option_of_torchrun_is_told_by_torchrun():
    """With its value, and as a flag."""
    assert run_command("--role", "x", "--run-path", "train.py")[-1] == "train.py"
    assert run_command("--role", "x", "--run-path", "train.py")[-5:-2] == [
        "--role",
        "x",
        "--run-path",
    ]


def test_an_option_of_ours_after_those_of_torchrun_is_told_apart():
    """`--nproc` is ours, torchrun's is `--nproc-per-node`: refused, not guessed."""
    with pytest.raises(ConfigurationError, match="has an option --nproc"):
        run_command("--rdzv-backend", "c10d", "--nproc", "2", "train.py")


def recorded(run, argv: list[str]) -> None:
    """A run with one attempt that was launched like this."""
    tier = open_directory(str(run))
    attempt_history.found_run(tier)
    facts = {
        "argv": redact_arguments(argv),
        "launch": {"kind": "python", "nproc": 1},
        "cwd": str(run),
    }
    attempt_history.claim(tier, lambda number: AttemptRecord(number, facts=facts))


def test_a_command_whose_secret_was_not_stored_is_not_guessed(tmp_path, capsys):
    """It says what is missing, and what to do instead."""
    run = tmp_path / "run"
    recorded(run, ["python", "train.py", "--api-key", "xyzzy", "--steps", "3"])
    assert "xyzzy" not in (run / "attempts" / "1.json").read_text()
    assert main(["resume", "--json", str(run)]) == 78
    error = json.loads(capsys.readouterr().out)
    assert "the recorded command holds a secret that was not stored" in error["error"]
    assert "--api-key <redacted>" in error["error"]
    assert "start the script again as before" in error["hint"]


def test_a_run_whose_attempts_left_no_command_is_66(tmp_path, capsys):
    """There is nothing to launch, and it says how to go on."""
    tier = open_directory(str(tmp_path / "run"))
    attempt_history.found_run(tier)
    attempt_history.claim(tier, AttemptRecord)
    assert main(["resume", str(tmp_path / "run")]) == 66
    assert "recorded its command" in capsys.readouterr().err


def test_a_recorded_interpreter_that_is_gone_is_78(tmp_path, capsys):
    """The run may have moved to a machine without that environment."""
    recorded(tmp_path / "run", [str(tmp_path / "no-such-python"), "train.py"])
    assert main(["resume", str(tmp_path / "run")]) == 78
    assert "cannot start" in capsys.readouterr().err

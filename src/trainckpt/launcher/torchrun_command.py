"""torchrun's command line: ours around it, the script's behind it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.errors import ConfigurationError
from trainckpt.format.names import RUN_RECORD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AGENT = "trainckpt.launcher.torchrun_agent"


def _spellings(*names: str) -> tuple[str, ...]:
    """Return options in both of torchrun's spellings: `--max-restarts` and `--max_restarts`."""
    return tuple(
        f"--{text}" for name in names for text in dict.fromkeys((name, name.replace("-", "_")))
    )


RESTARTS_OPTIONS = _spellings("max-restarts")
RESTARTS_VARIABLE = "PET_MAX_RESTARTS"  # torchrun's own, for the option
NODES_OPTIONS, NODES_VARIABLE = _spellings("nnodes"), "PET_NNODES"
NPROC_OPTIONS = _spellings("nproc-per-node")
MODULE_OPTIONS = ("-m", "--module")
NO_PYTHON_OPTIONS = _spellings("no-python")
# torchrun's common options; for others its own parser is asked, which takes a second to import.
FLAGS = (*MODULE_OPTIONS, *NO_PYTHON_OPTIONS, "--standalone")
WITH_VALUE = (
    *NPROC_OPTIONS,
    *RESTARTS_OPTIONS,
    *_spellings("nnodes", "node-rank", "master-addr", "master-port"),
    *_spellings("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"),
    *_spellings("log-dir", "redirects", "tee", "monitor-interval"),
    "-r",
    "-t",
)
SCRIPT_BYTES = 1 << 20
MAX_PATH = 1024  # what is longer is no path
_MENTION = re.compile(rb"\btrainckpt\b")


def torchrun_command(nproc: int, options: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` under torchrun with `nproc` processes on this host.

    The `--` keeps torchrun's parser away from the script's own options.
    """
    number = (
        [] if any(o.startswith(NPROC_OPTIONS) for o in options) else [f"--nproc-per-node={nproc}"]
    )
    return [sys.executable, "-m", AGENT, *number, *options, "--", *command]


def is_torchrun(command: Sequence[str]) -> bool:
    """Return True if `torchrun_command` made the command."""
    return list(command[1:3]) == ["-m", AGENT]


def split_torchrun_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `[torchrun options] [--] SCRIPT ARGS` where the script begins."""
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "--":
        name, equals, _ = arguments[index].partition("=")
        index += 2 if _takes_value(name) and not equals else 1
    command = list(arguments[index:])
    return list(arguments[:index]), command[1:] if command[:1] == ["--"] else command


def _takes_value(option: str) -> bool:
    if option in FLAGS or option in WITH_VALUE:
        return option in WITH_VALUE
    from torch.distributed.run import get_args_parser

    action = get_args_parser()._option_string_actions.get(option)
    if action is None:
        raise ConfigurationError(
            f"neither trainckpt run nor torchrun has an option {option}",
            hint="order: options of trainckpt run, options of torchrun, `--`, the script and its "
            "options",
        )
    return action.nargs != 0


def take_max_restarts(
    options: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[list[str], int]:
    """torchrun's options without its `--max-restarts`, and that number: restarts are ours.

    Raises:
        ConfigurationError: it is not a number.
    """
    environment = os.environ if environment is None else environment
    text, other_options, index = environment.get(RESTARTS_VARIABLE) or "0", list[str](), 0
    while index < len(options):
        name, equals, value = options[index].partition("=")
        if name in RESTARTS_OPTIONS:
            text = value if equals else "".join(options[index + 1 : index + 2])
            index += 1 if equals else 2
        else:
            other_options.append(options[index])
            index += 1
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ConfigurationError(
            f"--max-restarts {text[:60]!r} is not a number", hint="--max-restarts 3, for example"
        )
    return other_options, int(text)


def is_elastic(options: Sequence[str], environment: Mapping[str, str] | None = None) -> bool:
    """Return True if torchrun's options let the number of agents change: `--nnodes 1:4`."""
    environment = os.environ if environment is None else environment
    text = environment.get(NODES_VARIABLE, "")
    for option, following in pairwise([*options, ""]):
        name, equals, value = option.partition("=")
        if name in NODES_OPTIONS:
            text = value if equals else following
    fewest, colon, most = text.partition(":")
    return bool(colon) and fewest != most


def restarts_ranks(command: Sequence[str]) -> bool:
    """Return True if a command is a torchrun that starts its ranks again as agents come and go."""
    if not is_torchrun(command):
        return False
    return is_elastic(options_of(command[3:]))


def options_of(arguments: Sequence[str]) -> Sequence[str]:
    """Return torchrun's own options: what `torchrun_command` puts before the `--`."""
    return arguments[: arguments.index("--")] if "--" in arguments else arguments


def recorded_form(options: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the command that torchrun starts for each rank, in the form recorded for attempts."""
    if any(option in NO_PYTHON_OPTIONS for option in options):
        return list(command)
    module = ["-m"] if any(option in MODULE_OPTIONS for option in options) else []
    return [sys.executable, "-u", *module, *command]


def mentions_us(command: Sequence[str], cwd: str | None = None) -> bool:
    """Return True if the script of a command mentions trainckpt, so far as can be seen."""
    words = list(command)
    if is_torchrun(words) and "--" in words:
        separator = words.index("--")
        words = recorded_form(words[3:separator], words[separator + 1 :])
    folder = Path(cwd or ".")
    for word, following in pairwise([*words, ""]):
        if word == "-c":
            return _MENTION.search(following.encode()) is not None
        if word == "-m":
            module = following.replace(".", "/")
            files = [folder / f"{module}.py", folder / module / "__main__.py"]
            return _MENTION.match(following.encode()) is not None or any(map(_speaks, files))
        if not word.startswith("-") and _is_file(folder / word):
            if Path(word).name.startswith("python") or _is_program(folder / word):
                continue  # the interpreter
            return _speaks(folder / word)
    return False


def is_silent(command: Sequence[str], cwd: str | None = None) -> bool:
    """Return True if the script of a command was readable and does not mention trainckpt."""
    folder = Path(cwd or ".")
    files = (folder / word for word in command if not word.startswith("-"))
    scripts = [f for f in files if _is_file(f) and not f.name.startswith("python")]
    return bool(scripts) and not _is_program(scripts[0]) and not mentions_us(command, cwd)


def likely_run(command: Sequence[str], cwd: str | None = None) -> str | None:
    """Return the existing run named among a command's arguments, if any."""
    for word in command:
        for text in (word, word.partition("=")[2]):
            if text and len(text) < MAX_PATH and "\0" not in text:
                folder = Path(cwd or ".") / text
                with contextlib.suppress(OSError):
                    if (folder / RUN_RECORD).is_file():
                        return str(folder.absolute())
    return None


def _is_file(path: Path) -> bool:
    """Return True if an argument is a file; it may be longer than any file name."""
    with contextlib.suppress(OSError):
        return path.is_file()
    return False


def _is_program(path: Path) -> bool:
    return _head(path, 4) == b"\x7fELF"


def _speaks(path: Path) -> bool:
    return _MENTION.search(_head(path, SCRIPT_BYTES)) is not None


def _head(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError:
        return b""

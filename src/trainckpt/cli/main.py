"""`trainckpt`: find the verb, run it, turn errors into one sentence, a hint and an exit code.

Only the module of the verb that was asked for is imported: some pull torch, which takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainckpt.attempt.status_files import remove_import_mark
from trainckpt.cli.output import tell
from trainckpt.errors import INTERRUPTED, ConfigurationError, TrainckptError
from trainckpt.format.names import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import ModuleType

# verb -> what the help says; a module's own header says the same
VERBS = {
    "run": "launch a script through torchrun with checkpoints, and return its own exit code",
    "resume": "launch a run's recorded command again, from its newest usable checkpoint",
    "pause": "save and stop a live run, and wait until it has stopped",
    "status": "tell how a run is: alive or not, its step and pace, and its newest checkpoints",
    "report": "report on a run: attempts, checkpoints, goodput, failures and advice",
    "list": "list the checkpoints (snapshots) of a run, and why others are refused",
    "show": "show one checkpoint: tensors, cursor and origin",
    "verify": "read and check every byte of a run's checkpoints, naming each bad file",
    "export": "write one checkpoint in a format of other libraries",
    "import": "take over a checkpoint of another library, as a new run",
    "diff": "compare the tensors and values of two checkpoints",
    "flush": "copy a checkpoint to slower tiers, or repair its copies there",
    "fetch": "copy a checkpoint from a slower tier to the run directory, or repair its copy there",
    "prune": "delete checkpoints beyond the retention policy, and leftover files",
    "prove": "run a script straight, then stopped and resumed, and compare every bit",
    "demo": "prove that checkpoints resume exactly, on a small built-in example; needs no clone",
    "advise": "advise on the options of a job's checkpoints, each with its reason",
    "simulate": "simulate a training job under faults, with checkpoints as several systems do",
    "keygen": "make a new identity to read encrypted checkpoints, and its public recipient",
    "rewrap": "change the recipients of encrypted checkpoints, without rewriting their data",
    "doctor": "check this machine and a run directory for checkpoints, with a cure for each lack",
    "config": "show every option of the checkpoints, its value and its source",
}
# Those that read what a checkpoint holds, or relaunch what does.
READERS = ("resume", "show", "verify", "export", "diff", "rewrap", "prove")
ONLY_TELL = (
    "status",
    "report",
    "list",
    "show",
    "config",
)  # what is not read of them has no say in the exit code
# modules that have not the name of their verb: it is taken, or they have two
_MODULES = {
    "import": "import_",
    "list": "list_",
    "show": "show_",
    "flush": "copy_snapshot",
    "fetch": "copy_snapshot",
    "demo": "prove",
}
READER_GONE = 141  # 128 + SIGPIPE, as shells say it
RUNS = ("run", "resume")
UNWRITABLE = 74  # as sysexits.h says of output
IDENTITY_VARIABLE = "TRAINCKPT_IDENTITY"


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are errors of ours: one sentence, a hint, 78."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigurationError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def module_of(verb: str) -> ModuleType:
    """Import and return the module of a verb."""
    return import_module(f"trainckpt.cli.{_MODULES.get(verb, verb)}")


def function_of(verb: str, name: str) -> Callable[..., int]:
    """Return a function of the verb's module; with several verbs it is `<name>_<verb>` there."""
    module = module_of(verb)
    function: Callable[..., int] = getattr(module, f"{name}_{verb}", None) or getattr(module, name)
    return function


def build_parser(whole: Iterable[str] = VERBS) -> argparse.ArgumentParser:
    """Return the parser of the command line, with the arguments of the verbs in `whole`."""
    parser = Parser(
        prog="trainckpt",
        description="Checkpoints for PyTorch training that resume at the exact micro-batch.",
        epilog="RUN is a run directory or URL. SNAPSHOT is an id (s1200), a name (s1200~2.7), a "
        "tag or latest. `trainckpt VERB --help` has the options of a verb.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trainckpt {VERSION}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    whole = set(whole)
    for name, text in VERBS.items():
        sub = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON document")
        if name in READERS:
            sub.add_argument(
                "--identity", metavar="FILE", help="private key for encrypted checkpoints"
            )
        if name in whole:
            function_of(name, "add_arguments")(sub)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. What `run` does not know goes to torchrun, in its order."""
    parser = build_parser(VERBS.keys() & {*argv})
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and arguments.verb != "run":
        parser.error(f"{arguments.verb} does not know {' '.join(unknown)}")
    if unknown:
        arguments.command = [*unknown, *arguments.command]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    verb = ""
    try:
        arguments = parse(argv)
        verb = arguments.verb
        with _identity(getattr(arguments, "identity", None)):
            return function_of(verb, "execute")(arguments)
    except TrainckptError as error:
        return _refused(error, argv)
    except BrokenPipeError:
        return 0 if verb in ONLY_TELL else READER_GONE
    except OSError as error:
        if not _is_unwritable():
            return _starved_or_bug(error, argv)
        tell(f"error: stdout cannot be written to: {error.strerror}")
        return UNWRITABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever is left is our own mistake
        return _starved_or_bug(error, argv)


def _refused(error: TrainckptError, argv: Sequence[str]) -> int:
    """Print the error, as JSON with `--json`; return its exit code."""
    if "--json" in itertools.takewhile(lambda word: word != "--", argv):
        body = {"error": error.message, "code": error.exit_code, "hint": error.hint}
        with contextlib.suppress(OSError):
            print(json.dumps(body))
    else:
        tell(f"error: {error}")
    return error.exit_code


def _starved_or_bug(error: Exception, argv: Sequence[str]) -> int:
    from trainckpt.storage.store_errors import is_starved, starved

    if is_starved(error):
        return _refused(starved("this host has too little left", error), argv)
    tell(f"{traceback.format_exc()}error: this is a bug in trainckpt; please report it")
    return TrainckptError.exit_code


def _is_unwritable() -> bool:
    """Return True if stdout refuses to be written."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except io.UnsupportedOperation:  # it is no file
        return False
    except OSError:
        return True
    return False


@contextlib.contextmanager
def _identity(path: str | None) -> Iterator[None]:
    """Put the identity into the environment, for the processes that the verb launches."""
    previous = os.environ.get(IDENTITY_VARIABLE)
    if path:
        os.environ[IDENTITY_VARIABLE] = str(Path(path).absolute())
    try:
        yield
    finally:
        if previous is not None:
            os.environ[IDENTITY_VARIABLE] = previous
        elif path:
            del os.environ[IDENTITY_VARIABLE]


def entry() -> NoReturn:
    """Run the command and end the process without the interpreter's shutdown.

    Nothing is left to take down, and taking torch down would hold up the caller of `run`.
    """
    if {*RUNS} & {*sys.argv[1:2]}:  # a signal while they are imported is a stop as well
        from trainckpt.launcher.supervisor_signals import buffer_signals

        buffer_signals()
    remove_import_mark()
    _have_streams()
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        tell(f"error: stdout cannot be written to: {error.strerror}")
        if not {*RUNS} & {*sys.argv[1:2]}:  # their code says what the run came to
            code = code or UNWRITABLE
    os._exit(code)


def _have_streams() -> None:
    """Open the standard streams that are closed (`>&-`), so that no other file gets their numbers,
    and let them replace characters that a terminal lacks.
    """
    while (nothing := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(nothing, True)
    os.close(nothing)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    entry()

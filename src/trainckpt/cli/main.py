"""`trainckpt`: find the verb, run it, turn errors into one sentence, a hint and an exit code."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import traceback
from typing import TYPE_CHECKING, NoReturn

from trainckpt.cli import demo, list_, prove, resume, run, verify
from trainckpt.errors import ConfigurationError, TrainckptError

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS = {
    "run": run,
    "resume": resume,
    "list": list_,
    "verify": verify,
    "prove": prove,
    "demo": demo,
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose refusals are errors of ours: one sentence, a hint, 78."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigurationError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, every verb with its own help."""
    parser = Parser(
        prog="trainckpt",
        description="Checkpoints for PyTorch training that resume at the exact micro-batch.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        text = (module.__doc__ or "").splitlines()[0]
        sub = verbs.add_parser(
            name,
            help=text.partition(": ")[2],
            description=text.partition(": ")[2],
            allow_abbrev=False,
        )
        sub.add_argument("--json", action="store_true", help="one JSON document on stdout")
        module.add_arguments(sub)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. What `run` does not know goes to torchrun, in its order."""
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and arguments.verb != "run":
        parser.error(f"{arguments.verb} does not know {' '.join(unknown)}")
    if unknown:
        arguments.command = [*unknown, *arguments.command]
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse(argv)
        code: int = VERBS[arguments.verb].execute(arguments)
        return code
    except TrainckptError as error:
        if "--json" in itertools.takewhile(lambda word: word != "--", argv):
            body = {"error": error.message, "code": error.exit_code, "hint": error.hint}
            print(json.dumps(body))
        else:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception:  # noqa: BLE001 - whatever is left is our own mistake
        traceback.print_exc()
        print("error: this is a bug in trainckpt; please report it", file=sys.stderr)
        return TrainckptError.exit_code


if __name__ == "__main__":
    sys.exit(main())

"""`trainckpt`: find the verb, run it, turn errors into one sentence, a hint and an exit code."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from trainckpt.cli import demo, list_, prove, resume, run, verify
from trainckpt.errors import TrainckptError

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


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, every verb with its own help."""
    parser = argparse.ArgumentParser(
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


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        code: int = VERBS[arguments.verb].execute(arguments)
        return code
    except TrainckptError as error:
        if arguments.json:
            body = {"error": error.message, "code": error.exit_code, "hint": error.hint}
            print(json.dumps(body))
        else:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())

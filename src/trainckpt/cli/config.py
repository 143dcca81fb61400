"""config: show every option of the checkpoints, its value and its source."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.options import TABLE, misspelled_variables, read_options
from trainckpt.cli import output
from trainckpt.cli.output import tell

if TYPE_CHECKING:
    import argparse

DEFAULT = "default"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: the verb shows the options of a script started here and now."""


def execute(arguments: argparse.Namespace) -> int:
    """Print the options as a Checkpointer without arguments would read them."""
    options = read_options({})
    rows = [
        {
            "name": name,
            "value": _plain(getattr(options, name), options.origins[name], entry[0]),
            "origin": options.origins[name],
            "default": entry[0],
            "variable": f"TRAINCKPT_{name.upper()}",
            "wanted": entry[2],
        }
        for name, entry in TABLE.items()
    ]
    if arguments.json:
        output.document({"options": rows})
        return 0
    output.table(
        ("option", "value", "from", "variable", "to type"),
        [_row(row) for row in rows],
    )
    print("A Checkpointer's own arguments go before all of these.")
    for sentence in misspelled_variables(os.environ):
        tell(f"trainckpt: {sentence}")
    return 0


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    value = "not set" if row["value"] is None else str(row["value"])
    return (row["name"], value, row["origin"], row["variable"], row["wanted"])


def _plain(value: Any, origin: str, default: Any) -> Any:
    """Return a value for JSON; of a parsed one, its text."""
    if value == ():
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raw_value = default if origin == DEFAULT else os.environ.get(origin)
    text = getattr(value, "in_full", None) or getattr(value, "text", None)
    return text or raw_value or str(value)

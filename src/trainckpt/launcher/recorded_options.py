"""The options of a command that says none itself: as its attempt has recorded them.

Whoever brings a run back may stand in another folder, in another shell: what was set for the run
when it was launched counts, but for what is set here, and for what was too secret to be stored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.launch import REDACTED, recorded_environment
from trainckpt.errors import ConfigurationError
from trainckpt.launcher.outcome import START_AGAIN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.attempt.options import Options

# Without it secrets would be written in the clear: an error is better.
ENCRYPT_TO_VARIABLE = "TRAINCKPT_ENCRYPT_TO"


def read(facts: Mapping[str, Any]) -> Options:
    """The options, given an attempt's facts; without any they are this process's own.

    Raises:
        ConfigurationError: one is unreadable.
    """
    from trainckpt.attempt.options import read_options

    recorded_variables = {
        name: value
        for name, value in recorded_environment(facts).items()
        if name == ENCRYPT_TO_VARIABLE or REDACTED not in value
    }
    return read_options({}, {**recorded_variables, **os.environ}, folder(facts))


def start_again(environment: Mapping[str, str], cwd: str | Path | None) -> int:
    """The exit code that says "saved, start me again", for a command launched there with that.

    Where an option is unreadable, the default: the ranks refuse it by name.
    """
    from trainckpt.attempt.options import read_options

    try:
        return read_options({}, environment, Path(cwd or ".")).exit_code
    except (ConfigurationError, OSError):
        return START_AGAIN


def folder(facts: Mapping[str, Any]) -> Path:
    """Return the folder in which the command was launched."""
    cwd = facts.get("cwd")
    return Path(cwd) if isinstance(cwd, str) else Path.cwd()

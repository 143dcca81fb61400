"""A word for a command: what is noted of one command of a job must not count for another.

The same script with the same arguments may train several runs: the options in its environment, the
place's name and the folder belong to it too. Secrets do not, since the word is seen by others.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from trainckpt.lifecycle.run import launch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND_VARIABLE = "TRAINCKPT_COMMAND"  # the supervisor tells its ranks
PREFIX = "TRAINCKPT_"
DIGITS = 16


def command_word(
    argv: Sequence[str], cwd: str, run: str | None, environment: Mapping[str, str]
) -> str:
    """The word. Pure.

    Args:
        argv: What is launched, in the form in which attempts record it.
        cwd: Where.
        run: Its place, where the launcher names it.
        environment: Of the launcher.
    """
    shown = launch.redact_environment(environment)
    options = {name: value for name, value in shown.items() if name.startswith(PREFIX)}
    text = json.dumps([launch.redact_arguments(argv), cwd, run, options], sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]

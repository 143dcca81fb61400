"""What trainckpt says: through the logger `trainckpt`, by default on stderr."""

from __future__ import annotations

import logging

from trainckpt.lifecycle.run import uncaught

logger = logging.getLogger("trainckpt")


def prepare() -> None:
    """Make INFO lines visible where the script has configured no logging for us.

    And let the process end with the code of an error of ours that nobody catches.
    """
    uncaught.install()
    if logger.hasHandlers() or logger.level:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("trainckpt: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

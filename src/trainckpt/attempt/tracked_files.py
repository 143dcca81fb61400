"""Tracked files over one resume: cut back once, whenever the script names them.

track      before resuming: the file is compared with the snapshot before anything is applied
           after: it is compared and cut back at once
resumed    the snapshot was applied: cut back the tracked files
warn_uncut at the first boundary: warn of files that the snapshot knows and the script has not
           named; and of writes by earlier attempts, where none of them left a snapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import StateMismatch, TierUnavailable
from trainckpt.state.adapters import tracked_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainckpt.state.adapters.tracked_file import TrackedFile
    from trainckpt.state.captured import Saved
    from trainckpt.state.registry import Registry


class TrackedFiles:
    """The files of this rank.

    Args:
        registry: The tracked state.
        keep: Called in a proof, with the path of each file before anything is done to it.
    """

    def __init__(self, registry: Registry, keep: Callable[[Path], None] | None = None) -> None:
        self._registry = registry
        self._back_up = keep
        self._saved: Saved | None = None
        self._attempt = 0

    def track(self, file: Any) -> None:
        """Track a file by its path, or as `open(path, "a")` returned it.

        Raises:
            ConfigurationError: it has no path; or a proof must not write to it.
            StateMismatch: it is shorter than it was when the snapshot was taken.
        """
        tracked = self._registry.add_file(file)
        if self._back_up is not None:
            self._back_up(tracked.path)
        if self._saved is not None:
            differences = tracked.differences(self._saved)
            if differences:
                raise StateMismatch("a tracked file has lost what it held", differences)
            self._cut_back(tracked)

    def resumed(self, saved: Saved, attempt: int) -> None:
        """Cut back the files, once a snapshot was applied."""
        self._saved, self._attempt = saved, attempt
        for file in self._registry.files:
            self._cut_back(file)

    def warn_uncut(self, attempt: int) -> None:
        """Warn of files longer than the trained part. First boundary of this attempt."""
        saved, self._saved = self._saved, None
        known = {file.name: file.length() for file in self._registry.files}
        if saved is None and attempt > 1:
            for name, length in known.items():
                if length:
                    logger.warning(
                        "%s is tracked and holds %d bytes: no attempt before this one left a "
                        "snapshot, so what they wrote there is not cut off",
                        name,
                        length,
                    )
        if saved is None or not saved.is_own:  # of another rank's files nothing is known here
            return
        for name, length in tracked_file.lengths(saved).items():
            if name not in known:
                logger.warning("%s is tracked no more, and not cut back to %d bytes", name, length)

    def _cut_back(self, file: TrackedFile) -> None:
        assert self._saved is not None
        try:
            aside = 0 if self._back_up is not None else self._attempt
            done = file.cut_back(self._saved, aside)
        except OSError as error:
            raise TierUnavailable(
                f"{file.name} cannot be cut back: {error.strerror or error}",
                hint=f"make {file.path} and its folder writable for this user",
            ) from error
        if done:
            logger.info("%s", done)

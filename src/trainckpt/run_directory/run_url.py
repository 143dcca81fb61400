"""Open the run directory or URL that the user typed as a tier."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainckpt.attempt.options import LOCAL
from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format import names
from trainckpt.preemption.notice_file import MAX_BYTES, NoticeFiles, parse
from trainckpt.preemption.polling import PollingSource
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import open_object_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.notice import NoticeSource
    from trainckpt.storage.base import RunTier, Tier


PROVE_VARIABLE = "TRAINCKPT_PROVE"
WORK = "work"  # of a proof's plan: each run's own copy of the file system, as far as it has one
NAME_VARIABLE = "TRAINCKPT_RUN"


def open_run_tier(run: str | os.PathLike[str] | None) -> RunTier:
    """Open the tier at `run`: a path or the URL of an object store; None: the launcher's.

    Raises:
        ConfigurationError: an unknown kind of URL, or none given.
    """
    run = run if run is not None else os.environ.get(NAME_VARIABLE)
    proof = os.environ.get(PROVE_VARIABLE)
    if proof:  # a proof leaves the user's own run alone
        run = json.loads(proof)["place"]
    if run is None:
        raise ConfigurationError(
            "no run directory is named",
            hint='name a directory, Checkpointer("runs/x", ...), or launch the script with '
            "`trainckpt run --run runs/x`",
        )
    return open_tier_at(run, LOCAL)  # the run directory has this name at any location


def open_tier_at(run: str | os.PathLike[str], name: str | None = None) -> RunTier:
    """Open the tier at `run` as `open_run_tier` does, but without a proof's redirection.

    `name`: the tier's; None: the kind of store.
    """
    protocol, path = _split_protocol(os.fspath(run))
    if protocol not in ("", "file", "local"):
        return open_object_store(os.fspath(run), name=name)
    if not path:
        raise ConfigurationError("the name of the run directory is empty", hint="name a directory")
    return open_directory(path, name or LOCAL)


def in_proof(path: str) -> str:
    """Return the path to which a run under proof writes instead of `path`: in a copy of its own.

    Outside a proof, and for a URL, `path` itself.
    """
    root = json.loads(os.environ.get(PROVE_VARIABLE) or "{}").get(WORK)
    if root is None or "://" in path:
        return path
    absolute = Path(path).absolute()
    is_inside = Path(root) in absolute.parents
    return str(absolute if is_inside else Path(root, *absolute.parts[1:]))


def seen_from(folder: Path, url: str) -> str:
    """Return the URL as seen from working directory `folder`: a path may be relative to it."""
    if _split_protocol(url)[0] or url.startswith("~"):
        return url
    return str(folder / url)


def _split_protocol(url: str) -> tuple[str, str]:
    """Split off the protocol, "" for a path, like fsspec (slow to import), except for `data:`."""
    protocol, mark, path = url.partition("://")
    is_one = mark and len(protocol) > 1 and "/" not in protocol  # else a path, of strange names
    return (protocol, path) if is_one else ("", url)


def open_directory(path: str, name: str = LOCAL) -> LocalTier:
    """Open the tier at a path, whatever the environment says."""
    if "\0" in path:
        raise ConfigurationError(f"the run directory is no path: {path[:100]!r}")
    try:
        return LocalTier(Path(path).expanduser(), name=name)
    except RuntimeError as error:
        raise ConfigurationError(f"{path[:100]}: {error}", hint="name a directory") from error


def notices_folder(tier: LocalTier) -> Path:
    """Return the folder for notices to this run's attempts."""
    return tier.root / names.NOTICES


def notice_source(
    tier: RunTier, attempt: int, say: Callable[[str], object], *, is_first_of_host: bool
) -> NoticeSource | None:
    """Return the source of notices for an attempt; None: another rank of this host polls them."""
    if isinstance(tier, LocalTier):
        return NoticeFiles(notices_folder(tier), attempt, say)
    return StoredNotices(tier, attempt, say) if is_first_of_host else None


# ---- notices in an object store, with the names and contents of notice files
#
# Listing the folder takes as long as the network does, so a thread of its own polls every few
# seconds, on one rank of each host. A failed poll is repeated; a store that does not answer stops
# nothing.


LOOK_EVERY_S = 3.0


class StoredNotices(PollingSource):
    """Notices of one attempt. Polling goes on: a stricter notice may follow."""

    def __init__(
        self, tier: Tier, attempt: int, say: Callable[[str], object], every_s: float = LOOK_EVERY_S
    ) -> None:
        super().__init__(list, every_s, say, "trainckpt-notices")
        self._tier, self._prefix = tier, f"{attempt}-"
        self._seen: dict[str, str] = {}  # name -> why it is no notice, "" if it is one
        self._said = ""

    def look(self) -> None:
        """Poll once."""
        try:
            listed = self._tier.list(names.NOTICES)
        except TrainckptError as error:
            if error.message != self._said:
                self._say(f"notices cannot be looked for: {error.message}")
            self._said = error.message
            return
        self._said = ""
        for name in listed:
            if name.startswith(self._prefix) and name.endswith(".json"):
                self._read(name)

    def _read(self, name: str) -> None:
        if self._seen.get(name) == "":
            return
        try:
            data = self._tier.read(f"{names.NOTICES}/{name}", max_bytes=MAX_BYTES)
            notice = parse(json.loads(data))
        except (TrainckptError, ValueError, RecursionError) as error:
            why = getattr(error, "message", str(error))[:200]
            if self._seen.get(name) != why:
                self._say(f"the notice {name} is not one, so nobody stops because of it: {why}")
            self._seen[name] = why
            return
        self._seen[name] = ""
        with self._lock:
            self._found.append(notice)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.look()
            self._stopping.wait(self._pause_s)

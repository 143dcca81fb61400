"""The host's word: that a dump which comes back from another place was taken here, as it is.

Images are what processes go on from: whoever can make one can have anything run here. A copy of a
dump therefore carries a code that only this user on this host can compute, and nothing comes back
without it. Its key is made when it is first needed, and leaves this host never:

    $XDG_STATE_HOME/trainckpt/dump-key     (~/.local/state, where that is not set)

A dump is of no use on another host, so nothing is lost by that.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from trainckpt.errors import TierUnavailable
from trainckpt.tiers.private import is_private

KEY_BYTES = 32
PURPOSE = b"trainckpt/dump\0"
MAX_BYTES = 200  # of a word


def give(record: bytes) -> bytes:
    """The word for a dump's record, as it is stored.

    Raises:
        TierUnavailable: the key can be neither read nor made.
    """
    return _code(_key(make=True), record)


def is_ours(record: bytes, word: bytes) -> bool:
    """Whether this host has given its word for this very record.

    Raises:
        TierUnavailable: the key cannot be read, though it is there.
    """
    key = _key(make=False)
    return bool(key) and hmac.compare_digest(_code(key, record), word)


def key_file() -> Path:
    """Where the key lies."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "trainckpt" / "dump-key"


def _code(key: bytes, record: bytes) -> bytes:
    return hmac.new(key, PURPOSE + record, "sha256").hexdigest().encode()


def _key(*, make: bool) -> bytes:
    """b"": there is none, and none was to be made."""
    path = None
    try:
        path = key_file()
        if make and not path.exists():
            _make(path)
        if not path.exists():
            return b""
        if not is_private(path.parent) or path.stat().st_mode & 0o077:
            raise TierUnavailable(
                f"{path} may be read by others, so it proves nothing",
                hint=f"chmod 700 {path.parent}; chmod 600 {path}",
            )
        key = path.read_bytes()
    except (OSError, RuntimeError) as error:
        where = "" if path is None else f", {path},"
        hint = "set XDG_STATE_HOME to a directory of yours" if path is None else ""
        raise TierUnavailable(
            f"the key of this host{where} cannot be used: {error}", hint=hint
        ) from error
    if len(key) != KEY_BYTES:
        raise TierUnavailable(f"{path} holds no key", hint="remove it: another one is made")
    return key


def _make(path: Path) -> None:
    path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its key counts
            os.link(temporary, path)
    finally:
        temporary.unlink()

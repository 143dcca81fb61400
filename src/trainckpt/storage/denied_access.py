"""Say which file or folder denies access to this user, whose it is, and what to type.

A denied call names only the path it was given: a file that may not even exist. What denies it is a
folder above it that may not be searched, the folder that would change, or the file itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DENIED = frozenset((errno.EACCES, errno.EPERM))
READING = ("look at", "read", "list")  # verbs of calls that change no folder


def is_denied(error: BaseException) -> bool:
    """Return True if a call was denied to this user; the error may have the system's as a cause."""
    found = error if isinstance(error, OSError) else error.__cause__
    return isinstance(found, OSError) and found.errno in DENIED


def explain(verb: str, path: Path, root: Path | None = None) -> tuple[str, str]:
    """Return who owns what denied the call, "" if unknown, and the next thing to type.

    Args:
        verb, path: As in the error.
        root: Directory of the run, if the path belongs to one: all of it has one owner.
    """
    at = _denying(verb, path)
    with contextlib.suppress(OSError, ImportError, AttributeError):  # also: not a POSIX system
        found, me = at.stat(), os.geteuid()
        mode = stat.S_IMODE(found.st_mode)
        owner, this = _user(found.st_uid), _user(me)
        is_inside = root is not None and at.is_relative_to(root)
        why = f" ({at} belongs to {owner}, mode {mode:04o}; this is {this})"
        if found.st_uid == me and _may(at, _needed(verb, at)):
            return why, f"see why the file system refuses {this}: {at} permits it"
        if found.st_uid == me:
            return why, f"chmod -R u+rwX {root}" if is_inside else f"chmod u+rwx {at}"
        if not is_inside:
            return why, _to_get_past(verb, at, root or path, owner, this)
        return why, f"start it as {owner}, or hand it over, as root: chown -R {this} {root}"
    return "", f"make {at} readable and writable for this user"


def _to_get_past(verb: str, at: Path, wanted: Path, owner: str, this: str) -> str:
    """Return what to type where something outside the run denies access: it is not this user's."""
    if verb in READING or not _may(at, os.X_OK):
        letters = "x" if at != wanted else "rX"
        return f"start it as {owner}, or open the way: chmod o+{letters} {at}, as {owner}"
    make = f"mkdir {wanted}; chown {this} {wanted}"
    return f"name a place that {this} may write to, or have it made, as {owner}: {make}"


def _denying(verb: str, path: Path) -> Path:
    """Return the highest folder on the way that may not be searched, else what the call needs."""
    nearest = path
    for folder in reversed(path.parents):
        if not os.path.lexists(folder):
            break
        nearest = folder
        if not _may(folder, os.X_OK):
            return folder
    if verb in READING and os.path.lexists(path):
        return path
    return nearest


def _needed(verb: str, at: Path) -> int:
    if verb in READING:
        return os.R_OK | (os.X_OK if at.is_dir() else 0)
    return os.W_OK | os.X_OK


def _may(path: Path, mode: int) -> bool:
    own = {"effective_ids": True} if os.access in os.supports_effective_ids else {}
    return os.access(path, mode, **own)


def _user(number: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return str(number)

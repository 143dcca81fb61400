"""Tell whether an attempt, or a process of this host, is alive.

    RUN/attempts/<n>.heartbeat    rewritten every 5 s by rank 0, removed at the attempt's end

Its last write counts, by the clock of the file system that holds it: hosts' clocks differ. A reader
makes a file of its own beside it and compares the two times.

The content is a JSON object: what the attempt does now (docs/format.md). It says nothing about
being alive. A reader may meet a file that is being rewritten, and then reads again.

Threads: one of its own writes and removes the file, so storage that hangs delays no other thread. A
write that fails is ignored: the run goes on, and looks dead to `pause` if they all fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from trainckpt.attempt.log import logger
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.format import json_io, names
from trainckpt.storage.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainckpt.storage.base import RunTier


def is_alive(pid: int) -> bool:
    """Return True if the process is alive, or if that cannot be decided.

    A process that has ended and was not waited for is not alive.

    Args:
        pid: Process id, above 0.
    """
    import psutil

    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # or no number of a process
        return False
    except OSError:
        pass  # another user's
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:  # hidden from this user
        return True


BEAT_EVERY_S = 5.0
ALIVE_S = 15.0
STOP_WITHIN_S = 2.0
SUFFIX = ".heartbeat"
MAX_BYTES = 1 << 20
READ_TRIES, READ_AGAIN_S = 5, 0.02
_PRIVATE = 0o600
# A pipe in place of the file must not block.
_NO_FOLLOW = (
    getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
)


class Heartbeat:
    """Sequence of calls, in one process: `start`, any number of `beat_soon`, `stop` at the end."""

    def __init__(
        self,
        tier: RunTier,
        attempt: int,
        *,
        content: Callable[[], dict[str, Any]] = dict,
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        """`content`: what the attempt does now; called on the heartbeat's thread."""
        self._tier, self._key = tier, key_of(attempt)
        self._content, self._every_s = content, every_s
        self._stopping, self._due = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._logged = self._keep = False

    def start(self) -> None:
        """Write it now and from now on, from another thread. Never blocks, never fails."""
        if self._thread is not None:
            return
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="trainckpt-heartbeat", daemon=True)
        self._thread.start()

    def beat_soon(self) -> None:
        """Write it now: the attempt does something else. Any thread."""
        self._due.set()

    def stop(self, *, keep: bool = False) -> None:
        """Remove the file at the attempt's end, unless another process writes it too (`keep`).

        Waits 2 s at most; may be repeated.

        A forked child has the object but not the thread: nothing happens there.
        """
        self._keep = keep
        self._stopping.set()
        self._due.set()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(STOP_WITHIN_S)

    def _run(self) -> None:
        beats = 0
        while not self._stopping.is_set():
            beats += 1
            try:
                self._beat(self._text(beats))
            except (OSError, TrainckptError) as error:
                self._warn_once(error)
            self._due.wait(self._every_s)
            self._due.clear()
        with contextlib.suppress(OSError, TrainckptError):
            if not self._keep:
                self._tier.remove(self._key)

    def _text(self, beats: int) -> bytes:
        body: dict[str, Any] = {"beat": beats}
        try:
            body |= self._content()
        except Exception as error:  # noqa: BLE001 - it beats all the same
            body["unknown"] = repr(error)[:200]
        return json.dumps(body).encode()

    def _beat(self, data: bytes) -> None:
        if isinstance(self._tier, LocalTier):
            _write(self._tier.root / self._key, data)
        else:
            self._tier.replace(self._key, data)

    def _warn_once(self, error: OSError | TrainckptError) -> None:
        if not self._logged:
            self._logged = True
            logger.warning(
                "the heartbeat cannot be written, so `trainckpt pause` may not find this run: %s",
                getattr(error, "message", error),
            )


def key_of(attempt: int) -> str:
    """Return the key of an attempt's heartbeat."""
    return f"{names.ATTEMPTS}/{attempt}{SUFFIX}"


def attempt_of(name: str) -> int | None:
    """Return the attempt of a heartbeat's file name, or None for another file."""
    number, suffix, rest = name.partition(SUFFIX)
    return names.recorded_attempt(f"{number}.json") if suffix and not rest else None


def path_of(tier: LocalTier, attempt: int) -> Path:
    """Return the path of an attempt's heartbeat."""
    return tier.root / key_of(attempt)


def age_s(tier: RunTier, attempt: int) -> float | None:
    """Return the seconds since the last beat, by the file system's clock; None if there is no file.

    On a read-only mount this host's clock has to do. An object store sends its time with every
    answer.
    """
    if not isinstance(tier, LocalTier):
        return tier.age_s(key_of(attempt))
    now_s = _place_clock_s(tier)
    try:
        # Opened, not only looked at: a network file system asks its server then.
        descriptor = os.open(path_of(tier, attempt), os.O_RDONLY | _NO_FOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(descriptor)
        return max(0.0, now_s - found.st_mtime) if S_ISREG(found.st_mode) else None
    finally:
        os.close(descriptor)


def read(tier: RunTier, attempt: int) -> dict[str, Any]:
    """Return the content of an attempt's last beat; empty without one, or if it is unreadable.

    Raises:
        TierUnavailable: the tier refused.
    """
    for number in range(READ_TRIES):
        if number:
            time.sleep(READ_AGAIN_S)
        with contextlib.suppress(UnusableSnapshot):
            key = key_of(attempt)
            body = json_io.parse(tier.read(key, max_bytes=MAX_BYTES), key, max_bytes=MAX_BYTES)
            return body if isinstance(body, dict) else {}
        with contextlib.suppress(UnusableSnapshot):
            if tier.size(key_of(attempt)) is not None:
                continue
        break  # there is none, or no file
    return {}


def attempt_is_alive(tier: RunTier, attempt: int) -> bool:
    """Return True if the attempt's heartbeat is less than 15 s old."""
    age = age_s(tier, attempt)
    return age is not None and age < ALIVE_S


def _write(path: Path, data: bytes) -> None:
    # In place: no name appears or disappears. One write, with spaces over a longer content before.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _NO_FOLLOW, _PRIVATE)
    try:
        os.write(descriptor, data.ljust(min(os.fstat(descriptor).st_size, MAX_BYTES)))
    finally:
        os.close(descriptor)


def _place_clock_s(tier: LocalTier) -> float:
    path = tier.root / names.ATTEMPTS / f".tmp-{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, _PRIVATE)
    except OSError:
        return time.time()
    try:
        with contextlib.suppress(OSError):  # a full disk; that it was made has a time as well
            os.write(descriptor, b"\n")
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.unlink()

"""Turn signals into notices: the C handler writes one byte, the watcher thread reads it.

A Python signal handler runs on the main thread, between two bytecodes: while main is inside a
collective that is seconds late, or never. The C handler itself writes to the wakeup descriptor, at
once, so the watcher learns of the signal wherever main is. CPython writes to it only for signals
that have a Python handler too. That handler only records the number: no I/O, no logging, no
collective in a handler.

Order of events:

    start   main thread   socketpair; handlers; the wakeup descriptor, a previous one chained
    signal  any thread    C handler writes the number; later the Python handler records it
    poll    watcher       reads numbers, forwards each to the chained descriptor, makes notices
    check   main thread   at most once a second: puts the descriptor back if other code took it
                          (asyncio does, on add_signal_handler and on loop.close)
    leaves  main thread   the process is stopped, its exit code decided: `stop` will not restore
                          a handler that would let a later SIGTERM kill it on its way out
    stop    main thread   restores the previous handlers and descriptor

If the descriptor was taken and `check` is not called, the numbers recorded by the Python handler
still become notices at the watcher's next poll, late but not lost. They never count as a second
interrupt, because a handler may run long after its byte was read.

Other handlers are replaced, not called: one that exits would take the save with it. They are named
in `replaced`, for the owner to log, and restored by `stop`. An ignored SIGINT (nohup, a shell's
background job) stays ignored.

A forked child shares the socket, so its signals would arrive here. The signals are blocked around
every fork until the child has dropped handlers and descriptor. (Python's hooks do not run for a
child forked from C; the window until its exec remains.) Workers of a pool forked while a source
listens ignore Ctrl-C, which a terminal sends to all: the task of a worker killed by it never
returns, and main, which trains on to the boundary, would wait for it for ever. Workers keep
SIGTERM: a pool ends them by it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from trainckpt.errors import INTERRUPTED
from trainckpt.notice import Notice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType


DEFAULT_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
CHECK_INTERVAL_S = 1.0


def leave_at_once() -> None:
    """End this process at once on a second Ctrl-C, with 128 + SIGINT."""
    os._exit(INTERRUPTED)


class SignalSource:
    """Turn signals into stop notices; a `NoticeSource`.

    Attributes:
        available: True while signals are received. False before `start`, after `stop`, and if
            `start` was not called from the main thread.
        why: One sentence on the reason for False.
        replaced: Handlers that ours stand in for, such as "SIGTERM handler main.save".
    """

    def __init__(
        self,
        signals: Iterable[signal.Signals] = DEFAULT_SIGNALS,
        on_second_interrupt: Callable[[], object] = leave_at_once,
        seconds_left: float | None = None,
    ) -> None:
        self.available = False
        self.why = "not started"
        self.replaced: list[str] = []
        self._signals = tuple(signals)
        self._seconds_left = seconds_left  # the sender's grace period; None: not stated
        self._on_second_interrupt = on_second_interrupt
        self._previous: dict[signal.Signals, Any] = {}
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._chained: _Descriptor | None = None
        self._noted: set[int] = set()
        self._seen: set[int] = set()
        self._interrupts = 0
        self._next_check = 0.0
        self._ignores_later = False

    def start(self) -> None:
        """Install handlers and the wakeup descriptor. Off the main thread, only set `why`.

        Repeated: nothing more happens.
        """
        if self._ends is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            self.why = "signals can only be watched by a Checkpointer made on the main thread"
            return
        self._ends = socket.socketpair()
        for end in self._ends:
            end.setblocking(False)
        _cover_forks(self)
        self._take_wakeup_fd()
        for signum in self._signals:
            self._install(signum)
        self.available, self.why = True, ""

    def fileno(self) -> int | None:
        """Return the reading end of the socketpair."""
        return self._ends[0].fileno() if self._ends else None

    def poll(self) -> list[Notice]:
        """Return one notice per signal; a second SIGINT ends the process from here."""
        noted = tuple(self._noted)
        numbers = [number for number in self._received() if number in self._previous]
        self._interrupts += numbers.count(signal.SIGINT)
        if self._interrupts > 1:
            self._on_second_interrupt()
        late = [number for number in noted if number not in self._seen and number not in numbers]
        self._seen.update(numbers, late)
        left = self._seconds_left
        reasons = [signal.Signals(number).name for number in numbers + late]
        return [Notice(reason=reason, seconds_left=left) for reason in reasons]

    def check(self) -> None:
        """Put the wakeup descriptor back if it was taken. Main thread; cheap at each boundary."""
        now = time.monotonic()
        if now >= self._next_check and self.available:
            self._next_check = now + CHECK_INTERVAL_S
            self._take_wakeup_fd()

    def ignore_later(self) -> None:
        """Ignore later signals on the way out: the exit code is decided, and `stop` keeps it.

        Senders repeat themselves, and reach one rank later than another: the default action would
        turn a finished stop into a death by SIGTERM. SIGINT is restored all the same: a person who
        presses Ctrl-C again wants the process to end now.
        """
        self._ignores_later = True

    def stop(self) -> None:
        """Restore the handlers replaced by `start`, unless other code has changed them since.

        Python allows that on the main thread only. Elsewhere each handler restores its predecessor,
        and sends the signal again, at its next call; another `stop` from the main thread does the
        rest.
        """
        if self._ends is None:
            return
        self.available, self.why = False, "stopped"
        if threading.current_thread() is threading.main_thread():
            for signum in tuple(self._previous):
                self._restore(signum)
            self._give_wakeup_fd_back()
            _live.discard(self)
            self._close()

    def _install(self, signum: signal.Signals) -> None:
        previous = signal.getsignal(signum)
        if signum == signal.SIGINT and previous == signal.SIG_IGN:
            return
        signal.signal(signum, self._note)
        if hasattr(signal, "siginterrupt"):
            # Spare C code an unexpected EINTR.
            signal.siginterrupt(signum, False)
        self._previous[signum] = previous
        if previous not in (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler):
            self.replaced.append(f"{signum.name} handler {_name_of(previous)}")

    def _note(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's
        self._noted.add(signum)
        if not self.available:
            self._restore(signal.Signals(signum))
            signal.raise_signal(signum)

    def _restore(self, signum: signal.Signals) -> None:
        previous = self._previous.pop(signum, None)
        if signal.getsignal(signum) == self._note:
            if self._ignores_later and signum != signal.SIGINT:
                _be_deaf_to(signum)
                return
            if previous is None:  # it was installed by C code, or put back already
                previous = _default(signum)
            signal.signal(signum, previous)

    def _received(self) -> bytes:
        received = b""
        with contextlib.suppress(BlockingIOError, OSError):
            while self._ends and (chunk := self._ends[0].recv(4096)):
                received += chunk
        if self._chained and received and not self._chained.write(received):
            self._chained = None
        return received

    def _take_wakeup_fd(self) -> None:
        assert self._ends is not None
        ours = self._ends[1].fileno()
        found = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if found not in (-1, ours):
            self._chained = _Descriptor.of(found)

    def _give_wakeup_fd_back(self) -> None:
        assert self._ends is not None
        chained = self._chained.fd if self._chained and self._chained.is_same() else -1
        found = signal.set_wakeup_fd(chained, warn_on_full_buffer=False)
        if found not in (-1, self._ends[1].fileno()):
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    def _close(self) -> None:
        for end in self._ends or ():
            end.close()
        self._ends = None

    def _forget_in_child(self) -> None:
        self.available, self.why = False, "a forked child does not watch its parent's signals"
        signal.set_wakeup_fd(-1)
        for signum in tuple(self._previous):
            if signal.getsignal(signum) == self._note:
                signal.signal(signum, _default(signum))
        self._previous.clear()
        self._close()


class _Descriptor:
    """Wakeup descriptor of other code, written to only while it is the same open file.

    Its owner may close it unnoticed, and a data file may then get its number.
    """

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self.fd = fd
        self._identity = identity

    @classmethod
    def of(cls, fd: int) -> _Descriptor | None:
        identity = _identity(fd)
        return None if identity is None else cls(fd, identity)

    def is_same(self) -> bool:
        return _identity(self.fd) == self._identity

    def write(self, numbers: bytes) -> bool:
        """Forward the byte; return False once the descriptor is another file. A full one loses
        bytes, as always."""
        if not self.is_same():
            return False
        with contextlib.suppress(OSError):
            os.write(self.fd, numbers)
        return True


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        stat = os.fstat(fd)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _name_of(handler: Any) -> str:
    if handler is None:
        return "not installed from Python"
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    return f"{getattr(handler, '__module__', '?')}.{name}"


def _default(signum: int) -> Any:
    return signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL


def _be_deaf_to(signum: signal.Signals) -> None:
    """Drop the signal with a Python handler until the process ends.

    Not SIG_IGN at once: programs executed meanwhile would inherit it. The interpreter removes
    Python handlers while it ends, so an exit hook ignores the signal from there on.
    """
    signal.signal(signum, _deaf)
    atexit.register(_ignore, signum)


def _deaf(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the process is leaving already."""


def _ignore(signum: signal.Signals) -> None:
    if signal.getsignal(signum) is _deaf:
        signal.signal(signum, signal.SIG_IGN)


_live: weakref.WeakSet[SignalSource] = weakref.WeakSet()
_hooked = False
_mask = threading.local()


def _cover_forks(source: SignalSource) -> None:
    global _hooked
    _live.add(source)
    if not _hooked and hasattr(os, "register_at_fork"):
        _hooked = True
        multiprocessing.util.register_after_fork(_children, _Children.spare)
        os.register_at_fork(
            before=_block_signals,
            after_in_parent=_unblock_signals,
            after_in_child=_forget_in_child,
        )


def _block_signals() -> None:
    wanted = {signum for source in tuple(_live) for signum in source._signals}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted) if wanted else None


def _unblock_signals() -> None:
    if getattr(_mask, "before", None) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


class _Children:
    """Hook called by multiprocessing in a child it has forked."""

    was_listening = False

    def spare(self) -> None:
        process = multiprocessing.current_process()
        target = getattr(process, "_target", None)
        is_worker = process.daemon or getattr(target, "__module__", "") == _EXECUTOR
        if self.was_listening and is_worker:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


_EXECUTOR = "concurrent.futures.process"
_children = _Children()


def _forget_in_child() -> None:
    _children.was_listening = bool(_live)
    for source in tuple(_live):
        source._forget_in_child()
    _live.clear()
    for signum in DEFAULT_SIGNALS:
        if signal.getsignal(signum) is _deaf:
            signal.signal(signum, _default(signum))
    _unblock_signals()


def raised_by_handler(error: BaseException) -> BaseException | None:
    """Return `error` or the cause of it that an active signal handler raised, or None."""
    codes = {_code(signal.getsignal(signum)) for signum in signal.valid_signals()} - {None}
    seen: BaseException | None = error
    while seen is not None:
        frame = seen.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code in codes:
                return seen
            frame = frame.tb_next
        seen = seen.__cause__
    return None


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not hasattr(handler, "__code__") and not hasattr(handler, "__func__"):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004 - the class's own
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None)

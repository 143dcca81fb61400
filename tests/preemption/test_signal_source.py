"""Signals as notices: real signals, to this process or to one of its own."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

from trainckpt.preemption import SignalSource
from trainckpt.ranks import BoundaryGate, NoticeWatcher, World, local_store

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def own_handler(signum, frame):
    raise AssertionError("a replaced handler was called")


@pytest.fixture(autouse=True)
def everything_is_put_back():
    """Whatever a test does, this process keeps its handlers and its wakeup descriptor."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
    signal.set_wakeup_fd(wakeup)


@pytest.fixture
def source():
    source = SignalSource(on_second_interrupt=lambda: source.left.append(1))
    source.left = []
    source.start()
    yield source
    source.stop()


def reasons_within(source, limit_s=5.0):
    """Reasons of what arrives first, waiting on the descriptor as the watcher does."""
    select.select([source.fileno()], [], [], limit_s)
    return [notice.reason for notice in source.poll()]


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_becomes_a_stop_notice_named_after_it(source, signum):
    """Each of the default signals."""
    signal.raise_signal(signum)
    (notice,) = source.poll()
    assert (notice.reason, notice.action) == (signum.name, "stop")
    assert source.poll() == []


def test_a_signal_is_seen_by_the_watcher_while_main_is_stuck_in_c():
    """Main sits in a C read, where no Python handler runs, until the notice has arrived."""
    read, write = os.pipe()
    gate = BoundaryGate()
    heard = SignalSource()

    class Telling(NoticeWatcher):
        def request(self, notice):
            super().request(notice)
            os.write(write, b"!")

    watcher = Telling(gate, local_store(World(0, 1, 0, "here")), [heard])
    watcher.start()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    buffer = ctypes.create_string_buffer(1)
    assert ctypes.CDLL(None).read(read, buffer, 1) == 1
    assert gate.at_boundary().notice.reason == "SIGTERM"
    watcher.stop()


def test_handlers_and_descriptor_are_put_back():
    """As found, also a handler of somebody else, which is named while it is replaced."""
    signal.signal(signal.SIGTERM, own_handler)
    source = SignalSource()
    source.start()
    assert source.replaced == [f"SIGTERM handler {__name__}.own_handler"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert reasons_within(source) == ["SIGTERM"]
    source.stop()
    source.stop()
    assert signal.getsignal(signal.SIGTERM) is own_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_installed_since_is_left_alone(source):
    """Whoever came after us knows what they did."""
    signal.signal(signal.SIGTERM, own_handler)
    source.stop()
    assert signal.getsignal(signal.SIGTERM) is own_handler


def test_an_ignored_interrupt_stays_ignored():
    """nohup, or a shell's background job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = SignalSource()
    source.start()
    signal.raise_signal(signal.SIGINT)
    assert source.poll() == []
    source.stop()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_wakeup_descriptor_that_was_there_gets_every_byte_and_is_put_back():
    """An event loop goes on hearing its signals."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    source = SignalSource()
    source.start()
    signal.raise_signal(signal.SIGUSR1)
    assert reasons_within(source) == ["SIGUSR1"]
    assert reading.recv(10) == bytes([signal.SIGUSR1])
    source.stop()
    assert signal.set_wakeup_fd(-1) == writing.fileno()
    reading.close()
    writing.close()


def test_a_chained_descriptor_that_became_another_file_is_never_written_to(tmp_path):
    """Its owner closed it, and the number went to a data file."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    source = SignalSource()
    source.start()
    data = (tmp_path / "data").open("wb")
    os.dup2(data.fileno(), writing.fileno())
    signal.raise_signal(signal.SIGUSR1)
    assert reasons_within(source) == ["SIGUSR1"]
    source.stop()
    assert (tmp_path / "data").read_bytes() == b""
    assert signal.set_wakeup_fd(-1) == -1
    for file in (data, reading, writing):
        file.close()


def test_check_puts_the_descriptor_back_and_chains_the_one_that_took_its_place(source):
    """asyncio sets its own when it adds a signal handler."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno())
    source.check()
    signal.raise_signal(signal.SIGTERM)
    assert reasons_within(source) == ["SIGTERM"]
    assert reading.recv(10) == bytes([signal.SIGTERM])
    reading.close()
    writing.close()


def test_a_signal_is_not_lost_while_the_descriptor_is_taken(source):
    """The handler noted it; the next look finds it, once."""
    signal.set_wakeup_fd(-1)
    signal.raise_signal(signal.SIGTERM)
    assert [notice.reason for notice in source.poll()] == ["SIGTERM"]
    assert source.poll() == []


def test_two_interrupts_noted_late_do_not_leave(source):
    """Only bytes count: a handler may run long after its byte was read."""
    signal.set_wakeup_fd(-1)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert [notice.reason for notice in source.poll()] == ["SIGINT"]
    assert source.left == []


def test_the_first_interrupt_is_a_notice_and_the_second_leaves(source):
    """No KeyboardInterrupt is raised by either."""
    signal.raise_signal(signal.SIGINT)
    assert reasons_within(source) == ["SIGINT"]
    assert source.left == []
    signal.raise_signal(signal.SIGINT)
    source.poll()
    assert source.left == [1]


def test_a_second_interrupt_ends_the_process_with_130_while_main_is_stuck_in_c():
    """From the watcher thread, at once."""
    program = """
        import ctypes, os, signal, sys
        from trainckpt.preemption import SignalSource
        import threading, select

        source = SignalSource()
        source.start()
        def watch():
            while True:
                select.select([source.fileno()], [], [])
                for notice in source.poll():
                    print(notice.reason, flush=True)
        threading.Thread(target=watch, daemon=True).start()
        print("ready", flush=True)
        read, write = os.pipe()
        ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    process.stdout.close()


def printed_by(program: str) -> list[str]:
    """What a program prints in a process of its own, which nothing but it has touched."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()


def test_a_forked_child_has_default_handlers_and_writes_nothing_to_its_parent():
    """Its SIGTERM ends it, as it would without us, and is no notice here."""
    program = """
        import os, select, signal
        from trainckpt.preemption import SignalSource

        source = SignalSource()
        source.start()
        child = os.fork()
        if child == 0:
            taken = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if taken or source.available or source.fileno() is not None:
                os._exit(1)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(len(source.poll()), len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        signal.raise_signal(signal.SIGTERM)
        select.select([source.fileno()], [], [])
        print(*(notice.reason for notice in source.poll()))
        source.stop()
    """
    assert printed_by(program) == [str(-signal.SIGTERM), "0", "0", "SIGTERM"]


def test_a_signal_that_reaches_a_child_while_it_is_forked_is_no_notice_here():
    """The signals wait until the child has dropped what is not its own."""
    program = """
        import os, signal
        from trainckpt.preemption import SignalSource

        forget = SignalSource._forget_in_child

        def hit_and_forget(self):
            os.kill(os.getpid(), signal.SIGTERM)
            forget(self)

        SignalSource._forget_in_child = hit_and_forget
        source = SignalSource()
        source.start()
        child = os.fork()
        if child == 0:
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(source.poll()))
        source.stop()
    """
    assert printed_by(program) == [str(-signal.SIGTERM), "0"]


def test_a_process_that_leaves_keeps_its_exit_code_whatever_comes():
    """SIGTERM after the stop, and again while the interpreter ends; not so for its children."""
    program = """
        import atexit, os, signal, sys
        from trainckpt.preemption import SignalSource

        again = lambda: [os.kill(os.getpid(), s) for s in (signal.SIGTERM, signal.SIGUSR1)]
        atexit.register(again)
        source = SignalSource()
        source.start()
        source.ignore_later()
        source.stop()
        again()
        child = os.fork()
        if child == 0:
            again()
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(os.system("kill -TERM $$"))
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

        class Late:
            def __del__(self, again=again):
                again()

        late = Late()
        sys.exit(75)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split() == [str(-signal.SIGTERM), str(int(signal.SIGTERM)), "True"]
    assert (ended.returncode, ended.stderr) == (75, "")


def test_off_the_main_thread_it_says_why_it_cannot_listen():
    """No exception: notice files still work."""
    source = SignalSource()
    thread = threading.Thread(target=source.start)
    thread.start()
    thread.join()
    assert not source.available
    assert "main thread" in source.why
    assert source.fileno() is None
    assert source.poll() == []
    source.stop()


def test_after_a_stop_off_the_main_thread_the_next_signal_goes_to_its_old_handler(source):
    """No signal is swallowed for ever."""
    got = []
    signal.signal(signal.SIGUSR1, lambda signum, frame: got.append(signum))
    again = SignalSource([signal.SIGUSR1])
    again.start()
    thread = threading.Thread(target=again.stop)
    thread.start()
    thread.join()
    signal.raise_signal(signal.SIGUSR1)
    assert got == [signal.SIGUSR1]
    again.stop()
    assert again.fileno() is None


def test_check_costs_next_to_nothing_between_its_looks(source):
    """It is called at every boundary; only one call per second does anything."""
    source.check()
    signal.set_wakeup_fd(-1)
    source.check()
    assert signal.set_wakeup_fd(-1) == -1

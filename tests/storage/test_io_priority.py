"""A process group's requests are idle, and as all others again; threads have it from theirs."""

from __future__ import annotations

import platform
import subprocess
import sys
import textwrap

import pytest

from trainckpt.storage import libc


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="the numbers of these calls are known for two kinds of Linux",
)
def test_threads_of_before_and_of_afterwards_give_way_and_no_longer():
    code = """
        import os, queue, threading
        from trainckpt.storage import libc
        asked, told = queue.SimpleQueue(), queue.SimpleQueue()
        def looks():
            while asked.get():
                told.put(libc.is_idle())
        def both():
            threads.append(threading.Thread(target=looks, daemon=True))
            threads[-1].start()
            found = [libc.is_idle()]
            for _ in threads:
                asked.put(True)
            return sorted({*found, *(told.get() for _ in threads)})
        threads = []
        print(libc.reset_io_priority(), both())  # whatever it was started with
        print(libc.set_idle_io_priority(), both())
        print(libc.reset_io_priority(), both())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, start_new_session=True
    )
    assert found.stdout == "True [False]\nTrue [True]\nTrue [False]\n"
    assert not libc.is_idle(), "nobody outside that group is"

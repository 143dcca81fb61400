"""Threads in a call of torch are waited for when the interpreter ends, so that it ends well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Another thread is in a store's call when the script is over; what it waits for comes 0.3 s later.
SCRIPT = """
import datetime, sys, threading, time
import torch.distributed as dist
from trainckpt.ranks import threads as talking

store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
waits = dist.TCPStore("localhost", store.port, is_master=False)
waiting = threading.Event()

def wait():
    waiting.set()
    waits.wait(["bell"], datetime.timedelta(seconds=60))
    print("heard", flush=True)

talking.thread(wait, "waits").start()
waiting.wait()
time.sleep(0.1)  # until it is in the call

def ring():
    time.sleep(0.3)
    store.set("bell", "")

talking.thread(ring, "rings").start()
sys.exit(3)
"""


def test_a_thread_in_a_call_of_torch_is_waited_for_at_exit():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (3, "heard\n"), done.stderr[-2000:]


# A thread with the name of gloo's, at work without the interpreter's lock when the script is over.
WORKING = """
import hashlib, sys, threading
from pathlib import Path
from trainckpt.ranks import threads as talking

ready = threading.Event()

def work():
    name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    name.write_text("pt_gloo_runloop")
    block = bytes(200_000_000)
    ready.set()
    digest = hashlib.sha256(block).hexdigest()
    print("let go", flush=True)
    threading.Event().wait()  # as those wait for the next collective

threading.Thread(target=work, daemon=True).start()
ready.wait()
sys.exit(3)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc")
def test_gloos_threads_are_given_the_time_to_let_go_of_what_they_worked_on():
    done = subprocess.run(
        [sys.executable, "-c", WORKING], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (3, "let go\n"), done.stderr[-2000:]

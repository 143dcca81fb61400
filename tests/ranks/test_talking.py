"""Threads in a call of torch are waited for when the interpreter ends, so that it ends well."""

from __future__ import annotations

import subprocess
import sys

# Another thread is in a store's call when the script is over; what it waits for comes 0.3 s later.
SCRIPT = """
import datetime, sys, threading, time
import torch.distributed as dist
from trainckpt.ranks import talking

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

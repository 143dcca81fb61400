"""Real ranks for tests: processes with a gloo group over a TCPStore that the test holds.

They are forked from a server that has torch loaded, so that a test costs tenths of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback

import torch.distributed
from torch.distributed import PrefixStore, TCPStore

from tests.limits import HANG_S

# c10d asks the name server for the name of every address it connects to; where that does not
# answer, each connection takes the resolver's time-out, 5 s unless told otherwise.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# What c10d says about a store that is gone, with stack traces; the ranks say it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
context = multiprocessing.get_context("forkserver")
_preloaded = ["torch._dynamo", "trainckpt.checkpointer", "tests.ranks.programs"]


def preload(*modules):
    """Have the server load these as well, once for all of its forks; before any test runs."""
    _preloaded.extend(module for module in modules if module not in _preloaded)
    context.set_forkserver_preload(_preloaded)


preload()


def run_ranks(program, size, *arguments):
    """Run `program(rank, *arguments)` on `size` ranks; its results, in the order of ranks."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        given = (there, dict(os.environ), program, rank, size, server.port, arguments)
        process = context.Process(target=_be_a_rank, args=given, daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    return [_result(rank, *process_and_pipe) for rank, process_and_pipe in enumerate(started)]


def _result(rank, process, pipe):
    if not pipe.poll(HANG_S):
        process.kill()
        raise AssertionError(f"rank {rank} said nothing within {HANG_S} s")
    try:
        failed, result = pipe.recv()
    except EOFError:
        process.join(HANG_S)
        return ("exit", process.exitcode)
    process.join(HANG_S)
    assert not failed, f"rank {rank}:\n{result}"
    return result


def _be_a_rank(pipe, environment, program, rank, size, port, arguments):
    os.environ.clear()  # the server's, which may have been started by a test with another one
    os.environ.update(environment)
    try:
        store = PrefixStore("group", TCPStore("127.0.0.1", port, is_master=False))
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        result = program(rank, *arguments)
        torch.distributed.destroy_process_group()
        pipe.send((False, result))
    except Exception:
        pipe.send((True, traceback.format_exc()))
    finally:
        pipe.close()

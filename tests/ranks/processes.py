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
    (results,) = run_in_turn(size, (program, *arguments))
    return results


def run_in_turn(size, *calls):
    """Run `program(rank, *arguments)` of each call, one after the other in the same processes.

    A process costs more than a small training does. Each call gets a process group of its own,
    but modules stay as the one before left them, random generators too.

    Returns:
        The results of each call, in the order of ranks; ("exit", code) for a rank that ended in
        the first one.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        given = (there, dict(os.environ), calls, rank, size, server.port)
        process = context.Process(target=_be_a_rank, args=given, daemon=True)
        process.start()
        there.close()
        started.append((process, here))
    of_ranks = [_results(rank, *process_and_pipe) for rank, process_and_pipe in enumerate(started)]
    return [list(results) for results in zip(*of_ranks, strict=True)]


def _results(rank, process, pipe):
    if not pipe.poll(HANG_S):
        process.kill()
        raise AssertionError(f"rank {rank} said nothing within {HANG_S} s")
    try:
        failed, results = pipe.recv()
    except EOFError:
        process.join(HANG_S)
        return [("exit", process.exitcode)]
    process.join(HANG_S)
    assert not failed, f"rank {rank}:\n{results}"
    return results


def _be_a_rank(pipe, environment, calls, rank, size, port):
    os.environ.clear()  # the server's, which may have been started by a test with another one
    os.environ.update(environment)
    results = []
    try:
        for number, (program, *arguments) in enumerate(calls):
            # Whoever is first waits here for the ranks that are still at the call before.
            store = PrefixStore(f"group{number}", TCPStore("127.0.0.1", port, is_master=False))
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
            results.append(program(rank, *arguments))
            torch.distributed.destroy_process_group()
        pipe.send((False, results))
    except Exception:
        pipe.send((True, traceback.format_exc()))
    finally:
        pipe.close()

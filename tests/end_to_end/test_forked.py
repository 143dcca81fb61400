"""A process that the script forks inside the block is no part of the attempt, however it leaves."""

from __future__ import annotations

import os
import sys

import pytest

from tests.end_to_end.training import attempt, record, usable


@pytest.mark.parametrize("leaves", ["sys.exit", "an exception", "the block's end", "training on"])
def test_a_forked_process_leaves_the_record_and_the_snapshots_of_its_parent_alone(tmp_path, leaves):
    found = []

    class Over(Exception):
        """The child has left the block."""

    def fork(ckpt, _):
        if ckpt.cursor.micro_batches != 3:
            return
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            found.append((record(tmp_path, 1), usable(tmp_path)))
            return
        try:
            with ckpt:
                if leaves == "sys.exit":
                    sys.exit(3)
                if leaves == "an exception":
                    raise Over
                if leaves == "training on":
                    ckpt.save(tag="child")
                    ckpt.boundary()
        finally:
            os._exit(0)

    attempt(tmp_path, epochs=1, inside=fork, every="never")
    (told, snapshots) = found[0]
    assert (told["state"], told["outcome"], snapshots) == ("running", None, [])
    assert record(tmp_path, 1)["outcome"]["outcome"] == "finished"
    assert len(usable(tmp_path)) == 1

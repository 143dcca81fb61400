"""The reader of DCP's metadata: what it gives up before it reads, and what it admits."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys

import pytest
import torch

from trainckpt.inspect import dcp_metadata


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
@pytest.mark.parametrize(
    "attempt",
    ["open('/etc/hostname')", "open('x', 'w')", "socket.socket()", "os.pipe()"],
)
def test_the_process_can_open_nothing_once_it_is_shut_in(attempt, tmp_path):
    code = (
        "import os, runpy, socket, sys\n"
        "reader = runpy.run_path(sys.argv[1])\n"
        "reader['shut_in']()\n"
        f"try:\n    {attempt}\n"
        "except OSError:\n    print('refused')\n"
    )
    command = [sys.executable, "-I", "-c", code, dcp_metadata.__file__]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


@pytest.mark.parametrize("named", [eval, subprocess.run, torch.load, torch.nn.Linear, getattr])
def test_other_names_are_refused(named):
    with pytest.raises(pickle.UnpicklingError, match=named.__name__):
        dcp_metadata.Unpickler(io.BytesIO(pickle.dumps(named))).load()


def test_every_element_type_of_torch_is_admitted():
    for dtype in {v for v in vars(torch).values() if type(v) is torch.dtype}:
        found = dcp_metadata.Unpickler(io.BytesIO(pickle.dumps(dtype))).load()
        assert getattr(torch, found) is dtype

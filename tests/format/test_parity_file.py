"""The head of a parity file: what was written is read back, anything else is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import parity_file
from trainckpt.format.parity_file import ParityHead, dump, file_name, is_file_name, load

HEAD = ParityHead("s12~1.3", 4, tuple(range(10**6, 10**6 + 255)), 250, 2, 7, 1 << 40, "0a" * 16)


def test_what_was_written_is_read_back():
    assert len(dump(HEAD)) == parity_file.HEAD_BYTES
    assert load(dump(HEAD), "it") == HEAD
    assert is_file_name(file_name(HEAD.number, HEAD.place))
    assert not is_file_name("set00001.001.parity.new")


@pytest.mark.parametrize(
    "wrong",
    [
        {"place": 255},
        {"num_own": 256},
        {"num_parity": 0},
        {"num_parity": 255},
        {"place": -1},
        {"members": (1, 1, 2)},
        {"members": (1, -2, 3)},
        {"parities": "x"},
        {"chunk_bytes": 2**63},
    ],
)
def test_a_head_that_describes_no_set_is_refused(wrong):
    with pytest.raises(UnusableSnapshot):
        load(dump(replace(HEAD, **wrong)), "it")


@pytest.mark.parametrize("at", [0, 40, 900])
def test_a_damaged_head_is_refused(at):
    data = bytearray(dump(HEAD))
    data[at] ^= 1
    with pytest.raises(UnusableSnapshot):
        load(data, "it")

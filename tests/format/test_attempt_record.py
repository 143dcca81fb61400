"""Records of attempts: kept whole, unknown keys too; damage is found."""

from __future__ import annotations

import json

import pytest

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.attempt_record import UNDECIDED, AttemptRecord

RECORD = AttemptRecord(
    3, "s4~2.1", "running", {"outcome": "stopped"}, "s8~3.2", {"argv": ["a"], "later": 1}
)


def test_it_comes_back_as_it_was():
    assert AttemptRecord.load(RECORD.dump(), "x") == RECORD
    assert AttemptRecord.load(AttemptRecord(1).dump(), "x").parent == UNDECIDED


def test_every_flipped_bit_is_found_or_changes_nothing():
    data = RECORD.dump()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = AttemptRecord.load(bytes(flipped), "x")
        except UnusableSnapshot:
            continue
        assert found.with_(facts=RECORD.facts) == RECORD


def test_a_record_that_others_wrote_without_a_digest_is_read():
    body = json.loads(RECORD.dump())
    del body["digest"]
    assert AttemptRecord.load(json.dumps(body).encode(), "x") == RECORD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"attempt": -1, "state": "running"}',
        b"[" * 10**5,
        b'{"attempt": 1, "state": "running", "parent": 3}',
        b'{"attempt": 1, "state": "ended", "outcome": {"seconds": 1%s}}' % (b"0" * 400),
    ],
)
def test_what_is_no_record_is_refused(data):
    with pytest.raises(UnusableSnapshot):
        AttemptRecord.load(data, "x")

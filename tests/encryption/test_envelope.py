from __future__ import annotations

from dataclasses import replace

import pytest

from trainckpt.encryption import keys
from trainckpt.errors import ConfigurationError, UnusableSnapshot

ME, OTHER, STRANGER = (keys.generate() for _ in range(3))
KEY = bytes(range(32))


def wrapped(*to):
    return keys.wrap_for_all(KEY, [each.recipient for each in to], "run", "s2~1.1")


def test_each_recipient_gets_the_key_and_nobody_else():
    for identity in (ME, OTHER):
        assert keys.unwrap_any(wrapped(ME, OTHER), [STRANGER, identity], "run", "s2~1.1") == KEY
    with pytest.raises(ConfigurationError, match="the identity given is of") as caught:
        keys.unwrap_any(wrapped(ME, OTHER), [STRANGER], "run", "s2~1.1")
    assert ME.recipient in caught.value.message
    assert "TRAINCKPT_IDENTITY" in caught.value.hint


def test_without_an_identity_it_is_said_who_could_read_it():
    with pytest.raises(ConfigurationError, match="no identity is given") as caught:
        keys.unwrap_any(wrapped(ME), [], "run", "s2~1.1")
    assert ME.recipient in caught.value.message
    assert "--identity FILE" in caught.value.hint


def test_a_key_is_bound_to_its_snapshot_and_its_run():
    for run, snapshot in (("run", "s2~1.2"), ("another", "s2~1.1")):
        with pytest.raises(UnusableSnapshot, match="was changed, or is another's"):
            keys.unwrap_any(wrapped(ME), [ME], run, snapshot)


def test_every_changed_bit_of_a_wrapped_key_is_found():
    (good,) = wrapped(ME)
    for at in range(len(good.key)):
        data = bytearray(good.key)
        data[at] ^= 1
        with pytest.raises(UnusableSnapshot):
            keys.unwrap(replace(good, key=bytes(data)), ME, "s2~1.1 of run run")


@pytest.mark.parametrize("length", [0, 31, 32, 47, 79, 81])
def test_a_wrapped_key_of_another_length_is_refused(length):
    (good,) = wrapped(ME)
    with pytest.raises(UnusableSnapshot):
        keys.unwrap(replace(good, key=(good.key * 2)[:length]), ME, "s2~1.1 of run run")


def test_ranks_that_share_a_secret_get_the_same_keys_whatever_saves_they_miss():
    a, b = keys.KeyRatchet(KEY), keys.KeyRatchet(KEY)
    of_a = [a.key(number) for number in range(1, 6)]
    assert len(set(of_a)) == 5
    assert [b.key(2), b.key(5)] == [of_a[1], of_a[4]]


def test_a_key_that_was_used_cannot_be_had_again_nor_found_in_what_is_left():
    chain = keys.KeyRatchet(KEY)
    used = [chain.key(1), chain.key(2)]
    with pytest.raises(ValueError, match="given already"):
        chain.key(2)
    left = b"".join(v if isinstance(v, bytes) else b"" for v in vars(chain).values())
    assert not any(key in left for key in (*used, KEY))


def test_a_letter_is_read_by_whom_it_is_addressed_to():
    letter, another = keys.generate(), keys.generate()
    sealed = keys.wrap(KEY, letter.recipient, keys.A_RANK)
    assert keys.unwrap(sealed, letter, keys.A_RANK) == KEY
    with pytest.raises(UnusableSnapshot):
        keys.unwrap(sealed, another, keys.A_RANK)

"""Parity: whatever was lost, as long as it was no more than there are parities, comes out again."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from trainckpt.snapshot import parity


def slow_product(a, b):
    """By the definition: polynomials over two elements, modulo 0x11D."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(15, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


PRODUCTS = [bytes(slow_product(a, b) for b in range(256)) for a in range(256)]


def summed(factors, members, num_bytes):
    """The sum of factors times members, looked up byte by byte."""
    found = [0] * num_bytes
    for factor, member in zip(factors, members, strict=True):
        for at, value in enumerate(member):
            found[at] ^= PRODUCTS[factor][value]
    return bytes(found)


def members_of(lengths, seed=0):
    drawn = random.Random(seed)
    return [drawn.randbytes(length) for length in lengths]


def encoded(members, num_parity):
    into = [bytearray(b"\xff" * max(map(len, members))) for _ in range(num_parity)]
    views_of = [memoryview(member) for member in members]
    for row, each in enumerate(into):  # one at a time, or all at once: the same
        parity.encode(views_of, {row: memoryview(each)})
    again = [bytearray(len(each)) for each in into]
    parity.encode(views_of, {n: memoryview(each) for n, each in enumerate(again)})
    assert again == into
    return [bytes(each) for each in into]


def test_products_and_inverses_are_those_of_the_field():
    for a in range(256):
        assert [parity.multiply(a, b) for b in range(256)] == list(PRODUCTS[a])
        assert not a or parity.multiply(a, parity.inverse(a)) == 1


@pytest.mark.parametrize(("num_data", "num_parity"), [(1, 1), (7, 1), (8, 2), (5, 3)])
def test_parities_are_the_sums_that_a_table_gives(num_data, num_parity):
    members = members_of([700 - 13 * i for i in range(num_data)])
    found = encoded(members, num_parity)
    rows = parity.parity_rows(num_data, num_parity)
    assert found == [summed(row, members, 700) for row in rows]


def views(members):
    return {number: memoryview(member) for number, member in members.items()}


def test_every_loss_of_every_small_code_is_made_good_to_the_bit():
    for num_members in range(2, 9):
        for num_parity in range(1, min(num_members, 4)):
            check_all_losses(num_members - num_parity, num_parity)


def check_all_losses(num_data, num_parity):
    size = 257
    members = members_of([size - 31 * i for i in range(num_data)], seed=num_data)
    everyone = members + encoded(members, num_parity)
    numbers = range(num_data + num_parity)
    losses = chain.from_iterable(combinations(numbers, n) for n in range(1, num_parity + 1))
    for lost in losses:
        left = {n: everyone[n] for n in numbers if n not in lost}  # nobody pads what others hold
        into = {n: bytearray(b"\xff" * size) for n in lost}
        parity.rebuild(views(left), views(into), num_data, num_parity)
        padded = {n: everyone[n].ljust(size, b"\0") for n in lost}
        assert {n: bytes(m) for n, m in into.items()} == padded, (num_data, num_parity, lost)


def test_members_longer_than_a_block_are_summed_and_rebuilt_across_blocks():
    size = 2 * parity.BLOCK_BYTES + 77
    members = members_of([size, parity.BLOCK_BYTES, 0, parity.BLOCK_BYTES + 1])
    made = encoded(members, 2)
    numbers = [int.from_bytes(m.ljust(size, b"\0"), "little") for m in members]
    assert int.from_bytes(made[0], "little") == numbers[0] ^ numbers[1] ^ numbers[3]
    into = {0: bytearray(size), 1: bytearray(size)}
    left = {2: members[2], 3: members[3], 4: made[0], 5: made[1]}
    parity.rebuild(views(left), views(into), 4, 2)
    assert bytes(into[0]) == members[0]
    assert bytes(into[1]) == members[1].ljust(size, b"\0")


def test_the_widest_codes_can_lose_any_members():
    drawn = random.Random(5)
    for num_parity in (2, 3):
        num_data = parity.MAX_MEMBERS - num_parity
        every = parity.parity_rows(num_data, num_parity)
        for _ in range(20):
            lost = sorted(drawn.sample(range(parity.MAX_MEMBERS), num_parity))
            data = [n for n in lost if n < num_data]
            present = [n for n in range(parity.MAX_MEMBERS) if n not in lost]
            parities, rows = parity.recipe(present, data, num_data, num_parity)
            matrix = [[every[row][n] for n in data] for row in parities]
            for i, row in enumerate(rows):  # the inverse times the matrix
                found = [summed(row, [bytes([m[j]]) for m in matrix], 1) for j in range(len(data))]
                assert found == [bytes([int(i == j)]) for j in range(len(data))]


def test_what_no_code_can_do_is_refused():
    for num_data, num_parity in ((0, 1), (1, 0), (254, 2), (8, 4)):
        with pytest.raises(ValueError, match="no code"):
            parity.parity_rows(num_data, num_parity)
    with pytest.raises(ValueError, match="only 2 files of the set are left, 3 are needed"):
        parity.recipe([0, 4], [1, 2], 3, 2)

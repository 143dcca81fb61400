"""Compute parity members, from which as many lost members of a set can be rebuilt.

A set has `num_data` members with bytes and `num_parity` with sums of them over GF(2^8), the field
of the polynomial 0x11D. Parity j is the sum of (2^j)^i times member i: XOR for j = 0, as RAID-6
for j = 1. Of two or three such rows every square submatrix can be inverted: they are generalized
Vandermonde rows whose nodes 2^i and 4^i differ for all i < 255. Four rows lose that property, so a
code has at most three parities.

A sum by Horner's rule needs one doubling per member. Doubling works on whole vectors of bytes
(shift, mask, add, XOR), in blocks that stay in a core's cache. Measured here, NumPy's byte loops
beat its 64-bit loops and torch's.

A shorter member counts as if zeros followed. Results are verified by digests, like any data read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import ConfigurationError
from trainckpt.format.parity_file import MAX_PARITIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLYNOMIAL = 0x11D
MAX_MEMBERS = 255
BLOCK_BYTES = 128 << 10  # of each of about five operands, in a core's cache of a megabyte
_REDUCE = POLYNOMIAL & 0xFF


def _tables() -> tuple[list[int], list[int]]:
    powers, logs, value = [0] * 510, [0] * 256, 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value = value << 1 ^ (POLYNOMIAL if value & 0x80 else 0)
    return powers, logs


_POWERS, _LOGS = _tables()


def check_available() -> None:
    """Raise `ConfigurationError` if NumPy is not installed."""
    _numpy()


def multiply(a: int, b: int) -> int:
    """Return the product in the field."""
    return _POWERS[_LOGS[a] + _LOGS[b]] if a and b else 0


def inverse(a: int) -> int:
    """Return 1 / a in the field; `a` is not 0."""
    return _POWERS[255 - _LOGS[a]]


def parity_rows(num_data: int, num_parity: int) -> list[list[int]]:
    """Return the factor of every data member in every parity.

    Raises:
        ValueError: a number below one, more than three parities, or more than 255 members.
    """
    is_code = num_data >= 1 and 1 <= num_parity <= MAX_PARITIES
    if not is_code or num_data + num_parity > MAX_MEMBERS:
        raise ValueError(f"no code has {num_data} + {num_parity} members")
    return [[_POWERS[row * i % 255] for i in range(num_data)] for row in range(num_parity)]


def encode(data: Sequence[memoryview], into: Mapping[int, memoryview]) -> None:
    """Compute parities of `data`.

    Args:
        data: The members, none longer than a parity.
        into: Number of a parity, from 0 -> memory to fill, all of one length.
    """
    targets = dict(zip(into, _arrays(list(into.values())), strict=True))
    _sum(dict(enumerate(_arrays(data))), targets, len(data))


def rebuild(
    present: Mapping[int, memoryview],
    into: Mapping[int, memoryview],
    num_data: int,
    num_parity: int,
) -> None:
    """Compute lost members from the remaining ones.

    Args:
        present: Number of a member -> its bytes, at least `num_data` of them. Data members are
            numbered first, then parities.
        into: Number of a lost member -> memory to fill, all of one length; shorter members are
            followed by zeros. Must include every data member not in `present`.
        num_data, num_parity: Of the code.

    Raises:
        ValueError: too few are present.
    """
    there = dict(zip(present, _arrays(list(present.values())), strict=True))
    made = dict(zip(into, _arrays(list(into.values())), strict=True))
    lost = [number for number in sorted(made) if number < num_data]
    parities, rows = recipe(sorted(there), lost, num_data, num_parity)
    data = {number: each for number, each in there.items() if number < num_data}
    if lost:
        # The present members' sum, taken from a parity, leaves a sum of the lost members alone.
        missing = {row: _numpy().empty(len(made[lost[0]]), "int8") for row in parities}
        _sum(data, missing, num_data)
        for row, each in missing.items():
            part = each[: len(there[num_data + row])]
            part ^= there[num_data + row][: len(part)]
        _combine(rows, [missing[row] for row in parities], [made[number] for number in lost])
        data.update({number: made[number] for number in lost})
    again = {number - num_data: each for number, each in made.items() if number >= num_data}
    _sum(data, again, num_data)


def recipe(
    present: Sequence[int], lost: Sequence[int], num_data: int, num_parity: int
) -> tuple[list[int], list[list[int]]]:
    """Return the parities to use for lost data members, and the inverted matrix of their factors.

    Raises:
        ValueError: too few are present.
    """
    parities = [number - num_data for number in present if number >= num_data][: len(lost)]
    if len(parities) < len(lost):
        raise ValueError(f"only {len(present)} files of the set are left, {num_data} are needed")
    every = parity_rows(num_data, num_parity)
    return parities, _inverted([[every[row][number] for number in lost] for row in parities])


def _inverted(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        by = inverse(rows[column][column])
        rows[column] = [multiply(value, by) for value in rows[column]]
        for i in range(size):
            factor = rows[i][column]
            if i != column and factor:
                pairs = zip(rows[i], rows[column], strict=True)
                rows[i] = [value ^ multiply(factor, other) for value, other in pairs]
    return [row[size:] for row in rows]


def _sum(sources: Mapping[int, Any], targets: Mapping[int, Any], num_data: int) -> None:
    if not targets:
        return
    length = len(next(iter(targets.values())))
    scratch = _numpy().empty(BLOCK_BYTES, "int8")
    for first in range(0, length, BLOCK_BYTES):
        end = min(first + BLOCK_BYTES, length)
        blocks = [
            sources[number][first:end] if number in sources else None
            for number in range(num_data - 1, -1, -1)
        ]
        _horner(blocks, {row: each[first:end] for row, each in targets.items()}, scratch)


def _horner(blocks: Sequence[Any], targets: Mapping[int, Any], scratch: Any) -> None:
    """Fill each row with the sum of (2^row)^i times block i; blocks come last to first."""
    for target in targets.values():
        target[:] = 0
    begun = False
    for block in blocks:
        for row, target in targets.items():
            for _ in range(row if begun else 0):
                _double(target, scratch[: len(target)])
            if block is not None:
                part = target[: len(block)]
                part ^= block
        begun = begun or block is not None


def _combine(rows: Sequence[Sequence[int]], sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Set targets[r] to the sum of rows[r][i] * sources[i], sharing the doublings of a source."""
    doubled, scratch = (_numpy().empty(BLOCK_BYTES, "int8") for _ in range(2))
    for first in range(0, len(targets[0]), BLOCK_BYTES):
        outs = [target[first : first + BLOCK_BYTES] for target in targets]
        for out in outs:
            out[:] = 0
        for i, source in enumerate(sources):
            block = source[first : first + BLOCK_BYTES][: len(outs[0])]
            value, spare = doubled[: len(block)], scratch[: len(block)]
            value[:] = block
            factors = [row[i] for row in rows]
            for bit in range(max(factors).bit_length()):
                if bit:
                    _double(value, spare)
                for factor, out in zip(factors, outs, strict=True):
                    if factor >> bit & 1:
                        part = out[: len(block)]
                        part ^= value


def _double(value: Any, scratch: Any) -> None:
    """Double in place: a bit shifted out at the top comes back as the polynomial."""
    np = _numpy()
    np.right_shift(value, 7, out=scratch)  # signed: all bits set where the top one was
    scratch &= _REDUCE
    value += value
    value ^= scratch


def _arrays(members: Sequence[memoryview]) -> list[Any]:
    return [_numpy().frombuffer(each, "int8") for each in members]


def _numpy() -> Any:
    """Return NumPy, needed by parity alone.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        import numpy as np
    except ImportError:
        raise ConfigurationError(
            "parity needs NumPy, which is not installed",
            hint='pip install numpy, or redundancy="partner"',
        ) from None
    return np

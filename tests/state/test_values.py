"""Values: what is encoded is decoded to the same value of the same type; the rest is refused."""

from __future__ import annotations

import collections
import enum
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.state import values

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters())
    | st.binary()
    | st.binary().map(bytearray)
    | st.sampled_from([torch.float32, torch.bfloat16, torch.complex64, torch.bool])
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")])
    | st.lists(st.integers(0, 9), max_size=4).map(torch.Size)
)
KEYS = st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
        | st.lists(inner, max_size=4).map(lambda items: collections.deque(items, 7))
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(collections.Counter)
        | st.dictionaries(KEYS, inner, max_size=4).map(lambda d: collections.defaultdict(list, d))
    ),
    max_leaves=12,
)
ARRAYS = hnp.arrays(
    hnp.integer_dtypes(endianness="=")
    | hnp.floating_dtypes(endianness="=", sizes=(16, 32, 64))
    | hnp.complex_number_dtypes(endianness="=", sizes=(64, 128))
    | hnp.boolean_dtypes(),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)


def there_and_back(value):
    """Encode, spell as JSON, parse, decode."""
    tensors = {}

    def store(path, tensor):
        name = f"{len(tensors)} {path}"
        tensors[name] = tensor
        return {"$tensor": name}

    tree = values.encode(value, "x", store)
    tree = json_io.parse(json_io.canonical([tree]), "x", max_bytes=1 << 24)[0]
    return values.decode(tree, lambda node: tensors[node["$tensor"]])


def same(one, other):
    """Equal, of equal types, bit for bit, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (float, complex)) and not isinstance(one, np.generic):
        return repr(one) == repr(other)
    if isinstance(one, (np.ndarray, np.generic)):
        facts = one.dtype == other.dtype and one.shape == other.shape
        return facts and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_any_value_comes_back_as_it_was(value):
    assert same(there_and_back(value), value)


@settings(deadline=None)
@given(ARRAYS)
def test_numpy_arrays_and_scalars_come_back_as_they_were(array):
    assert same(there_and_back(array), array)
    assert same(there_and_back(array.T), np.ascontiguousarray(array.T) if array.ndim else array)
    if array.size:
        by_columns = np.asfortranarray(array)
        assert there_and_back(by_columns).strides == by_columns.strides
        scalar = array.reshape(-1)[0]
        assert same(there_and_back(scalar), scalar)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 2**53, -(2**200), 1e-320])
def test_numbers_json_has_no_word_for_come_back(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("scalar", [np.float64(0.1), np.complex128(1j), np.bool_(True), np.int8(3)])
def test_numpy_scalars_that_are_python_numbers_too_keep_their_type(scalar):
    assert same(there_and_back(scalar), scalar)


def test_a_numpy_generator_s_state_comes_back():
    state = np.random.default_rng(3).bit_generator.state
    assert same(there_and_back(state), state)


def test_a_deque_keeps_its_bound_and_a_defaultdict_its_factory():
    assert there_and_back(collections.deque([1], 3)).maxlen == 3
    assert there_and_back(collections.defaultdict(int, a=1)).default_factory is int


class Colour(enum.IntEnum):
    RED = 1


class Loud(list):
    pass


class Point(NamedTuple):
    x: int
    y: int


class Names(set):
    pass


class Last(collections.deque):
    pass


class Key(bytes):
    pass


class Grid(np.ndarray):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Loud(),
        Point(1, 2),
        lambda: 1,
        np.array(["a"]),
        np.array([object()]),
        np.datetime64(1, "s"),
        range(3),
        Names(),
        Last(),
        Key(),
        np.zeros(2).view(Grid),
        np.ma.array([1.0, 2.0], mask=[False, True]),
        collections.defaultdict(lambda: 1),
        iter([]),
    ],
)
def test_an_unknown_type_is_refused_with_the_path_to_it(value):
    with pytest.raises(values.UnknownValue, match=r"^metric\.history\.1"):
        values.encode({"history": [0, value]}, "metric", None)


def test_a_value_that_holds_itself_is_refused_and_not_a_crash():
    loop = []
    loop.append(loop)
    with pytest.raises(values.UnknownValue, match="deep"):
        values.encode(loop, "metric", None)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "os.system", "of": "true"},
        {"$": "tuple"},
        {"$": ["tuple"], "of": []},
        {"$": "int", "of": "x"},
        {"$": "int", "of": "1" * 10_000},
        {"$": "dtype", "of": "load"},
        {"$": "numpy dtype", "of": "O"},
        {"$": "numpy", "of": None, "dtype": "O", "shape": [1]},
        {"$": "numpy", "of": None, "dtype": "<f8", "shape": [-1, 2**62]},
        {"$": "numpy", "of": None, "dtype": "<f8", "shape": [3]},
        {"$": "dict", "of": [[1]]},
        {"$": "dict", "of": [[[1], 2]]},
        {"$": "dict", "of": [], "kind": "default os.system"},
        {"$": "dict", "of": [], "kind": 3},
        {"$": "deque", "of": [], "most": "x"},
        {"$": "device", "of": "nowhere"},
        {"$": "bytes", "of": "?"},
        {"$": "complex", "of": ["x", "y"]},
        {},
    ],
)
def test_a_tree_that_encode_does_not_write_is_refused(tree):
    with pytest.raises(UnusableSnapshot):
        values.decode([tree], None)


def test_a_tree_too_deep_is_refused():
    tree = 1
    for _ in range(5000):
        tree = [tree]
    with pytest.raises(UnusableSnapshot):
        values.decode(tree, None)


def test_leaves_say_where_two_values_differ():
    def flat(value):
        return values.leaves(values.encode(value, "x", None), "x")

    one, other = flat({"lr": 0.1, "of": [1, {"n": 2}]}), flat({"lr": 0.1, "of": [1, {"n": 3}]})
    assert [path for path in one if one[path] != other[path]] == ["x.of.1.n"]

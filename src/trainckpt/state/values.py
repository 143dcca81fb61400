"""Encode state other than tensors as JSON, with a tag for each type unknown to JSON.

A value is None, bool, int, float, str, a list, or one of the tagged forms

    {"$tensor": name}        a tensor, stored in the shard file under that name
    {"$": "tuple", "of": []} and likewise for list-like, mapping, bytes, complex, dtype, device,
                             size, and NumPy values

An unknown type is refused with the path to it. Nothing is ever built by a name read from a file,
so a snapshot cannot run code. Encoding and decoding are mirrored: each encoder has its
`_decode` branch.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.errors import ConfigurationError, UnusableSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JSON = Any
# dtype name -> dtype, of this torch; a name in a file is only ever looked up here.
DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}
MAX_DEPTH = 64
_NUMBERS = re.compile(r"[<>=|]?[biufc][0-9]{1,2}")


class UnknownValue(ConfigurationError):
    """The value can only be stored by pickling it."""


def encode(
    value: Any, path: str, store: Callable[[str, torch.Tensor], JSON], depth: int = 0
) -> JSON:
    """Return `value` as JSON; tensors go to `store(path, tensor)`, which returns their JSON.

    Raises:
        UnknownValue: Names the path to the first value of an unknown type.
    """
    if depth > MAX_DEPTH:
        raise UnknownValue(f"{path[:200]} is more than {MAX_DEPTH} containers deep")
    if value is None or type(value) in (bool, str):
        return value
    if type(value) is int:
        return value if -(2**53) < value < 2**53 else {"$": "int", "of": str(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"$": "float", "of": repr(value)}
    if isinstance(value, torch.Tensor):
        return store(path, value)
    numpy = _encode_numpy(value, path, store)  # first: some of its scalars are Python's too
    if numpy is not None:
        return numpy
    for types, function in _ENCODERS:
        if isinstance(value, types):
            return function(value, path, lambda v, where: encode(v, where, store, depth + 1))
    raise UnknownValue(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored "
        "without pickling it",
        hint="give the object a state_dict of numbers, strings, tensors and containers of them",
    )


def decode(tree: JSON, tensor: Callable[[JSON], torch.Tensor], depth: int = 0) -> Any:
    """Return the value of a tree: the inverse of `encode`.

    `tensor` returns the tensor for a `{"$tensor": ...}` node.

    Raises:
        UnusableSnapshot: The tree is not written by `encode`.
    """
    if depth > MAX_DEPTH:
        raise UnusableSnapshot(f"a stored value is more than {MAX_DEPTH} containers deep")
    if isinstance(tree, list):
        return [decode(item, tensor, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensor(tree)
    tag = tree.get("$")
    try:
        return _DECODERS[tag](tree["of"], tree, lambda item: decode(item, tensor, depth + 1))
    except (
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise UnusableSnapshot(f"a stored value is not readable: {str(tree)[:100]}") from error


def leaves(tree: JSON, path: str = "") -> Mapping[str, str]:
    """Return path -> spelling of an encoded tree, to report differences.

    Tensors are left out: they are parts of their own.
    """
    if isinstance(tree, dict) and "$tensor" in tree:
        return {}
    if isinstance(tree, dict):
        pairs: list[tuple[str, JSON]]
        if "$" not in tree:
            pairs = list(tree.items())
        elif tree["$"] == "dict":
            pairs = [(str(decode(k, no_tensor)), v) for k, v in tree["of"]]
        elif isinstance(tree.get("of"), list):
            pairs = [(str(i), v) for i, v in enumerate(tree["of"])]
        else:
            return {path: str(tree.get("of", tree))}
    elif isinstance(tree, list):
        pairs = [(str(i), v) for i, v in enumerate(tree)]
    else:
        return {path: repr(tree)}
    found: dict[str, str] = {}
    if len(pairs) > 64 and all(not isinstance(v, (dict, list)) for _, v in pairs):
        return {path: repr([v for _, v in pairs])}  # one long row of numbers is one part
    for key, item in pairs:
        found.update(leaves(item, f"{path}.{key}" if path else key))
    return found


def no_tensor(_: JSON) -> torch.Tensor:
    """Refuse a tensor, for `decode`."""
    raise UnusableSnapshot("a tensor stands where none can")


def _must_be(value: Any, path: str, *kinds: type) -> None:
    """Refuse subclasses of these: they would come back as the base class."""
    if type(value) not in kinds:
        what = next(kind.__name__ for kind in kinds if isinstance(value, kind))
        raise UnknownValue(f"{path} is a {type(value).__qualname__}, an unknown {what}")


def _encode_items(value: Any, path: str, inner: Any) -> list[JSON]:
    return [inner(item, f"{path}.{i}") for i, item in enumerate(value)]


def _encode_list(value: list[Any], path: str, inner: Any) -> JSON:
    if type(value) is not list:
        raise UnknownValue(f"{path} is a {type(value).__qualname__}, an unknown list")
    return _encode_items(value, path, inner)


def _encode_tuple(value: tuple[Any, ...], path: str, inner: Any) -> JSON:
    if type(value) is not tuple and type(value) is not torch.Size:
        raise UnknownValue(f"{path} is a {type(value).__qualname__}, a named tuple of the script")
    tag = "size" if type(value) is torch.Size else "tuple"
    return {"$": tag, "of": _encode_items(value, path, inner)}


def _encode_mapping(value: Any, path: str, inner: Any) -> JSON:
    pairs = [[inner(k, f"{path}.<key>"), inner(v, f"{path}.{k}")] for k, v in value.items()]
    kinds: dict[Any, str] = {dict: "", OrderedDict: "ordered", Counter: "counter"}
    if type(value) is defaultdict:
        factory = {None: "none", list: "list", dict: "dict", int: "int", float: "float"}
        if value.default_factory not in factory:
            raise UnknownValue(f"{path} is a defaultdict whose factory cannot be stored")
        return {"$": "dict", "of": pairs, "kind": f"default {factory[value.default_factory]}"}
    if type(value) not in kinds:
        raise UnknownValue(f"{path} is a {type(value).__qualname__}, an unknown mapping")
    kind = kinds[type(value)]
    return {"$": "dict", "of": pairs, **({"kind": kind} if kind else {})}


def _encode_set(value: Any, path: str, inner: Any) -> JSON:
    _must_be(value, path, set, frozenset)
    items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
    tag = "set" if isinstance(value, set) else "frozenset"
    return {"$": tag, "of": _encode_items(items, path, inner)}


def _encode_deque(value: deque[Any], path: str, inner: Any) -> JSON:
    _must_be(value, path, deque)
    return {"$": "deque", "of": _encode_items(value, path, inner), "most": value.maxlen}


def _encode_bytes(value: Any, path: str, inner: Any) -> JSON:
    del inner
    _must_be(value, path, bytes, bytearray)
    tag = "bytearray" if isinstance(value, bytearray) else "bytes"
    return {"$": tag, "of": base64.b64encode(bytes(value)).decode()}


def _encode_plain(tag: str) -> Any:
    return lambda value, path, inner: {"$": tag, "of": str(value).removeprefix("torch.")}


def _encode_complex(value: complex, path: str, inner: Any) -> JSON:
    del path, inner
    return {"$": "complex", "of": [value.real.hex(), value.imag.hex()]}


def _encode_numpy(value: Any, path: str, store: Any) -> JSON | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic, numpy.dtype)):
        return None
    dtype = value if isinstance(value, numpy.dtype) else value.dtype
    if dtype.kind not in "biufc" or dtype.isnative is False:
        raise UnknownValue(f"{path} is a NumPy value of type {dtype}")
    if isinstance(value, numpy.dtype):
        return {"$": "numpy dtype", "of": value.str}
    if isinstance(value, numpy.ndarray):
        _must_be(value, path, numpy.ndarray, numpy.memmap)
    raw = torch.frombuffer(bytearray(value.tobytes()), dtype=torch.uint8) if value.size else None
    tag = "numpy" if isinstance(value, numpy.ndarray) else "numpy scalar"
    tree = {
        "$": tag,
        "of": None if raw is None else store(path, raw),
        "dtype": value.dtype.str,
        "shape": list(value.shape),
    }
    by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
    return {**tree, "order": "F"} if by_columns else tree  # sums round by memory order


def _decode_numpy(of: Any, tree: JSON, inner: Any) -> Any:
    import numpy as np

    dtype = _numpy_dtype(tree["dtype"])
    array = np.empty(0, dtype)
    if of is not None:
        array = np.frombuffer(inner(of).numpy().tobytes(), dtype=dtype)
    array = array.reshape(tree["shape"]).copy(order="F" if tree.get("order") == "F" else "C")
    return array[()] if tree["$"] == "numpy scalar" else array


def _decode_mapping(of: Any, tree: JSON, inner: Any) -> Any:
    pairs = [(inner(k), inner(v)) for k, v in of]
    kind = tree.get("kind", "")
    if kind.startswith("default "):
        factories: dict[str, Any] = {
            "none": None,
            "list": list,
            "dict": dict,
            "int": int,
            "float": float,
        }
        return defaultdict(factories[kind.removeprefix("default ")], pairs)
    if kind == "counter":
        return Counter(dict(pairs))
    return OrderedDict(pairs) if kind == "ordered" else dict(pairs)


_ENCODERS: tuple[tuple[Any, Any], ...] = (
    (list, _encode_list),
    (tuple, _encode_tuple),
    ((dict, OrderedDict), _encode_mapping),
    ((set, frozenset), _encode_set),
    (deque, _encode_deque),
    ((bytes, bytearray), _encode_bytes),
    (complex, _encode_complex),
    (torch.dtype, _encode_plain("dtype")),
    (torch.device, _encode_plain("device")),
)

_DECODERS: dict[Any, Any] = {
    "int": lambda of, tree, inner: int(of),
    "float": lambda of, tree, inner: float(of),
    "tuple": lambda of, tree, inner: tuple(inner(item) for item in of),
    "size": lambda of, tree, inner: torch.Size([inner(item) for item in of]),
    "dict": _decode_mapping,
    "set": lambda of, tree, inner: {inner(item) for item in of},
    "frozenset": lambda of, tree, inner: frozenset(inner(item) for item in of),
    "deque": lambda of, tree, inner: deque((inner(item) for item in of), tree["most"]),
    "bytes": lambda of, tree, inner: base64.b64decode(of, validate=True),
    "bytearray": lambda of, tree, inner: bytearray(base64.b64decode(of, validate=True)),
    "complex": lambda of, tree, inner: complex(*map(float.fromhex, of)),
    "dtype": lambda of, tree, inner: DTYPES[of],
    "device": lambda of, tree, inner: torch.device(of),
    "numpy": _decode_numpy,
    "numpy scalar": _decode_numpy,
    "numpy dtype": lambda of, tree, inner: _numpy_dtype(of),
}


def _numpy_dtype(text: Any) -> Any:
    import numpy as np

    if not _NUMBERS.fullmatch(str(text)):  # NumPy evaluates parts of other descriptions
        raise ValueError(text)
    dtype = np.dtype(str(text))
    if dtype.kind not in "biufc":
        raise ValueError(text)
    return dtype

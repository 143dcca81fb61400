"""Read and write JSON strictly: untrusted input is bounded and typed, with one kind of error."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin, get_type_hints

from trainckpt.errors import UnusableSnapshot
from trainckpt.format.digest import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NESTING = 64
MAX_DEPTH = 300  # of any JSON; a value of 64 containers takes three levels for each


def canonical(value: Any) -> bytes:
    """Return the one JSON spelling of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def canonical_text(text: str) -> str:
    """Return the canonical JSON of a string; several times as quick as `canonical`."""
    return json.encoder.encode_basestring_ascii(text)


def canonical_object(members: Mapping[str, bytes]) -> bytes:
    """Return the canonical JSON of an object from that of each member's value."""
    texts = [canonical(key) + b":" + members[key] for key in sorted(members)]
    return b"{" + b",".join(texts) + b"}"


def with_digest(body: dict[str, Any]) -> bytes:
    """Return canonical JSON of `body`, with the digest of everything else in it under `digest`."""
    rest = {key: value for key, value in body.items() if key != "digest"}
    return canonical({**rest, "digest": digest(canonical(rest))})


def verify_digest(body: dict[str, Any], what: str, data: bytes = b"") -> dict[str, Any]:
    """Return `body` without its digest; raise `UnusableSnapshot` if the digest is wrong.

    `data`: the text that `body` was parsed from. If it is canonical, nothing is spelled anew.
    """
    rest = {key: value for key, value in body.items() if key != "digest"}
    found = body.get("digest")
    member = f'"digest":"{found}",'.encode()
    if data.count(member) == 1 and found == digest(data.replace(member, b"")):
        return rest
    try:
        fits = found == digest(canonical(rest))
    except (ValueError, RecursionError):
        fits = False
    if not fits:
        raise UnusableSnapshot(f"{what} does not match its own digest")
    return rest


def parse(data: bytes | bytearray | memoryview, what: str, *, max_bytes: int) -> Any:
    """Parse JSON of at most `max_bytes`; raise `UnusableSnapshot` naming `what`."""
    if len(data) > max_bytes:
        raise UnusableSnapshot(f"{what} is {len(data)} bytes, more than {max_bytes}")
    try:
        raw = bytes(data)
        text = raw.decode(json.detect_encoding(raw))
        value = json.loads(
            text,
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_no_twins,
        )
    except (ValueError, RecursionError) as error:
        raise UnusableSnapshot(f"{what} is not valid JSON: {str(error)[:200]}") from None
    if _is_too_deep(value):
        raise UnusableSnapshot(f"{what} is nested more than {MAX_DEPTH} deep")
    return value


def field(data: Any, key: str, kind: type | tuple[type, ...], what: str) -> Any:
    """Return `data[key]` if it is of `kind` (a bool is never an int); else `UnusableSnapshot`."""
    if not isinstance(data, dict) or key not in data:
        raise UnusableSnapshot(f"{what} lacks {key!r}")
    value = data[key]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise UnusableSnapshot(f"{what}: {key!r} is {str(value)[:60]!r}, not {kinds[0].__name__}")
    return value


def count(data: Any, key: str, what: str) -> int:
    """Return a field that must be an integer >= 0 and below 2**63."""
    value = field(data, key, int, what)
    if not 0 <= value < 2**63:
        raise UnusableSnapshot(f"{what}: {key!r} is {value}, out of range")
    return int(value)


def counts(values: Any, what: str) -> tuple[int, ...]:
    """Return a list of at most 64 integers >= 0, as a tuple."""
    if isinstance(values, list) and len(values) <= MAX_NESTING:
        for value in values:
            if type(value) is not int or not 0 <= value < 2**63:
                break
        else:
            return tuple(values)
    raise UnusableSnapshot(f"{what}: {str(values)[:60]!r} is not a list of sizes")


def build(kind: Any, body: Any, what: str, **known: Any) -> Any:
    """Return a dataclass from a JSON object of its fields; else raise `UnusableSnapshot`.

    Fields are integers >= 0, numbers, texts, such dataclasses, tuples and dicts of those, and
    `Annotated[..., check]`, where `check` returns True for a value that can be.

    Args:
        kind: The dataclass.
        body, what: The object, and its name in errors.
        known: Fields parsed already.
    """
    if not isinstance(body, dict):
        raise UnusableSnapshot(f"{what}: {str(body)[:60]!r} is no {kind.__name__}")
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if each.name in body and each.name not in known:
            known[each.name] = _typed(hints[each.name], body[each.name], f"{what}: {each.name}")
        elif each.name not in known and each.default is MISSING:
            raise UnusableSnapshot(f"{what} lacks {each.name!r}")
    return kind(**known)


def _typed(kind: Any, value: Any, what: str) -> Any:
    origin, of = get_origin(kind), get_args(kind)
    if origin is Annotated:
        found = _typed(of[0], value, what)
        if of[1](found):
            return found
    elif origin in (Union, UnionType):
        return None if value is None else _typed(of[0], value, what)
    elif is_dataclass(kind):
        return build(kind, value, what)
    elif origin is tuple and type(value) is list:
        return tuple(_typed(of[0], each, what) for each in value)
    elif origin is dict and type(value) is dict:
        return {_typed(of[0], k, what): _typed(of[1], v, what) for k, v in value.items()}
    elif type(value) is kind is str or (type(value) is kind is int and 0 <= value < 2**63):
        return value
    elif kind is float and type(value) in (int, float) and abs(value) < 2**63:
        return float(value)
    raise UnusableSnapshot(f"{what} is {str(value)[:60]!r}")


def _is_too_deep(value: Any) -> bool:
    level = [value] if type(value) in (dict, list) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in (dict, list)
        ]
        if not level:
            return False
    return True


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    """Refuse a number too large for a float: infinity has no canonical JSON."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result

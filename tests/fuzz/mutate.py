"""Mutations: of trees, where structure matters, and of bytes. All draws come from one generator.

A tree is what JSON can hold. `spell` writes it; a string that begins with `RAW` stands for JSON
that no tree can hold: deep nesting, twins of a key, numbers out of range.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

RAW = "\x00raw:"
_RAW = re.compile(r'"\\u0000raw:(\w+):(\d+)"')
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    9,
    31,
    32,
    63,
    64,
    65,
    255,
    256,
    4096,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**9,
    10**15,
    10**20,
    10**400,
    0.5,
    -0.0,
    1.5,
    1e9,
    1e17,
    1e300,
    -1e300,
    5e-324,
    float("nan"),
    float("inf"),
)
TEXTS = (
    "",
    " ",
    "0",
    "-1",
    "1e5",
    "nan",
    "inf",
    "\x00",
    "\n",
    "\ud800",
    "\udcff\udc00",
    "é",
    "٣",
    "²",
    "..",
    ".",
    "/",
    "../x",
    "a/b",
    "@",
    "~",
    "$",
    "a" * 300,
    "9" * 30,
    "9" * 5000,
    "split",
    "rank",
    "U8",
    "F32",
    "BOOL",
    "s1~1.1",
    "s1m2~3.4",
    "s1",
    "latest",
    "[0:1]",
    "00" * 16,
    "\x1b[31m",
    "[bold]",
    "{}",
    "%s",
    "\u202e",
    "True",
    "none",
    "1 s",
)
SIZES = (1, 2, 10, 60, 64, 65, 70, 150, 250, 260, 330, 480, 900, 985, 995, 1100, 5000)


def spell(tree: Any, *, sort: bool = False) -> str:
    """JSON of a tree."""
    text = json.dumps(tree, separators=(",", ":"), sort_keys=sort)
    return _RAW.sub(_raw, text) if "\\u0000raw:" in text else text


def _raw(match: re.Match[str]) -> str:
    kind, size = match[1], int(match[2])
    return {
        "lists": lambda: "[" * size + "]" * size,
        "dicts": lambda: '{"a":' * size + "1" + "}" * size,
        "of": lambda: '{"$":"tuple","of":[' * size + "]}" * size,
        "digits": lambda: "1" * size,
        "exponent": lambda: f"1e{size}",
        "twins": lambda: '{"a":1,"a":2}',
        "open": lambda: "[" * size,
        "zeros": lambda: "0" * size,
    }[kind]()


def mutated(tree: Any, rng: Random, others: list[Any], words: tuple[str, ...]) -> Any:
    """The tree with one to four changes; `others` give parts, `words` are worth a try."""
    for _ in range(1 + int(rng.random() ** 3 * 4)):
        tree = _descend(tree, rng, others, words)
    return tree


def _descend(node: Any, rng: Random, others: list[Any], words: tuple[str, ...]) -> Any:
    draw = rng.random()
    if type(node) is dict and node and draw < 0.86:
        keys = list(node)
        key = keys[int(rng.random() * len(keys))]
        if draw < 0.72:
            return {**node, key: _descend(node[key], rng, others, words)}
        return _change_dict(node, key, rng, others, words)
    if type(node) is list and node and draw < 0.88:
        at = int(rng.random() * len(node))
        if draw < 0.7:
            copy = node[:]
            copy[at] = _descend(node[at], rng, others, words)
            return copy
        return _change_list(node, at, rng, others)
    if draw < 0.92:
        return _changed(node, rng, words)
    return _replacement(rng, others, words)


def _change_dict(node: Any, key: str, rng: Random, others: list[Any], words: Any) -> Any:
    draw = rng.random()
    copy = dict(node)
    if draw < 0.35:
        del copy[key]
    elif draw < 0.55:
        copy[_word(rng, words)] = copy[key]
    elif draw < 0.75:
        copy[_word(rng, words)] = _replacement(rng, others, words)
    elif draw < 0.9:
        other = list(node)[int(rng.random() * len(node))]
        copy[key], copy[other] = copy[other], copy[key]
    else:
        copy[_changed(key, rng, words)] = copy.pop(key)
    return copy


def _change_list(node: list[Any], at: int, rng: Random, others: list[Any]) -> list[Any]:
    draw = rng.random()
    if draw < 0.3:
        return node[:at] + node[at + 1 :]
    if draw < 0.6:
        return [*node[: at + 1], *node[at:]]
    if draw < 0.75:
        return node[::-1]
    if draw < 0.9:
        return [*node, _part(others[int(rng.random() * len(others))], rng)]
    return (node * (2 + int(rng.random() ** 6 * 100)))[:2000]


def _changed(node: Any, rng: Random, words: tuple[str, ...]) -> Any:
    draw = rng.random()
    if type(node) is bool or node is None:
        return (not node) if draw < 0.5 else _number(rng)
    if type(node) in (int, float):
        if draw < 0.4:
            return _number(rng)
        return (node + 1, node - 1, node * 2, -node, str(node), [node])[int(rng.random() * 6)]
    if type(node) is str:
        return changed_text(node, rng, words)
    if draw < 0.5:
        return [node]
    return {"a": node} if draw < 0.6 else type(node)()


def changed_text(text: str, rng: Random, words: tuple[str, ...]) -> str:
    """The text with a part replaced, cut out, repeated or put in."""
    draw = rng.random()
    if text.startswith(RAW) or draw < 0.15:
        return _word(rng, words)
    begin = int(rng.random() * (len(text) + 1))
    end = min(begin + int(rng.random() ** 2 * 8), len(text))
    if draw < 0.4:
        return text[:begin] + _word(rng, words) + text[end:]
    if draw < 0.6:
        return text[:begin] + text[end:]
    if draw < 0.75:
        return text[:end] + text[begin:]
    if draw < 0.78:
        return text[:begin] + text[begin:end] * int(rng.random() * 200) + text[end:]
    return text[:begin] + chr(32 + int(rng.random() * 95)) + text[end:]


def _word(rng: Random, words: tuple[str, ...]) -> str:
    found = words if words and rng.random() < 0.7 else TEXTS
    return found[int(rng.random() * len(found))]


def _number(rng: Random) -> Any:
    return NUMBERS[int(rng.random() * len(NUMBERS))]


def _replacement(rng: Random, others: list[Any], words: tuple[str, ...]) -> Any:
    draw = rng.random()
    if draw < 0.3:
        return _number(rng)
    if draw < 0.5:
        return _word(rng, words)
    if draw < 0.6:
        return (None, True, False, [], {}, [[]], [0], {"": 0})[int(rng.random() * 8)]
    if draw < 0.64:
        kind = ("lists", "dicts", "of", "digits", "exponent", "twins", "open", "zeros")
        size = SIZES[int(rng.random() * len(SIZES))]
        return f"{RAW}{kind[int(rng.random() * len(kind))]}:{size}"
    return _part(others[int(rng.random() * len(others))], rng)


def _part(tree: Any, rng: Random) -> Any:
    while type(tree) in (dict, list) and tree and rng.random() < 0.8:
        below = list(tree.values()) if type(tree) is dict else tree
        tree = below[int(rng.random() * len(below))]
    return tree


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """Some bytes flipped, cut out, repeated or put in."""
    for _ in range(1 + int(rng.random() * 3)):
        begin = int(rng.random() * (len(data) + 1))
        end = min(begin + int(rng.random() ** 3 * 40), len(data))
        draw = rng.random()
        if draw < 0.4 and begin < len(data):
            flipped = data[begin] ^ (1 << int(rng.random() * 8))
            data = data[:begin] + bytes((flipped,)) + data[begin + 1 :]
        elif draw < 0.55:
            data = data[:begin] + data[end:]
        elif draw < 0.7:
            data = data[:end] + data[begin:]
        elif draw < 0.85:
            data = data[:begin] + rng.randbytes(1 + int(rng.random() * 4)) + data[end:]
        else:
            data = data[:begin]
    return data

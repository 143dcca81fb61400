"""A variable is live where some way through the code reads it before writing it."""

from __future__ import annotations

import sys

import pytest

from trainckpt.state.live_names import live_names

BEFORE = """
import contextlib

x, y, z, k = 1, 2, 3, 4
"""
IN_A_FUNCTION = """
def main():
    x, y, z, k = 1, 2, 3, 4
{body}

main()
"""


def live(body):
    """The live ones of x, y, z and k, as the first batch is taken by a loop in this code."""

    def batches():
        for number in range(2):
            seen.append(live_names(sys._getframe(1)) & set("xyzk"))
            yield number

    found = []
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    for text in (BEFORE + body, BEFORE + IN_A_FUNCTION.format(body=indented)):
        seen = []
        exec(compile(text, "script", "exec"), {"batches": batches})
        assert seen[0] == seen[-1], "at the second batch it is as at the first one"
        found.append("".join(sorted(seen[0])))
    assert found[0] == found[1], "a function has the live variables of a module"
    return found[0]


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("for x in batches():\n    print(x)", ""),
        ("for b in batches():\n    print(x)", "x"),
        ("for b in batches():\n    x = b", ""),
        ("x = []\nfor b in batches():\n    x.append(b)", ""),
        ("x = []\nfor b in batches():\n    x.append(y)\n    x.extend([z])", "yz"),
        ("x = []\nfor b in batches():\n    x.append(b)\nprint(x)", "x"),
        ("x = []\ndef f(b):\n    x.append(b)\nfor b in batches():\n    f(b)", ""),
        ("x = []\nfor b in batches():\n    x.copy()", "x"),
        ("for b in batches():\n    x += b", "x"),
        ("for b in batches():\n    y, x = x, b", "x"),
        ("for b in batches():\n    x = b\n    y = x", ""),
        ("for b in batches():\n    if b:\n        x = b\n    print(x)", "x"),
        ("for b in batches():\n    x = b if b else 5\n    print(x)", ""),
        ("for b in batches():\n    if x is None:\n        x = b", "x"),
        ("for b in batches():\n    x = b\nprint(x, y)", "y"),
        ("for b in batches():\n    x.real", "x"),
        ("for b in batches():\n    if b > 5:\n        x.load_state_dict(y)\n        print(x)", "y"),
        ("for b in batches():\n    if b > 5:\n        y = x.state_dict()\n    x = b", "x"),
        ("for b in batches():\n    del x\n    x = 1", ""),
        ("for b in batches():\n    x = [y for _ in range(2)]", "y"),
        ("for b in batches():\n    x = b\n    y = [x for _ in range(2)]", ""),
        ("for b in batches():\n    y = [x for x in range(2)]", ""),
        ("def see():\n    return x\nfor b in batches():\n    see()", "x"),
        ("for b in batches():\n    x = b\n    f = lambda: x + 1\n    f()", ""),
        ("for b in batches():\n    f = lambda: x + 1\n    f()", "x"),
        ("for b in batches():\n    while x < b:\n        y = x = x + 1", "x"),
        (
            "for b in batches():\n    try:\n        b.real\n    except ValueError:\n        y = x",
            "x",
        ),
        ("try:\n    for x in batches():\n        y = x\nfinally:\n    print(z)", "z"),
        ("with contextlib.suppress(OSError):\n    for x in batches():\n        y\nprint(x)", "y"),
        ("it = batches()\nwhile (x := next(it, None)) is not None:\n    y = x", ""),
        ("it = batches()\nfor _ in range(2):\n    x = next(it)\n    y = k + x", "k"),
    ],
)
def test_a_variable_that_is_read_before_it_is_written_is_live(body, names):
    assert live(body) == names


def test_a_variable_of_a_function_around_is_live_where_it_is_read():
    seen = []

    def outer():
        x, y = 1, 2

        def inner():
            seen.append(live_names(sys._getframe()))
            return x

        seen.append(live_names(sys._getframe()))
        return inner(), y

    outer()
    assert "x" in seen[0]
    assert "y" in seen[0]
    assert seen[1] & set("xy") == {"x"}

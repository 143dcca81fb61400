"""The tree drawn in the docstring of `errors` is the tree of the classes."""

from __future__ import annotations

import re

import trainckpt
from trainckpt import errors

_LINE = re.compile(r"^( *(?:[|+] *[-+| ]*)?)(\w+) +(\d+) +\w", re.MULTILINE)


def drawn():
    """Class name -> (name of the base it is drawn under, exit code)."""
    tree, found = [], {}
    for indent, name, code in _LINE.findall(errors.__doc__):
        while tree and tree[-1][0] >= len(indent):
            tree.pop()
        found[name] = (tree[-1][1] if tree else "Exception", int(code))
        tree.append((len(indent), name))
    return found


def defined():
    """The same of the classes."""
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    return {c.__name__: (c.__bases__[0].__name__, c.exit_code) for c in classes}


def test_the_drawn_tree_is_the_tree_of_the_classes():
    assert drawn() == defined()


def test_every_error_is_at_the_front_door():
    assert defined().keys() <= set(trainckpt.__all__)


def test_an_error_says_what_to_type_next():
    error = errors.TierUnavailable("cannot read x: denied", hint="make x readable")
    assert str(error) == "cannot read x: denied\nnext: make x readable"


def test_a_mismatch_lists_every_difference_at_once():
    error = errors.StateMismatch("not the same", ["a is new", "b is gone"])
    assert str(error) == "not the same (2 differences)\n  a is new\n  b is gone"
    assert error.differences == ("a is new", "b is gone")


def test_no_usable_snapshot_lists_every_refusal():
    error = errors.NoUsableSnapshot("runs/x", {"s2~1.2": "damaged", "s1~1.1": "missing"})
    assert "s2~1.2: damaged" in str(error)
    assert "s1~1.1: missing" in str(error)

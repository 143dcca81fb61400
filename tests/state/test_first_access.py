"""Whether the first access to an attribute sets or reads it."""

from __future__ import annotations

import pytest

from trainckpt.state.first_access import FirstAccesses


class Holder:
    fixed = 1

    def __init__(self):
        self.a = self.b = self.c = self.fixed = 1


def test_those_that_are_read_first_or_never_are_told_and_the_class_is_as_it_was():
    one, two, before = Holder(), Holder(), dict(vars(Holder))
    places = {"one.a": (one, "a"), "two.a": (two, "a"), "b": (one, "b"), "c": (one, "c")}
    accesses = FirstAccesses(places | {"fixed": (one, "fixed")})
    assert accesses.names == places.keys()
    one.a = 2
    one.a += 1
    two.a += 1
    one.b = 2
    two.b += 1
    assert (one.a, two.a, one.b, two.b, one.c) == (3, 2, 2, 2, 1)
    assert accesses.end() == ["two.a", "c"]
    assert (one.a, two.a, one.b, two.b, one.c) == (3, 2, 2, 2, 1)
    assert dict(vars(Holder)) == before


def test_an_attribute_can_be_removed_and_missed_meanwhile():
    one = Holder()
    accesses = FirstAccesses({"a": (one, "a")})
    del one.a
    for access in (lambda: one.a, lambda: delattr(one, "a"), lambda: Holder.a):
        with pytest.raises(AttributeError):
            access()
    one.a = 5
    assert vars(one)["a"] == 5
    accesses.end()

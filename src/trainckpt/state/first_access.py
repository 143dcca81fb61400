"""Tell attributes that the script sets anew in each batch from those that go on from their value.

A resume leaves attributes as the script made them. `self.rate = f(step)` before its first use makes
up for that; `self.seen += 1` reads it first. While the first batch is trained, a descriptor on the
class notes which comes first. The values stay in the objects' own dictionaries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class FirstAccess:
    """A descriptor in place of an attribute of some objects of a class."""

    def __init__(self, kind: type, key: str) -> None:
        self._kind, self._key = kind, key
        self._observed: dict[int, Any] = {}  # holds the objects too: an address stays theirs
        self._known: set[int] = set()
        self._set: set[int] = set()
        setattr(kind, key, self)

    def add(self, holder: object) -> None:
        """Observe this object of the class."""
        self._observed[id(holder)] = holder

    def set_first(self, holder: object) -> bool:
        """Return True if the attribute was set before it was read."""
        return id(holder) in self._set

    def end(self) -> None:
        """Remove the descriptor from the class."""
        if vars(self._kind).get(self._key) is self:
            delattr(self._kind, self._key)

    def __get__(self, holder: Any, kind: type | None = None) -> Any:
        if holder is None:
            raise AttributeError(self._key)
        self._known.add(id(holder))
        try:
            return holder.__dict__[self._key]
        except KeyError:
            raise AttributeError(self._key) from None

    def __set__(self, holder: Any, value: object) -> None:
        if id(holder) not in self._known:
            self._known.add(id(holder))
            self._set.add(id(holder))
        holder.__dict__[self._key] = value

    def __delete__(self, holder: Any) -> None:
        try:
            del holder.__dict__[self._key]
        except KeyError:
            raise AttributeError(self._key) from None


class FirstAccesses:
    """The first accesses to some attributes from now on.

    Attributes:
        names: Those that can be observed.
    """

    def __init__(self, places: Mapping[str, tuple[object, str]]) -> None:
        """`places`: name -> object of the script's own class, and the attribute in it."""
        self._kinds: dict[tuple[type, str], FirstAccess] = {}
        self._places: dict[str, tuple[object, str]] = {}
        for name, (holder, key) in places.items():
            kind = type(holder)
            if (kind, key) not in self._kinds:
                if any(key in vars(base) for base in kind.__mro__):
                    continue
                self._kinds[kind, key] = FirstAccess(kind, key)
            self._kinds[kind, key].add(holder)
            self._places[name] = holder, key
        self.names = frozenset(self._places)

    def end(self) -> list[str]:
        """Stop, and return the names of those that were not set before they were read."""
        for access in self._kinds.values():
            access.end()
        return [
            name
            for name, (holder, key) in self._places.items()
            if not self._kinds[type(holder), key].set_first(holder)
        ]

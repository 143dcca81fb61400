"""Generators of their own that a dataset or a collate_fn holds, as values.

`self.rng = np.random.default_rng(seed)` in a dataset is drawn from by each sample, and no global
generator knows of it. So they are looked for: objects of numpy.random.Generator, RandomState,
random.Random and torch.Generator (CPU) among attributes, items, closures and arguments, a few
steps deep. Each is known by the path that leads to it; one that is not there yet when its state
comes back (made at the first sample, say) is named in a warning.

Without workers those of this process are kept; with workers each one's own, as the global ones are
(see worker.py).

Used by: sources.py, worker.py.
"""

from __future__ import annotations

import base64
import functools
import json
import random
import sys
import types
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from trainckpt.data.randomness import as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEPTH = 5  # Subset -> dataset -> transform -> list -> element
OBJECTS = 512  # that are looked at; the nearest come first
ITEMS = 64  # a longer list holds data, unless it begins with an object, as one of datasets does
_PLAIN = (str, int, float, type(None), bytes, bytearray, complex, type, types.ModuleType)
_DATA = (*_PLAIN, torch.Tensor, list, tuple, dict, set, frozenset)


def capture(roots: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the state of every generator that `roots` hold, by its path; draws nothing."""
    found = {}
    for path, generator in _generators(roots):
        state = _read(generator)
        if state is not None:
            found[path] = state
    return found


def restore(roots: Mapping[str, Any], saved: Mapping[str, bytes], whose: str) -> str:
    """Put back what `capture` returned; return a sentence about what could not be, or "".

    Args:
        roots: As they are in this process.
        saved: Path -> state.
        whose: What the sentence calls them: what is not there, or of another kind, stays as it is.
    """
    if not saved:
        return ""
    there = dict(_generators(roots))
    lost = [
        path
        for path, state in saved.items()
        if path not in there or (_read(there[path]) != state and not _write(there[path], state))
    ]
    if not lost:
        return ""
    return (
        f"{whose}: {', '.join(lost)[:200]} cannot be put back: no generator of its kind is there "
        "yet; make it in __init__. Data may differ from the uninterrupted run"
    )


def pack(states: Mapping[str, bytes]) -> bytes:
    """As one value; b"" for none."""
    if not states:
        return b""
    text = {path: base64.b64encode(state).decode() for path, state in states.items()}
    return json.dumps(text, sort_keys=True).encode()


def unpack(packed: bytes) -> dict[str, bytes]:
    """The inverse of `pack`."""
    text = json.loads(packed) if packed else {}
    return {path: base64.b64decode(state) for path, state in text.items()}


def namespaces(root: Any) -> list[dict[str, Any]]:
    """Return the live `__dict__` of an object and of each that it holds, as deep as `capture`."""
    found = (names_of(value) for _, value in walk({"": root}))
    return [names for names in found if names is not None]


def names_of(value: Any) -> dict[str, Any] | None:
    """Return an object's live `__dict__`; runs no code of its class."""
    try:
        names: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return names


def is_generator(value: Any) -> bool:
    """Tell whether it is one of the kinds that `capture` reads."""
    return _is(value, _kinds())


def _generators(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kinds, shared = _kinds(), _global_ones()
    for path, value in walk(roots):
        if _is(value, kinds) and not any(value is one for one in shared):
            yield path, value


def walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return all that is reachable, the nearest first, each once."""
    kinds = _kinds()
    seen: dict[int, Any] = {}  # the values too: an address is not given to another meanwhile
    ahead = deque((name, root, 0) for name, root in roots.items())
    while ahead and len(seen) < OBJECTS:
        path, value, depth = ahead.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if not _is(value, kinds) and depth < DEPTH and len(ahead) < OBJECTS:
            ahead.extend(
                (path + step, part, depth + 1)
                for step, part in _parts(value)
                if not _is(part, _PLAIN)
            )


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    """Not isinstance: that asks the object for its class, which a proxy answers by being made."""
    return issubclass(type(value), kinds)


def _kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy.random")
    numpys = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return (random.Random, torch.Generator, *numpys)


def _global_ones() -> list[Any]:
    """Those are kept as what they are."""
    numpy: Any = sys.modules.get("numpy.random")
    numpys = [] if numpy is None else [getattr(numpy.mtrand, "_rand", None)]
    return [getattr(random, "_inst", None), torch.default_generator, *numpys]


def _parts(value: Any) -> list[tuple[str, Any]]:
    """What it holds, each with the step that leads there. Runs no code of its class."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return []
    if kind is functools.partial:
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if kind is types.MethodType:
        return [("", value.__self__)]
    if kind is types.FunctionType:
        return _of_function(value)
    return _items(value) + ([] if kind in (list, tuple, dict) else _attributes(value))


def _items(value: Any) -> list[tuple[str, Any]]:
    """Of a list, a tuple or a dictionary, also where a class of the script's is made of one."""
    for kind in (list, tuple):
        if _is(value, (kind,)):
            number = kind.__len__(value)
            most = OBJECTS if number and not _is(kind.__getitem__(value, 0), _DATA) else ITEMS
            few = kind.__iter__(value) if number <= most else ()
            return [(f"[{at}]", part) for at, part in enumerate(few)]
    if _is(value, (dict,)) and dict.__len__(value) <= ITEMS:
        return [(f"[{key!r}]", part) for key, part in list(dict.items(value))
                if type(key) in (str, int)]  # fmt: skip
    return []


def _of_function(function: types.FunctionType) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [(".defaults", function.__defaults__)]
    found.append((".defaults", function.__kwdefaults__))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found.append((f".{name}", cell.cell_contents))
        except ValueError:  # not assigned yet
            continue
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    try:
        named = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        named = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    named[name] = member.__get__(value)
                except AttributeError:
                    continue
    return [(f".{name}", part) for name, part in named.items()]


def _read(generator: Any) -> bytes | None:
    """Its state; None where it has none that can be told, as random.SystemRandom."""
    if _is(generator, (torch.Generator,)):
        return as_bytes(generator.get_state()) if generator.device.type == "cpu" else None
    try:
        return json.dumps(_state_of(generator), sort_keys=True, default=_listed).encode()
    except (NotImplementedError, TypeError, ValueError):
        return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _listed(value: Any) -> Any:
    """NumPy's arrays and numbers."""
    return value.tolist()


def _write(generator: Any, state: bytes) -> bool:
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        else:
            _set_state(generator, json.loads(state))
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
        return
    state = _alike(state, _state_of(generator))
    if hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _alike(told: Any, now: Any) -> Any:
    """What was told, with arrays where NumPy has them now."""
    if isinstance(now, dict):
        return {key: _alike(told[key], part) for key, part in now.items()}
    if isinstance(told, list):
        now = now.copy()
        now[:] = told
        return now
    return told

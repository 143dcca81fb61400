"""Read and write the random generators of one process as comparable values.

There are three: Python's `random`, NumPy's legacy global generator, torch's CPU generator. They are
read and written whole; nothing here draws from them or seeds them. NumPy takes part only once it
has been imported: before that its generator cannot have been used.

Values are bytes with a fixed layout (and one uint8 tensor for torch in the main process). Equal
bytes therefore mean equal randomness, on every platform.

    python  version i32, 625 words u32, has a cached gaussian u8, its value f64
    numpy   624 words u32, position i32, has a cached gaussian i32, its value f64
    torch   as torch.get_rng_state returns it
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import os
import random
import struct
import sys
import sysconfig
import types
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.quasirandom import SobolEngine
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


_PYTHON = struct.Struct("<i625IBd")
_NUMPY_WORDS = 2496  # bytes; the position follows them, in the value and in NumPy's own memory
_NUMPY_TAIL = struct.Struct("<iid")


def main_rng() -> dict[str, Any]:
    """Return this process's generators: {"python": bytes, "numpy": bytes, "torch": uint8 tensor}.

    The key "numpy" is absent while NumPy is not imported.
    """
    state: dict[str, Any] = {"python": _read_python(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _read_numpy()
    return state


def set_main_rng(state: dict[str, Any]) -> None:
    """Restore, bitwise, a result of `main_rng` or `packed_rng`; absent keys stay as they are."""
    if "python" in state:
        _write_python(state["python"])
    if "numpy" in state:
        _write_numpy(state["numpy"])
    if "torch" in state:
        packed = state["torch"]
        is_bytes = not isinstance(packed, torch.Tensor)
        torch.set_rng_state(_as_tensor(packed) if is_bytes else packed)


def packed_rng() -> dict[str, bytes]:
    """Return `main_rng` with torch's part as bytes too, as workers send it."""
    state: dict[str, Any] = main_rng()
    state["torch"] = as_bytes(state["torch"])
    return state


def changed_since(known: dict[str, bytes]) -> dict[str, bytes]:
    """Return the parts of `packed_rng` that differ from `known`; cheap without draws."""
    now = {"python": _read_python(), "torch": as_bytes(torch.get_rng_state())}
    if "numpy" in sys.modules and not _numpy_untouched(known.get("numpy", b"")):
        now["numpy"] = _read_numpy()
    return {key: value for key, value in now.items() if value != known.get(key)}


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a dense CPU tensor."""
    tensor = tensor.contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _as_tensor(packed: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def replaced_numpy_generator() -> str | None:
    """Return the name of the bit generator in place of NumPy's own, or None."""
    if "numpy" not in sys.modules:
        return None
    import numpy as np

    kind = str(np.random.get_state(legacy=False)["bit_generator"])
    return None if kind == "MT19937" else kind


def _read_python() -> bytes:
    version, words, gauss = random.getstate()
    return _PYTHON.pack(version, *words, gauss is not None, gauss or 0.0)


def _write_python(packed: bytes) -> None:
    version, *words, has_gauss, gauss = _PYTHON.unpack(packed)
    random.setstate((version, tuple(words), gauss if has_gauss else None))


def _read_numpy() -> bytes:
    import numpy as np

    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise ConfigurationError(
            f"NumPy's global generator was replaced by {state['bit_generator']}, "
            "which trainckpt cannot restore",
            hint="keep your own numpy.random.Generator and track its state instead of "
            "numpy.random.set_bit_generator",
        )
    words: bytes = state["state"]["key"].astype("<u4", copy=False).tobytes()
    return words + _NUMPY_TAIL.pack(state["state"]["pos"], state["has_gauss"], state["gauss"])


def _numpy_untouched(known: bytes) -> bool:
    # Reading NumPy's state takes 70 us, comparing its memory 1 us. A cached gaussian is not in that
    # memory and can be used up without a draw: then the full state has to be read.
    import numpy as np

    if len(known) != _NUMPY_WORDS + _NUMPY_TAIL.size or not hasattr(np.random, "get_bit_generator"):
        return False
    generator = np.random.get_bit_generator()
    _, has_gauss, _ = _NUMPY_TAIL.unpack_from(known, _NUMPY_WORDS)
    if has_gauss or sys.byteorder != "little" or not isinstance(generator, np.random.MT19937):
        return False
    seen = _NUMPY_WORDS + 4
    return ctypes.string_at(generator.ctypes.state_address, seen) == known[:seen]


def _write_numpy(packed: bytes) -> None:
    import numpy as np

    position, has_gauss, gauss = _NUMPY_TAIL.unpack_from(packed, _NUMPY_WORDS)
    words = np.frombuffer(packed, dtype="<u4", count=_NUMPY_WORDS // 4)
    np.random.set_state(("MT19937", words, position, has_gauss, gauss))


# ---- generators inside a dataset or a collate_fn
#
# Each sample may draw from `self.rng = np.random.default_rng(seed)` in a dataset, and no global
# generator reflects that. So a search finds objects of numpy.random.Generator, RandomState,
# random.Random and torch.Generator (CPU) among attributes, items, closures, arguments and globals,
# a few steps deep. The path to a generator is its name. A generator that does not exist yet when
# its state is restored (made at the first sample, say) is named in a warning.
#
# Without workers the generators of this process are saved; with workers, those of each worker, like
# the global ones (see worker.py).


DEPTH = 5  # Subset -> dataset -> transform -> list -> element
OBJECTS = 512  # limit of objects inspected; the nearest come first
ITEMS = 64  # a longer list is data, unless it begins with an object, such as a list of datasets
_PLAIN = (str, int, float, type(None), bytes, bytearray, complex, type, types.ModuleType)
_TRAINERS = {(package, "Trainer") for package in ("lightning", "pytorch_lightning", "transformers")}
_DATA = (*_PLAIN, torch.Tensor, list, tuple, dict, set, frozenset)


def capture(roots: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the state of every generator inside `roots`, by its path; draws nothing."""
    states = {}
    for path, generator in _generators(roots):
        state = _read(generator)
        if state is not None:
            states[path] = state
    return states


def restore(roots: Mapping[str, Any], saved: Mapping[str, bytes], owner_name: str) -> str:
    """Restore the result of `capture`; return a sentence about unrestored generators, or "".

    Args:
        roots: The same objects in this process.
        saved: Path -> state. A path without a generator of the same kind is left alone.
        owner_name: Begins the sentence.
    """
    if not saved:
        return ""
    generators = dict(_generators(roots))
    lost = [
        path
        for path, state in saved.items()
        if path not in generators
        or (_read(generators[path]) != state and not _write(generators[path], state))
    ]
    if not lost:
        return ""
    return (
        f"{owner_name}: {', '.join(lost)[:200]} cannot be put back: no generator of its kind is "
        "there yet; make it in __init__. Data may differ from the uninterrupted run"
    )


def pack(states: Mapping[str, bytes]) -> bytes:
    """Return the states as one value; b"" for none."""
    if not states:
        return b""
    text = {path: base64.b64encode(state).decode() for path, state in states.items()}
    return json.dumps(text, sort_keys=True).encode()


def unpack(packed: bytes) -> dict[str, bytes]:
    """Return the states from a result of `pack`."""
    text = json.loads(packed) if packed else {}
    return {path: base64.b64decode(state) for path, state in text.items()}


def namespaces(root: Any) -> list[dict[str, Any]]:
    """Return the live `__dict__` of an object and of each object inside, as deep as `capture`."""
    namespaces = (names_of(value) for _, value in walk({"": root}))
    return [names for names in namespaces if names is not None]


def names_of(value: Any) -> dict[str, Any] | None:
    """Return an object's live `__dict__`; runs no code of its class."""
    try:
        names: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return names


def find(roots: Mapping[str, Any]) -> list[Any]:
    """Return every generator inside `roots`, as deep as `capture`."""
    return [generator for _, generator in _generators(roots)]


def is_generator(value: Any) -> bool:
    """Return True if the object is of a kind that `capture` reads."""
    return _is_instance(value, _generator_types())


def _generators(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    kinds, shared = _generator_types(), _global_generators()
    for path, value in walk(roots):
        if _is_instance(value, kinds) and not any(value is one for one in shared):
            yield path, value


def find_own(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return path -> generator inside `roots`, each once; enters only objects of own classes.

    Own classes and functions are those of no installed package. Containers are entered too.
    """
    shared = _global_generators()
    nearest = {path: value for path, value in roots.items() if is_generator(value)}
    nearest.update({path: value for path, value in roots.items() if _is_own(value)})
    return {
        path: value
        for path, value in walk(nearest, enters=_is_own)
        if is_generator(value) and not any(value is one for one in shared)
    }


def _is_own(value: Any) -> bool:
    kind = type(value)
    if kind in (list, tuple, dict, functools.partial, types.MethodType):
        return True
    if kind is types.FunctionType:
        return is_own_module(value.__module__ or "")
    return is_own_module(kind.__module__) and not issubclass(kind, torch.nn.Module)


@functools.cache
def is_own_module(name: str) -> bool:
    """Return True for a module of the script's, outside the places of installed packages."""
    if name == "__main__":
        return True
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or name.partition(".")[0] == __name__.partition(".")[0]:
        return False
    return _is_outside_packages(file)


@functools.cache
def _is_outside_packages(file: str) -> bool:
    # A Python may import from several such folders: its own, a user's, those below its venv.
    if not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts):
        return False
    places = (sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    return not any(file.startswith(place + os.sep) for place in places)


def walk(
    roots: Mapping[str, Any], enters: Callable[[Any], bool] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield everything reachable with its path, the nearest first, each once.

    `enters`: return False for a value whose parts are left out.
    """
    kinds = _generator_types()
    seen: dict[int, Any] = {}  # holds the values too, so that no address is used again
    queue = deque((name, root, 0) for name, root in roots.items())
    while queue and len(seen) < OBJECTS:
        path, value, depth = queue.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield path, value
        if _is_instance(value, kinds) or (enters is not None and not enters(value)):
            continue
        if depth < DEPTH and len(queue) < OBJECTS:
            queue.extend(
                (path + step, part, depth + (not _is_stage(part)))
                for step, part in _children(value)
                if not _is_left_out(part)
            )


def _is_stage(value: Any) -> bool:
    """Return True for a node of torchdata: a pipeline has one inside the other, all as near."""
    kind: Any = type(value)
    return _is_node(kind)


@functools.cache
def _is_node(kind: Any) -> bool:
    return any(
        base.__name__ == "BaseNode" and base.__module__.startswith("torchdata.")
        for base in kind.__mro__
    )


def _is_left_out(value: Any) -> bool:
    kind: Any = type(value)
    return issubclass(kind, _PLAIN) or _is_of_training(kind)


@functools.cache
def _is_of_training(kind: type) -> bool:
    """Return True for a class whose objects lead to the whole training, and hold no sample.

    A data module of Lightning has its Trainer in an attribute, and so reaches every loader.
    """
    if issubclass(kind, _BaseDataLoaderIter):
        return True
    own = __name__.partition(".")[0]
    roots = [(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__]
    return any(root == own or (root, name) in _TRAINERS for root, name in roots)


def _is_instance(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return `issubclass` of the type; isinstance would ask the object, and build a lazy proxy."""
    return issubclass(type(value), kinds)


def _generator_types() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy.random")
    numpy_types = () if numpy is None else (numpy.Generator, numpy.RandomState)
    return (random.Random, torch.Generator, SobolEngine, *numpy_types)


def _global_generators() -> list[Any]:
    """Return the process-wide generators, which are saved separately."""
    numpy: Any = sys.modules.get("numpy.random")
    numpys = [] if numpy is None else [getattr(numpy.mtrand, "_rand", None)]
    return [getattr(random, "_inst", None), torch.default_generator, *numpys]


def _children(value: Any) -> list[tuple[str, Any]]:
    """Return the objects inside a value with their path steps; runs no code of its class."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return []
    if kind is functools.partial:
        return [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    if kind is types.MethodType:
        return [("", value.__self__)]
    if kind is types.FunctionType:
        return _function_children(value)
    return _items(value) + ([] if kind in (list, tuple, dict) else _attributes(value))


def _items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a list, tuple or dictionary, including subclasses."""
    for kind in (list, tuple):
        if _is_instance(value, (kind,)):
            number = kind.__len__(value)
            is_data = number == 0 or _is_instance(kind.__getitem__(value, 0), _DATA)
            items = kind.__iter__(value) if number <= (ITEMS if is_data else OBJECTS) else ()
            return [(f"[{index}]", part) for index, part in enumerate(items)]
    if _is_instance(value, (dict,)) and dict.__len__(value) <= ITEMS:
        entries = list(dict.items(value))
        return [(f"[{key!r}]", part) for key, part in entries if type(key) in (str, int)]
    return []


def _function_children(function: types.FunctionType) -> list[tuple[str, Any]]:
    defaults = (function.__defaults__, function.__kwdefaults__)
    children: list[tuple[str, Any]] = [(".defaults", values) for values in defaults]
    children += _global_parts(_globals_named((function,)))
    named = {**closure_of(function), **vars(function)}
    return children + [(f".{name}", part) for name, part in named.items()]


def closure_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that a function uses."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


@functools.cache
def _globals_of_class(kind: type) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return the globals named by the methods of own classes, as `_globals_named`."""
    methods = [
        getattr(method, "__wrapped__", method)
        for base in kind.__mro__
        if is_own_module(base.__module__)
        for method in vars(base).values()
    ]
    return _globals_named(tuple(m for m in methods if type(m) is types.FunctionType))


def _globals_named(
    functions: tuple[types.FunctionType, ...],
) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return each name in the functions' code, with the namespace of its module."""
    found = []
    for function in functions:
        codes = [function.__code__]
        for code in codes:
            codes += [part for part in code.co_consts if isinstance(part, types.CodeType)]
            found += [(name, function.__globals__) for name in code.co_names]
    return tuple(found)


def _global_parts(named: tuple[tuple[str, dict[str, Any]], ...]) -> list[tuple[str, Any]]:
    """Return the generators among these globals: each worker draws from a copy of its own."""
    kinds = _generator_types()
    return [
        (f".{name}", namespace[name])
        for name, namespace in named
        if name in namespace and _is_instance(namespace[name], kinds)
    ]


def slots_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes in `__slots__`; runs no code of its class."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = member.__get__(value)
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    named = {**(names_of(value) or {}), **slots_of(value)}
    parts = [(f".{name}", part) for name, part in named.items()]
    return parts + _global_parts(_globals_of_class(type(value)))  # type: ignore[arg-type]


def _read(generator: Any) -> bytes | None:
    """Return the generator's state; None if it has none to read, such as random.SystemRandom."""
    if _is_instance(generator, (torch.Generator,)):
        return as_bytes(generator.get_state()) if generator.device.type == "cpu" else None
    try:
        return json.dumps(_state_of(generator), sort_keys=True, default=_to_list).encode()
    except (NotImplementedError, TypeError, ValueError):
        return None


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        spawned = getattr(_seed_of(generator), "n_children_spawned", 0)
        state = generator.bit_generator.state
        return {**state, "spawned": [spawned, *_origin(generator)]} if spawned else state
    if _is_instance(generator, (SobolEngine,)):
        return [generator.num_generated, *_points_of(generator)]
    return generator.get_state(legacy=False)


def _points_of(engine: SobolEngine) -> list[Any]:
    """Return what decides the points of an engine, besides how many were drawn."""
    return [engine.dimension, engine.scramble, engine.shift.tolist() if engine.scramble else None]


def _seed_of(generator: Any) -> Any:
    """Return the SeedSequence of a NumPy generator, which counts the children spawned."""
    bits = generator.bit_generator
    return getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)


def _origin(generator: Any) -> list[Any]:
    """Return what decides the children of a generator, as JSON gives it back."""
    seed = _seed_of(generator)
    origin: list[Any] = json.loads(json.dumps([seed.entropy, seed.spawn_key], default=_to_list))
    return origin


def _spawn(generator: Any, spawned: int, origin: list[Any]) -> None:
    """Let the next child of a generator be the one after `spawned` children."""
    missing = spawned - _seed_of(generator).n_children_spawned
    if missing < 0 or origin != _origin(generator):
        raise ValueError("its children cannot be those of the saved generator")
    _seed_of(generator).spawn(missing)


def _to_list(value: Any) -> Any:
    """Return a NumPy array or number as plain Python values."""
    return value.tolist()


def _write(generator: Any, state: bytes) -> bool:
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(_as_tensor(state))
        else:
            _set_state(generator, json.loads(state))
    except (KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif hasattr(generator, "bit_generator"):
        spawned, *origin = state.pop("spawned", [0])
        generator.bit_generator.state = state
        if spawned:
            _spawn(generator, spawned, origin)
    elif _is_instance(generator, (SobolEngine,)):
        generated, *points = state
        if points != _points_of(generator):
            raise ValueError("an engine of other points")
        generator.reset()
        generator.fast_forward(generated)
    else:
        generator.set_state(state)

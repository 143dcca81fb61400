"""Sketch values of a script: short digests that tell whether a value is the one of another process.

numbers, texts      whole. Readings of clocks and paths of files are left out: they are others in
                    each process
tensors, arrays     type, shape and some thousand elements
containers          length, and items at both ends, a few levels deep
modules, optimizers some elements of some tensors, except those that are tracked
schedulers, scalers their numbers
generators          of the script's own functions: where they stand, and their variables
iterators           over lists and the like, cycles and counts: where they stand
objects             of the script's own classes, and namespaces: one sketch for each attribute
functions           of the script: their attributes, defaults and closures, and the arguments
                    of a partial; a bound method stands for its object

Values of other kinds count by their type, inside a container, or have no sketch.
"""

from __future__ import annotations

import collections.abc
import functools
import gc
import itertools
import operator
import os
import types
import warnings
from collections import deque
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainckpt.data import randomness, sampler
from trainckpt.format import digest
from trainckpt.state import clock_readings, dtensor, plain_tensors, script_randomness
from trainckpt.state.attributes import ends
from trainckpt.state.staging import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from trainckpt.state.registry import Registry

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_SETS, _SEQUENCES = (set, frozenset), (list, tuple, deque)
_WHOLE = (  # these have a sketch of their own, or none
    *(type, Enum, int, float, complex, str, bytes, *_SETS, *_SEQUENCES, dict),
    *(nn.Module, torch.Tensor, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler),
)
_ITEMS = (128, 16, 8, 8)  # compared of a container, of one in it, and so on
_PARTS = 1024  # of one value
_TENSORS = 64  # compared of one value
_TEXT = 1024  # characters compared at each end of a text
_ELEMENTS = 64  # of each tensor of a module
_NAMESPACES = ("Namespace", "SimpleNamespace")  # of argparse and of types
_ITERABLES: tuple[Iterable[Any], ...] = ([], (), range(0), {}, "", set())
_ITERATORS = {type(iter(items)) for items in _ITERABLES}
_ITERATORS |= {type(reversed([])), itertools.count, itertools.cycle}
_STANDS_ON = (collections.abc.Iterator, types.FrameType, tuple)  # zip has a tuple of iterators
_LOOPS = 6  # a generator over zip over enumerate over a loader


class Sketch(NamedTuple):
    """A digest of a value.

    Attributes:
        has_state: Tensors of more than one element, or a module, optimizer or scheduler; or part
            of a wrapper of a tracked optimizer.
        is_position: A generator, which goes on from where it stands.
    """

    digest: str
    has_state: bool
    is_position: bool = False


class Sketcher:
    """Sketches the values of one moment."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def of(self, value: Any) -> dict[str, Sketch] | None:
        """Return attribute -> sketch of an object, "" -> sketch of any other value.

        None for a value that is tracked, or of a kind that has no sketch.
        """
        value = _owner(value)
        if self.is_tracked(value):
            return None
        names = attributes_of(value)
        if names is None:
            sketch = self._sketch(value)
            return None if sketch is None else {"": sketch}
        found = {key: self._sketch(part) for key, part in list(names.items())[:_TENSORS]}
        sketches = {key: sketch for key, sketch in found.items() if sketch is not None}
        if self._steps_a_tracked_optimizer(value, names):
            return {key: sketch._replace(has_state=True) for key, sketch in sketches.items()}
        return sketches

    def _steps_a_tracked_optimizer(self, value: Any, names: dict[str, Any]) -> bool:
        """Return True for a wrapper of an optimizer: its numbers decide the training."""
        methods = (getattr(type(value), name, None) for name in ("step", "zero_grad"))
        return all(map(callable, methods)) and any(
            isinstance(part, torch.optim.Optimizer) and self.is_tracked(part)
            for part in names.values()
        )

    def _sketch(self, value: Any) -> Sketch | None:
        drawing = _Drawing(self)
        try:
            tree = drawing.tree(value, 0)
            return None if tree is None else drawing.finish(tree)
        except (RuntimeError, TypeError, ValueError):  # another thread changes it meanwhile
            return None

    def is_tracked(self, value: Any) -> bool:
        """Return True for a tracked object, and for the data and samplers of a tracked loader."""
        if issubclass(type(value), (nn.Module, torch.optim.Optimizer)):
            return self._registry.tracks(value)
        return id(value) in (
            self.tensors if issubclass(type(value), torch.Tensor) else self._others
        )

    @cached_property
    def tensors(self) -> set[int]:
        """The ids of the tensors of models and optimizers."""
        found = set(map(id, self._registry.all_parameters()))
        for model in self._registry.models:
            found.update(id(tensor) for tensor in _tensors_of(model.wrapped))
        return found

    @cached_property
    def _others(self) -> set[int]:
        found = {id(generic.target) for generic in self._registry.generics}
        found.update(id(owner.value) for owner in self._registry.watched.callbacks())
        for state in self._registry.loaders:
            loader = state.loader.underlying
            found.update(id(one) for _, one in sampler.samplers_of(loader))
            found.add(id(getattr(loader, "dataset", loader)))
        return found


def _owner(value: Any) -> Any:
    """Return the object of a bound method; any other value itself."""
    return value.__self__ if type(value) is types.MethodType else value


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a function, or an object of the script's own class; else None."""
    kind = type(value)
    if kind is functools.partial:
        arguments = {f"args[{i}]": argument for i, argument in enumerate(value.args)}
        return {**(attributes_of(_owner(value.func)) or {}), **arguments, **value.keywords}
    if kind is types.FunctionType:
        return _of_function(value) if randomness.is_own_module(value.__module__ or "") else None
    if not is_own_object(value):
        return None
    names, slots = randomness.names_of(value), randomness.slots_of(value)
    return None if names is None and not slots else {**(names or {}), **slots}


def is_own_object(value: Any) -> bool:
    """Return True for an object of the script's own class, and for a namespace of arguments."""
    kind = type(value)
    is_own = kind.__name__ in _NAMESPACES or randomness.is_own_module(kind.__module__)
    return is_own and not issubclass(kind, _WHOLE) and not _extends_trainckpt(kind)


def _of_function(function: types.FunctionType) -> dict[str, Any] | None:
    """Return what a function holds from one call to the next; None if it holds nothing.

    The variables of an enclosing function that still runs are looked at by themselves.
    """
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held = {**dict(zip(names, defaults, strict=True)), **(function.__kwdefaults__ or {})}
    enclosing = function.__qualname__.rpartition(".<locals>.")[0].rpartition(".")[2]
    if all(frame.f_code.co_name != enclosing for _, frame in script_randomness.frames()):
        held |= randomness.closure_of(function)
    return {**held, **vars(function)} or None


def _extends_trainckpt(kind: type) -> bool:
    """Return True for a subclass of the Checkpointer, of a callback or the like."""
    return any(base.__module__.partition(".")[0] == "trainckpt" for base in kind.__mro__)


class _Drawing:
    """The parts of one sketch."""

    def __init__(self, sketcher: Sketcher) -> None:
        self._sketcher = sketcher
        self._tensors: list[Any] = []
        self._of_modules: list[torch.Tensor] = []
        self._has_state, self._is_position, self._room = False, False, _PARTS

    def finish(self, tree: Any) -> Sketch:
        """Return the sketch of the value of this tree."""
        blocks = [repr(tree).encode(errors="replace"), *_some_elements(self._of_modules)]
        if self._tensors:
            blocks.append(plain_tensors.sample(self._tensors).encode())
        holds = self._has_state or any(_num_elements(tensor) > 1 for tensor in self._tensors)
        return Sketch(digest.digest_blocks(blocks)[:16], holds, self._is_position)

    def tree(self, value: Any, depth: int) -> Any:
        """Return plain lists for a value, and note its tensors; None for one without a sketch."""
        kind = type(value)
        self._room -= 1
        if self._room < 0:
            return None
        if kind in _NUMBERS or kind.__module__ == "numpy":
            return self._number(value)
        if issubclass(kind, Enum):
            return kind.__name__, value.name
        if kind in dtensor.PLAIN:
            return self._tensor(value)
        if issubclass(kind, (*_SEQUENCES, *_SETS, dict)):
            return self._container(value, depth)
        if kind is types.GeneratorType and depth == 0:
            return self._generator(value)
        if kind in _ITERATORS and depth == 0:
            return self._iterator(value)
        value = _owner(value)
        kind = type(value)
        draw, names = self._drawn_by(kind), attributes_of(value)
        if (draw is None and names is None) or self._sketcher.is_tracked(value):
            return None
        return self._container(names, depth) if draw is None else draw(value)

    def _drawn_by(self, kind: type) -> Callable[[Any], Any] | None:
        for base, draw in (
            (nn.Module, self._module),
            (torch.optim.Optimizer, self._optimizer),
            (torch.optim.lr_scheduler.LRScheduler, self._scheduler),
            (torch.amp.GradScaler, self._scaler),
        ):
            if issubclass(kind, base):
                return draw
        return None

    def _generator(self, value: types.GeneratorType[Any, Any, Any]) -> Any:
        """Return where a generator stands; None for one of a package, or over a tracked loader."""
        frame = value.gi_frame
        if frame is None or not randomness.is_own_module(frame.f_globals.get("__name__", "")):
            return None
        if _reads_tracked_loader(value):
            return None
        self._is_position = True
        return frame.f_lasti, self._container(dict(frame.f_locals), 1)

    def _iterator(self, value: Any) -> Any:
        """Return how many items an iterator has left; of a cycle, until it begins again."""
        self._is_position = True
        if type(value) is itertools.count:
            return repr(value)
        return (
            _left_in_cycle(value) if type(value) is itertools.cycle else operator.length_hint(value)
        )

    def _number(self, value: Any) -> Any:
        if type(value).__name__ == "ndarray":
            return self._tensor(value) if value.dtype.kind in "biufc" else None
        if hasattr(value, "dtype"):
            value = value.item() if type(value).__name__ != "memmap" else None
        if type(value) is str and os.sep in value:
            return None
        text = repr(value)
        ends = text if len(text) <= 2 * _TEXT else (len(text), text[:_TEXT], text[-_TEXT:])
        return None if clock_readings.is_reading(value) else (type(value).__name__, ends)

    def _tensor(self, value: Any) -> str:
        if id(value) in self._sketcher.tensors or len(self._tensors) == _TENSORS:
            return "tensor"
        self._tensors.append(value)
        return f"tensor {len(self._tensors)}"

    def _container(self, value: Any, depth: int) -> Any:
        kind, length = type(value).__name__, len(value)
        if depth == len(_ITEMS):
            return kind, length
        if isinstance(value, _SETS):
            whole = value if length <= _ITEMS[depth] else ()
            return kind, length, sorted(repr(self._item(item, depth)) for item in whole)
        if isinstance(value, dict):
            pairs = ends(dict.items(value), length, _ITEMS[depth])
            return kind, length, [(_key(key), self._item(item, depth)) for key, item in pairs]
        return kind, length, [self._item(i, depth) for i in ends(value, length, _ITEMS[depth])]

    def _item(self, item: Any, depth: int) -> Any:
        tree = self.tree(item, depth + 1)
        return type(item).__name__ if tree is None else tree

    def _module(self, module: nn.Module) -> Any:
        known, tensors = self._sketcher.tensors, list(_tensors_of(module))
        if not tensors:  # such as a loss: its options
            return self._container(_options(module), 1)
        own = [tensor for tensor in tensors if id(tensor) not in known]
        return self._state_of("module", own)

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        state = [dict.values(each) for each in optimizer.state.values() if isinstance(each, dict)]
        tensors = [v for values in state for v in values if isinstance(v, torch.Tensor)]
        groups = [
            [(key, value) for key, value in group.items() if type(value) in _NUMBERS]
            for group in optimizer.param_groups
        ]
        return self._state_of("optimizer", tensors) or ("optimizer", len(state), groups)

    def _scheduler(self, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Any:
        self._has_state = True
        numbers = {k: v for k, v in vars(scheduler).items() if k != "optimizer"}
        return self._container(numbers, 1)

    def _scaler(self, scaler: torch.amp.GradScaler) -> Any:
        self._has_state = True
        return self._container(scaler.state_dict(), 1)

    def _state_of(self, kind: str, tensors: list[torch.Tensor]) -> Any:
        if not tensors:
            return None
        self._has_state = True
        self._of_modules += tensors[:: max(1, len(tensors) // (_TENSORS // 2))]
        return kind, len(tensors)


def _options(module: nn.Module) -> dict[str, Any]:
    names = vars(module)
    return {name: names[name] for name in names if name[0] != "_" and name != "training"}


def _left_in_cycle(cycle: Any) -> Any:
    """Return how many items are left until a cycle begins again; None if that is not known.

    Python 3.14 tells the state of a cycle no longer. Its first pass is seen by the garbage
    collector; of later ones only that they are not the first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a method that ends with Python 3.14
        try:
            parts: Any = cycle.__reduce__()
        except TypeError:
            parts = ()
    if parts:
        (items,), (used, _) = parts[1:]
    else:
        seen = [one for one in gc.get_referents(cycle) if one is not itertools.cycle]
        used = next((one for one in seen if type(one) is list), [])
        items = next((one for one in seen if one is not used), None)
        if items is None:
            return "a later pass"
    if type(items) not in _ITERATORS:
        return None
    return operator.length_hint(items) or len(used)


def _reads_tracked_loader(generator: object) -> bool:
    """Return True for a generator in the middle of a loop over a tracked loader.

    The iterators of its loops lie on its stack, which only the garbage collector reads.
    """
    level, known = [generator], {id(generator)}
    for _ in range(_LOOPS):
        found = [one for each in level for one in gc.get_referents(each) if id(one) not in known]
        if any(_is_of_trainckpt(one) for one in found):
            return True
        level = [one for one in found if isinstance(one, _STANDS_ON)]
        known.update(map(id, level))
    return False


def _is_of_trainckpt(value: object) -> bool:
    frame = value.gi_frame if isinstance(value, types.GeneratorType) else None
    name = type(value).__module__ if frame is None else frame.f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "trainckpt" and not isinstance(value, type)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _num_elements(tensor: Any) -> int:
    return int(tensor.numel() if isinstance(tensor, torch.Tensor) else tensor.size)


def _key(key: Any) -> str:
    return repr(key)[:64] if type(key) in _NUMBERS else type(key).__name__  # no addresses


@torch.no_grad()
def _some_elements(tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield elements of the tensors; those of one type and device at once, for one transfer."""
    together: dict[Any, list[torch.Tensor]] = {}
    for tensor in map(dtensor.local, tensors):
        if type(tensor) in dtensor.PLAIN and plain_tensors.is_dense(tensor) and tensor.numel():
            flat = tensor
            if not tensor.is_contiguous():  # flattening would copy all of it: use its corner
                flat = tensor[(slice(3),) * tensor.dim()]
            flat = flat.reshape(-1)
            elements = flat[:: max(1, flat.numel() // _ELEMENTS)][: _ELEMENTS + 1]
            together.setdefault((tensor.dtype, tensor.device), []).append(elements)
    for pieces in together.values():
        yield bytes_of(torch.cat(pieces))

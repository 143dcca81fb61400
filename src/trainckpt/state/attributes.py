"""Plain attributes: numbers that modules and objects keep beside what their state_dict holds.

A module that decides by `self.initialized`, or counts in `self.seen`, is not as it was after a
resume. `Attributes` tracks such by name. Others are watched: a snapshot holds those that
have changed since tracking began, so that a save and a resume can name them; they are not put back,
since whether the script sets them itself cannot be known.

Watched are bool, int, float and containers of them and of texts, of modules, optimizers and tracked
objects of the script's own classes; the same and tensors of a trainer's callbacks that say no
state; and every attribute of a tracked object whose state_dict is empty. What a framework's own
code assigns is its business, except options of torch's modules that scripts change by a schedule,
as `dropout.p`, and numbers that another put on them before training, as a trainer's
`neftune_noise_alpha`.

Random generators that such modules and callbacks hold are kept as the global ones are: stored in
every snapshot, and put back last of all. So are those that hooks of models use, in a closure too.
"""

from __future__ import annotations

import dis
import os
import types
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainckpt.data import randomness
from trainckpt.errors import ConfigurationError, StateMismatch, TrainckptError
from trainckpt.format import digest, json_io
from trainckpt.state.adapters.fsdp import plain_path
from trainckpt.state.captured import Captured
from trainckpt.state.clock_readings import is_wall_time
from trainckpt.state.staging import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainckpt.state.captured import Saved

PART, GENERATORS = "plain attributes", "own generators"  # no keyword can be spelled so
_FRAMEWORKS = frozenset(
    {
        "accelerate",
        "lightning",
        "lightning_fabric",
        "peft",
        "pytorch_lightning",
        "torch",
        "torchmetrics",
        "trainckpt",
        "transformers",
        "trl",
    }
)
_NUMBERS = (bool, int, float, type(None))
_SETS, _MAPPINGS = (set, frozenset), (dict, OrderedDict, defaultdict, Counter)
_CONTAINERS = (list, tuple, deque, *_SETS, *_MAPPINGS)
MAX_DEPTH = 8  # containers in each other, of a value that is restored
_ITEMS = (256, 16, 8)  # compared of a container, of one in it, and of one in that
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OPTIONS = ("p", "dropout", "momentum")  # of torch's modules; a schedule may set them from outside
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Attributes:
    """Attributes of an object, tracked by name because its own `state_dict` leaves them out.

        Checkpointer(run, model=model, counts=Attributes(model, "seen", "norm.initialized"))

    Args:
        owner: A module, a callback, any object.
        *paths: Names of its attributes, with dots for those of its parts. Their values are
            numbers, strings, tensors, containers of them, or random generators. An attribute may
            appear later.

    Raises:
        ConfigurationError: No name was given, or the object has no such part.
    """

    def __init__(self, owner: object, *paths: str) -> None:
        if not paths:
            raise ConfigurationError(
                "Attributes names no attribute of the object", hint='Attributes(model, "seen")'
            )
        self._places = {path: (self._part(owner, path), path.rpartition(".")[2]) for path in paths}

    @staticmethod
    def _part(owner: Any, path: str) -> object:
        for name in path.split(".")[:-1]:
            if not hasattr(owner, name):
                raise ConfigurationError(
                    f"Attributes: {type(owner).__name__} has no part {name!r}, as {path!r} says",
                    hint="name attributes by their path from the object",
                )
            owner = getattr(owner, name)
        return owner

    @property
    def places(self) -> set[tuple[int, str]]:
        """The id of each object and the name of its attribute."""
        return {(id(part), name) for part, name in self._places.values()}

    def state_dict(self) -> dict[str, Any]:
        """Return path -> value, of those that are there; under "" the states of generators."""
        values = {
            path: getattr(part, name)
            for path, (part, name) in self._places.items()
            if hasattr(part, name)
        }
        generators = {
            path: value for path, value in values.items() if randomness.is_generator(value)
        }
        if generators:
            values = {path: value for path, value in values.items() if path not in generators}
            values[""] = randomness.capture(generators)
        return values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them to what they were; one that was not there is removed."""
        generators = state.get("", {})
        for path, (part, name) in self._places.items():
            live = getattr(part, name, None)
            if path in generators:
                lost = randomness.restore({path: live}, {path: generators[path]}, "Attributes")
                if lost:
                    raise StateMismatch("tracked attributes cannot be restored", [lost])
            elif path in state:
                value = state[path]
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
                    value = value.to(live.device)
                setattr(part, name, value)
            elif hasattr(part, name):
                delattr(part, name)


def hint(names: Iterable[str], *, of_callbacks: bool = False) -> str:
    """Return the line that tracks these attributes: the first three of the first object.

    Args:
        names: Object, path of the attribute, and possibly its values in brackets.
        of_callbacks: The objects are callbacks or a trainer, named by their classes.
    """
    paths = [name.partition(" (")[0].partition(".") for name in sorted(names)]
    owner = paths[0][0]
    own = [f'"{path}"' for name, _, path in paths if name == owner][:3]
    target = f"<the {owner}>" if of_callbacks else owner
    own_state = ", or give a callback state_dict and load_state_dict" if of_callbacks else ""
    return (
        f"track them: pass counts=trainckpt.Attributes({', '.join([target, *own])}) to the "
        f"Checkpointer or TrainckptCallback{own_state}"
    )


def not_restored(watched: Watched, saved: Saved, *, of_callbacks: bool = False) -> list[str]:
    """Return which attributes of a snapshot are otherwise now, each with its values."""
    tree = saved.values.get(PART)
    then = {} if tree is None else saved.decode(tree)
    return watched.not_restored(then, of_callbacks=of_callbacks)


def capture_generators(watched: Watched, out: Captured) -> None:
    """Add the states of the random generators that watched objects hold."""
    if states := randomness.capture(watched.generators()):
        out.values[GENERATORS] = out.encode(states, GENERATORS)


def restore_generators(watched: Watched, saved: Saved) -> None:
    """Restore generators of the same name and kind; the two functions below name the others."""
    randomness.restore(watched.generators(), _saved_generators(saved), GENERATORS)


def lost_generators(watched: Watched, saved: Saved) -> list[str]:
    """Return which generators only the snapshot or only the script has, as one sentence."""
    names = sorted(watched.generators().keys() ^ _saved_generators(saved).keys())
    if not names:
        return []
    why = "the snapshot and the script do not both have a random generator of this name"
    return [f"{', '.join(names)[:200]}: {why}"]


def other_generators(watched: Watched, saved: Saved) -> list[str]:
    """Return the saved names whose generator is of another kind now, after `restore_generators`."""
    live, states = randomness.capture(watched.generators()), _saved_generators(saved)
    return sorted(name for name, state in states.items() if live.get(name, state) != state)


def _saved_generators(saved: Saved) -> dict[str, bytes]:
    tree = saved.values.get(GENERATORS)
    return {} if tree is None else saved.decode(tree)


class WatchedObject(NamedTuple):
    """An object whose attributes are watched.

    Attributes:
        numbers_only: Numbers and containers of them, of a module or callback; else all attributes.
        skipped: Attributes that are tracked, or that a framework's class assigns.
        hides_private: A module of a framework's class, which sets its `_attributes` anew.
    """

    name: str
    value: object
    numbers_only: bool
    skipped: frozenset[str]
    hides_private: bool

    def own_attributes(self) -> list[tuple[str, Any]]:
        """Return the name and value of each attribute that a framework does not assign."""
        # all at once, since a thread of the script may add one
        values = list((randomness.names_of(self.value) or {}).items())
        return [(key, value) for key, value in values if key not in self.skipped]

    def values(self) -> dict[str, Any]:
        """Return full name -> number, or digest."""
        found = {}
        # A class may have the number that its objects begin with.
        kinds = [kind for kind in reversed(_bases(self.value)) if not _is_framework(kind)]
        defaults = {
            key: value
            for kind in kinds
            for key, value in vars(kind).items()
            if type(value) in (*_NUMBERS, *_CONTAINERS) and not key.startswith("__")
        }
        of_module = isinstance(self.value, nn.Module)
        for key, value in (defaults | vars(self.value)).items():
            if key in self.skipped or (self.hides_private and key.startswith("_")):
                continue
            number = _number(value, of_module=of_module)
            if type(number) in _NUMBERS:
                found[f"{self.name}.{key}"] = number
            elif not self.numbers_only:
                found[f"{self.name}.{key}"] = digest_of(value)
            elif brief := _brief(value, of_module=of_module):
                found[f"{self.name}.{key}"] = brief
        return found


class Watched:
    """Remembers attributes of objects from when watching began, and names the changed ones."""

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        tracked: Iterable[Any],
        optimizers: Iterable[tuple[str, torch.optim.Optimizer]] = (),
    ) -> None:
        """`modules`, `optimizers`: named ones. `tracked`: all other tracked objects."""
        modules = list(modules)
        objects = [each for each in tracked if isinstance(each, Attributes)]
        self._tracked = {place for each in objects for place in each.places}
        parts = [
            (f"{name}.{plain_path(path)}" if path else name, part)
            for name, module in modules
            for path, part in module.named_modules()
        ]
        self._owners = [
            self.owner(name, part, numbers_only=True) for name, part in parts if _is_watched(part)
        ]
        self._owners += [
            self.owner(name, optimizer, numbers_only=True)
            for name, optimizer in optimizers
            if _is_own(optimizer)
        ]
        self._torch_modules = [
            self.owner(name, part, numbers_only=True)
            for name, part in parts
            if not _is_own(part)
            and (any(option in vars(part) for option in _OPTIONS) or _has_added(part))
        ]
        # Modules and parameters with hooks by now; others of a model cost nothing later.
        self._hooked = [(name, part) for name, part in parts if _hooks(part)]
        self._hooked += [
            (f"{name}.{path}", parameter)
            for name, module in modules
            for path, parameter in module.named_parameters()
            if _hooks(parameter)
        ]
        self._objects: dict[str, WatchedObject] = {}
        self._callbacks: list[WatchedObject] = []
        self._first: dict[str, Any] = {}  # of callbacks, at the first boundary
        self._always: set[str] = set()
        self._begun = self._values()

    def owner(self, name: str, value: object, *, numbers_only: bool = True) -> WatchedObject:
        """Return the object with the attributes to leave out: tracked ones, and a framework's."""
        skipped = {key for at, key in self._tracked if at == id(value)}
        frameworks = [kind for kind in _bases(value) if _is_framework(kind)]
        assigned = _OF_EVERY_MODULE.union(*map(_assigned, frameworks))
        skipped |= assigned.difference(_OPTIONS) if isinstance(value, nn.Module) else assigned
        is_part = isinstance(value, (nn.Module, torch.optim.Optimizer))
        hides = is_part and any("__init__" in vars(kind) for kind in frameworks)
        return WatchedObject(name, value, numbers_only, frozenset(skipped), hides)

    def owners(self) -> list[tuple[str, object, frozenset[str]]]:
        """Return name, module or optimizer, and the attributes that are not the script's."""
        return [(each.name, each.value, each.skipped) for each in self._owners]

    def watch(self, name: str, value: object, *, has_state: bool) -> None:
        """Watch a tracked object from now on: its numbers, or all if its state_dict is empty."""
        known = self._objects.get(name)
        if known is not None and known.numbers_only == has_state:
            return
        if _is_own(value) and hasattr(value, "__dict__"):
            self._objects[name] = owner = self.owner(name, value, numbers_only=has_state)
            self._begun |= owner.values()

    def watch_callback(self, value: object) -> None:
        """Watch a trainer, or a callback that says no state, under the name of its class."""
        if _is_own(value) and hasattr(value, "__dict__"):
            number = sum(type(owner.value) is type(value) for owner in self._callbacks)
            name = f"{type(value).__name__}{number or ''}"
            owner = self.owner(name, value, numbers_only=True)
            self._callbacks.append(owner)
            self._begun |= owner.values()

    def callbacks(self) -> list[WatchedObject]:
        """Return the watched trainers and callbacks."""
        return self._callbacks

    def modules_of_callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the name of each trainer or callback, and the modules in its attributes."""
        return [
            (owner.name, {k: v for k, v in vars(owner.value).items() if isinstance(v, nn.Module)})
            for owner in self._callbacks
        ]

    def training_begins(self) -> None:
        """Note the first boundary: callbacks set again the values they set as a training begins."""
        self._first = self._values_of_callbacks()

    def changed(self) -> dict[str, Any]:
        """Return name -> value, of those that are not as they were when watching began."""
        return {
            name: value
            for name, value in (self._values() | self._values_of_callbacks()).items()
            if name in self._always or not _same(value, self._begun.get(name))
        }

    def changed_in_training(self) -> list[str]:
        """Return the names of those that changed, of callbacks since the first boundary.

        A state_dict may have any number of its object: only a resume can tell which it lacks.
        """
        stateful = {name for name, owner in self._objects.items() if owner.numbers_only}
        return [
            name
            for name, value in self.changed().items()
            if (name not in self._first or not _same(value, self._first[name]))
            and (name.rpartition(".")[0] not in stateful or name in self._always)
        ]

    def generators(self) -> dict[str, Any]:
        """Return full name -> random generator inside a watched module, callback or hook."""
        roots = {
            f"{owner.name}.{key}": value
            for owner in (*self._owners, *self._callbacks)
            for key, value in vars(owner.value).items()
            if key not in owner.skipped
        }
        for name, part in self._hooked:
            roots |= {f"{name}.hook{i}": hook for i, hook in enumerate(_hooks(part))}
        return randomness.find_own(roots)

    def hint(self, names: Iterable[str]) -> str:
        """Return the line that tracks these attributes."""
        of_callbacks = self._values_of_callbacks()
        return hint(names, of_callbacks=all(name in of_callbacks for name in names))

    def not_restored(self, saved: dict[str, Any], *, of_callbacks: bool = False) -> list[str]:
        """Return which of the changed ones of a snapshot are otherwise now, each with its values.

        They stay in every snapshot from now on: that they do not change further says nothing.

        Args:
            saved: Name -> value, of the snapshot.
            of_callbacks: Look at callbacks, which set theirs before the first boundary, or at all
                others.
        """
        live = self._values_of_callbacks() if of_callbacks else self._values()
        found = [
            name for name, value in saved.items() if name in live and not _same(value, live[name])
        ]
        self._always.update(found)
        return [f"{name}{_how(saved[name], live[name])}" for name in sorted(found)]

    def places(self, lines: Iterable[str]) -> dict[str, tuple[object, str]]:
        """Return line of `not_restored` -> object and attribute, for objects of own classes."""
        owners = (*self._owners, *self._objects.values(), *self._callbacks)
        own = {each.name: each.value for each in owners if not _is_framework(type(each.value))}
        found = {}
        for line in lines:
            name, _, key = line.partition(" (")[0].rpartition(".")
            if name in own and key in vars(own[name]):
                found[line] = own[name], key
        return found

    def _values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner in (*self._owners, *self._torch_modules, *self._objects.values()):
            found |= owner.values()
        return found

    def _values_of_callbacks(self) -> dict[str, Any]:
        return {name: v for owner in self._callbacks for name, v in owner.values().items()}


def _hooks(part: nn.Module | torch.Tensor) -> list[Any]:
    """Return the hooks of a module, or of a tensor's gradient."""
    kinds = _HOOKS if isinstance(part, nn.Module) else ("_backward_hooks",)
    return [hook for kind in kinds for hook in (getattr(part, kind, None) or {}).values()]


def _is_watched(part: nn.Module) -> bool:
    """Return True for a module of the script's own that keeps no state by other means."""
    return _is_own(part) and type(part).get_extra_state is nn.Module.get_extra_state


def _has_added(part: nn.Module) -> bool:
    """Return True if one of torch's modules has a number that its class does not assign."""
    kind: Any = type(part)
    if kind.__module__.partition(".")[0] != "torch":
        return False
    added = vars(part).keys() - _assigned_of(kind)
    return any(type(vars(part)[key]) in _NUMBERS and not key.startswith("_") for key in added)


@cache
def _assigned_of(kind: type) -> frozenset[str]:
    """Return the names that the methods of one of torch's classes and of its bases assign."""
    return _OF_EVERY_MODULE.union(*map(_assigned, kind.__mro__[:-1]))


def _is_own(value: object) -> bool:
    return any(not _is_framework(kind) for kind in _bases(value))


def _bases(value: object) -> list[type]:
    return [kind for kind in type(value).__mro__ if kind not in (object, nn.Module)]


def _is_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def _number(value: Any, *, of_module: bool) -> Any:
    """Return the value; of a callback's tensor with one number, that number; of a time, "".

    A module may keep such a tensor of its last micro-batch, which is set anew in the next.
    """
    if type(value) is torch.Tensor and value.numel() == 1 and not of_module:
        return value.item() if value.device.type == "cpu" else ""
    return "" if is_wall_time(value) else value


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Return the names of the attributes that the methods of a class assign."""
    methods = [getattr(each, "__wrapped__", each) for each in vars(kind).values()]
    return frozenset(
        step.argval
        for method in methods
        if isinstance(method, types.FunctionType)
        for step in dis.get_instructions(method)
        if step.opname == "STORE_ATTR"
    )


def _brief(value: Any, *, of_module: bool) -> str:
    """Return a digest of a container of plain values; "" of anything else.

    Of a long one its length and both ends are compared, of a tensor some elements: a save must not
    wait for it. A module may keep tensors of its last micro-batch, so they are not compared there.
    """
    if type(value) not in _CONTAINERS and type(value) is not torch.Tensor:
        return ""
    try:
        tree = _plain(value, _ITEMS, of_module=of_module)
    except (_NotPlain, RuntimeError):  # a thread of the script changes it meanwhile
        return ""
    return digest.digest(repr(tree).encode(errors="replace"))


class _NotPlain(Exception):
    """A value that is not compared."""


def _plain(value: Any, limits: tuple[int, ...], *, of_module: bool) -> Any:
    kind = type(value)
    if kind in _NUMBERS:
        return _number(value, of_module=of_module)
    if kind is str:
        return "" if os.sep in value else value  # a path is another one in another folder
    if kind is torch.Tensor and not of_module and value.device.type == "cpu":
        return _elements(value.detach())
    if hasattr(value, "dtype") and kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return value.item()
    if kind not in _CONTAINERS or not limits:
        raise _NotPlain
    most, length = limits[0], len(value)
    if kind in _SETS:
        whole = value if length <= most else ()
        return (
            kind.__name__,
            length,
            sorted(repr(_plain(each, limits[1:], of_module=of_module)) for each in whole),
        )
    items = value.items() if kind in _MAPPINGS else value
    return (
        kind.__name__,
        length,
        [
            tuple(_plain(part, limits[1:], of_module=of_module) for part in each)
            if kind in _MAPPINGS
            else _plain(each, limits[1:], of_module=of_module)
            for each in ends(items, length, most)
        ],
    )


def ends(items: Any, length: int, most: int) -> Iterator[Any]:
    """Yield at most so many items, half of them from each end."""
    if length <= most:
        yield from items
        return
    yield from islice(items, most // 2)
    yield from islice(reversed(items), most // 2)


def _elements(tensor: torch.Tensor) -> Any:
    """Return up to eight elements of a dense tensor, evenly spaced, and its shape."""
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise _NotPlain
    flat = tensor.view(-1)
    return tuple(tensor.shape), flat[:: max(1, flat.numel() // 8)].tolist()


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _how(then: Any, now: Any) -> str:
    return "" if isinstance(then, str) or isinstance(now, str) else f" ({then}, now {now})"


def digest_of(value: Any) -> str:
    """Return the digest of a value, or "" if it is of a kind that cannot be stored."""
    seen = Captured()
    try:
        tree = seen.encode(value, "attribute")
        tensors = [tensor_digest(tensor) for tensor in seen.tensors.values()]
    except (TrainckptError, RuntimeError):
        return ""
    return digest.digest(json_io.canonical([tree, tensors]))

"""Plain attributes: numbers that modules and objects keep beside what their state_dict holds.

A module that decides by `self.initialized`, or counts in `self.seen`, is not as it was after a
resume. `Attributes` tracks such by name. What nobody tracks is watched: a snapshot holds those that
have changed since tracking began, so that a save and a resume can name them; they are not put back,
since whether the script sets them itself cannot be known.

Watched are bool, int and float of modules of the script's own classes, the same and tensors of one
number of a trainer's callbacks that say no state, and every attribute of a tracked object whose
state_dict is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trainckpt.errors import ConfigurationError, TrainckptError
from trainckpt.format import digest, strict
from trainckpt.state.captured import Captured
from trainckpt.state.kinds.fsdp import plain_path
from trainckpt.state.stage import tensor_digest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainckpt.state.captured import Saved

PART = "plain attributes"  # no keyword can be spelled so
HINT = 'track them: Checkpointer(..., counts=trainckpt.Attributes(model, "name", "part.name"))'
HINT_OF_CALLBACKS = (
    'track them: TrainckptCallback(..., kept=trainckpt.Attributes(callback, "name")), or give the '
    "callback state_dict and load_state_dict"
)
_FRAMEWORKS = frozenset({"accelerate", "lightning", "lightning_fabric", "peft", "pytorch_lightning",
                         "torch", "torchmetrics", "trainckpt", "transformers"})  # fmt: skip
_NUMBERS = (bool, int, float, type(None))
_CLOCK_S = (1e9, 1e10)  # seconds since 1970: a float between them is the time


class Attributes:
    """Attributes of an object, tracked by name: what its own `state_dict` leaves out.

    Example: `Checkpointer(run, model=model, counts=Attributes(model, "seen", "norm.initialized"))`.

    Args:
        owner: A module, a callback, any object.
        paths: Its attributes, with a dot for those of a part. Numbers, strings, tensors, and
            containers of them. One that is not there yet need not be.

    Raises:
        ConfigurationError: no path, or a part that is not there.
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
        """Return path -> value, of those that are there."""
        return {
            path: getattr(part, name)
            for path, (part, name) in self._places.items()
            if hasattr(part, name)
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set them to what they were; one that was not there is removed."""
        for path, (part, name) in self._places.items():
            live = getattr(part, name, None)
            if path in state:
                value = state[path]
                if isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor):
                    value = value.to(live.device)
                setattr(part, name, value)
            elif hasattr(part, name):
                delattr(part, name)


def not_restored(watched: Watched, saved: Saved, *, of_callbacks: bool) -> list[str]:
    """Return which attributes of a snapshot are otherwise now, each with its values."""
    tree = saved.values.get(PART)
    then = {} if tree is None else saved.decode(tree)
    return watched.not_restored(then, of_callbacks=of_callbacks)


class _Owner(NamedTuple):
    """An object whose attributes are watched.

    Attributes:
        numbers_only: Of a module or callback; else all attributes.
        skipped: Attributes that are tracked, or that every module has.
        hides_private: A framework's class is among its own, and sets `_attributes` anew.
    """

    name: str
    value: object
    numbers_only: bool
    skipped: frozenset[str]
    hides_private: bool

    def values(self) -> dict[str, Any]:
        """Return full name -> number, or digest."""
        found = {}
        # A class may have the number that its objects begin with.
        kinds = [kind for kind in reversed(_bases(self.value)) if not _is_framework(kind)]
        defaults = {k: v for kind in kinds for k, v in vars(kind).items() if type(v) in _NUMBERS}
        for key, value in (defaults | vars(self.value)).items():
            if key in self.skipped or (self.hides_private and key.startswith("_")):
                continue
            number = _number(value, of_module=isinstance(self.value, nn.Module))
            if type(number) in _NUMBERS:
                found[f"{self.name}.{key}"] = number
            elif not self.numbers_only:
                found[f"{self.name}.{key}"] = _digest(value)
        return found


class Watched:
    """What the attributes of some objects were when watching began, and which have changed."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], tracked: Iterable[Any]) -> None:
        """`modules`: named models. `tracked`: all other tracked objects."""
        objects = [each for each in tracked if isinstance(each, Attributes)]
        self._tracked = {place for each in objects for place in each.places}
        self._modules = [
            self._owner(f"{name}.{plain_path(path)}" if path else name, part, numbers_only=True)
            for name, module in modules
            for path, part in module.named_modules()
            if _is_watched(part)
        ]
        self._objects: dict[str, _Owner] = {}
        self._callbacks: list[_Owner] = []
        self._first: dict[str, Any] = {}  # of callbacks, at the first boundary
        self._always: set[str] = set()
        self._begun = self._values()

    def _owner(self, name: str, value: object, *, numbers_only: bool) -> _Owner:
        tracked = {key for at, key in self._tracked if at == id(value)}
        hides = any(_is_framework(kind) and "__init__" in vars(kind) for kind in _bases(value))
        return _Owner(name, value, numbers_only, frozenset({"training", *tracked}), hides)

    def watch(self, name: str, value: object, *, has_state: bool) -> None:
        """Watch a tracked object from now on, as long as its state_dict is empty."""
        if has_state:
            self._objects.pop(name, None)
        elif name not in self._objects and _is_own(value) and hasattr(value, "__dict__"):
            self._objects[name] = owner = self._owner(name, value, numbers_only=False)
            self._begun |= owner.values()

    def watch_callback(self, value: object) -> None:
        """Watch a trainer's callback that says no state, under the name of its class."""
        if _is_own(value) and hasattr(value, "__dict__"):
            number = sum(type(owner.value) is type(value) for owner in self._callbacks)
            name = f"{type(value).__name__}{number or ''}"
            owner = self._owner(name, value, numbers_only=True)
            self._callbacks.append(owner)
            self._begun |= owner.values()

    def training_begins(self) -> None:
        """The first boundary: what callbacks set as a training begins, they set again."""
        self._first = self._values_of_callbacks()

    def changed(self) -> dict[str, Any]:
        """Return name -> value, of those that are not as they were when watching began."""
        return {
            name: value
            for name, value in (self._values() | self._values_of_callbacks()).items()
            if name in self._always or not _same(value, self._begun.get(name))
        }

    def changed_in_training(self) -> list[str]:
        """Return the names of those that changed, of callbacks since the first boundary."""
        return [name for name, value in self.changed().items()
                if name not in self._first or not _same(value, self._first[name])]  # fmt: skip

    def hint(self, names: Iterable[str]) -> str:
        """Return what to do about these."""
        of_callbacks = self._values_of_callbacks()
        return HINT_OF_CALLBACKS if all(name in of_callbacks for name in names) else HINT

    def not_restored(self, saved: dict[str, Any], *, of_callbacks: bool = False) -> list[str]:
        """Return which of the changed ones of a snapshot are otherwise now, each with its values.

        They stay in every snapshot from now on: that they do not change further says nothing.

        Args:
            saved: Name -> value, of the snapshot.
            of_callbacks: Look at callbacks, which set theirs before the first boundary, or at all
                others.
        """
        live = self._values_of_callbacks() if of_callbacks else self._values()
        found = [name for name, value in saved.items()
                 if name in live and not _same(value, live[name])]  # fmt: skip
        self._always.update(found)
        return [f"{name}{_how(saved[name], live[name])}" for name in sorted(found)]

    def _values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for owner in (*self._modules, *self._objects.values()):
            found |= owner.values()
        return found

    def _values_of_callbacks(self) -> dict[str, Any]:
        return {name: v for owner in self._callbacks for name, v in owner.values().items()}


def _is_watched(part: nn.Module) -> bool:
    """Return True for a module of the script's own that keeps no state by other means."""
    return _is_own(part) and type(part).get_extra_state is nn.Module.get_extra_state


def _is_own(value: object) -> bool:
    return any(not _is_framework(kind) for kind in _bases(value))


def _bases(value: object) -> list[type]:
    return [kind for kind in type(value).__mro__ if kind not in (object, nn.Module)]


def _is_framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def _number(value: Any, *, of_module: bool) -> Any:
    """The value; of a tensor with one number that a callback has, that number; of a time, "".

    A module may keep such a tensor of its last micro-batch, which is set anew in the next.
    """
    if type(value) is torch.Tensor and value.numel() == 1 and not of_module:
        return value.item() if value.device.type == "cpu" else ""
    return "" if isinstance(value, float) and _CLOCK_S[0] < value < _CLOCK_S[1] else value


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _how(then: Any, now: Any) -> str:
    return "" if isinstance(then, str) or isinstance(now, str) else f" ({then}, now {now})"


def _digest(value: Any) -> str:
    """Return the digest of a value, or "" if it is of a kind that cannot be stored."""
    seen = Captured()
    try:
        tree = seen.encode(value, "attribute")
        tensors = [tensor_digest(tensor) for tensor in seen.tensors.values()]
    except (TrainckptError, RuntimeError):
        return ""
    return digest.digest(strict.canonical([tree, tensors]))

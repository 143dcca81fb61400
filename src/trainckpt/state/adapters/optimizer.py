"""Capture and restore optimizers: the state of every parameter, and the parameter groups.

`load_state_dict` is not used: it casts moments to the type of the parameter, which loses bits of
fp32 moments on bf16 parameters. Parameters are named by their module path, never by position.

A script may add parameter groups during training, as gradual unfreezing does by `add_param_group`.
A fresh optimizer lacks them, so a resume adds them. The script may add one again before the first
batch, at the start of an epoch for instance. Changes before the first boundary are undone anyway,
so the second addition is ignored instead of being torch's error.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from trainckpt.format import json_io
from trainckpt.format.changes import LEARNING_RATE, OPTIMIZER, SCRIPT, WEIGHT_DECAY, Change
from trainckpt.format.exactness import How, Restored
from trainckpt.state import dtensor, values
from trainckpt.state.capture_cache import KnownTensors
from trainckpt.state.parallel_copy import CopyBatch
from trainckpt.state.values import UnknownValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainckpt.state.captured import Captured, Saved


# Kinds of options, in `format.changes`.
_KINDS = {
    "lr": LEARNING_RATE,
    "max_lr": LEARNING_RATE,  # OneCycleLR and CyclicLR keep these two in the groups
    "min_lr": LEARNING_RATE,
    "weight_decay": WEIGHT_DECAY,
}
# Their state_dict has nothing besides state and param_groups.
_PLAIN_PACKAGES = ("torch.optim.", "accelerate.")
# Their state_dict has one number more, saved here: module -> (attribute, the number's name in it).
_NUMBERS = {"torch.distributed.optim.post_localSGD_optimizer": ("averager", "step")}
_TRAINED: WeakSet[torch.optim.Optimizer] = WeakSet()  # captured with state in this process


class OptimizerState:
    """One tracked `torch.optim.Optimizer`.

    Attributes:
        added: Number of groups added by a resume.
        undone: Options that the script set between the resume and its boundary: "lr 0.2 set, 0.1
            saved". The saved values apply.
        implied: Tracked because another tracked object steps by it. Snapshots of older releases
            lack it.
        is_partitioned: Its parameters are parts of flat ones, divided over the ranks.
    """

    is_partitioned = False

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, *, implied: bool = False
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.implied = implied
        self.added = 0
        self.undone: list[str] = []
        self._made = [_made(group) for group in optimizer.param_groups]
        self._was_trained = optimizer in _TRAINED  # by an earlier attempt of this process
        self._put: dict[tuple[int, Any], torch.Tensor] = {}  # by the last `apply`
        self._known = KnownTensors()

    def parameters(self) -> list[torch.Tensor]:
        """Return every parameter of every group, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def problems(self, tracks: Callable[[object], bool]) -> list[str]:
        """Return a sentence for each possible loss: state besides `state` and `param_groups`.

        `tracks` returns True for tracked objects.
        """
        optimizer = self.optimizer
        # An inner optimizer on the same state is checked here, unless tracked by itself.
        parts = [(self.name, optimizer)]
        for attribute, inner in inner_optimizers(optimizer):
            if inner.state is optimizer.state and not tracks(inner):
                parts.append((f"{self.name}.{attribute}", inner))
        return [
            f"{name} (a {type(part).__name__}) has a state_dict of its own; only its state and "
            "param_groups are kept"
            for name, part in parts
            if _tells_more(part)
        ]

    def restored(self, saved: Saved) -> list[Restored]:
        """Return the parts missing from a snapshot of an older release."""
        if self.name not in saved.values:  # implied, or not in an imported checkpoint
            lost = f"the state of {self.name} is not in the snapshot"
        elif _number(self.optimizer) is None or "number" in saved.values[self.name]:
            return []
        else:
            owner, name = _NUMBERS[_defined_in(self.optimizer)]
            lost = f"the {name} of {self.name}'s {owner} begins anew: the snapshot does not hold it"
        return [Restored(self.name, How.NOT_KEPT, lost)]

    def capture(self, out: Captured, names: Mapping[int, str]) -> None:
        """Add groups and per-parameter state; `names` maps id(parameter) to its full name."""
        if self.optimizer.state:
            _TRAINED.add(self.optimizer)
        known, group = self._names(names), self.name
        out.apart[group] = 1
        kind = type(self.optimizer).__qualname__  # only ever compared
        out.values[group] = {"kind": kind, "state": self._capture_state(out, known)}
        groups = [
            {
                "options": out.encode(_options(group), f"{self.name}/group{i}", self.name),
                "params": [known[id(p)] for p in group["params"]],
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]
        for name, parameter in self.untracked(names).items():
            out.add(name, parameter, self.name)
        made = out.encode(self._made, f"{self.name}/made", self.name)
        out.values[self.name] |= {"groups": groups, "made": made}
        own = [
            [out.encode(key, self.name), out.encode(value, self._path("own", key), group)]
            for key, value in self.optimizer.state.items()
            if not isinstance(key, torch.Tensor)
        ]
        if own:  # the optimizer's own state, besides its parameters'
            out.values[self.name]["own"] = own
        if (number := _number(self.optimizer)) is not None:
            holder, attribute = number
            out.values[self.name]["number"] = out.encode(getattr(holder, attribute), self.name)

    def _capture_state(self, out: Captured, known: Mapping[int, str]) -> dict[str, list[Any]]:
        """Add the state of every parameter; return its nodes by the parameter's name."""
        held = [
            (known[id(p)], items) for p, items in self.optimizer.state.items() if id(p) in known
        ]
        dicts = [items for _, items in held if type(items) is dict]
        keys = list(chain.from_iterable(dicts))
        structure = ([name for name, _ in held], list(map(len, dicts)), keys)
        sources = list(chain.from_iterable(map(dict.values, dicts)))
        is_plain = len(dicts) == len(held) and all(type(key) is str for key in keys)
        found = self._known.recall(out, structure, sources) if is_plain else None
        if found is None:
            before, met = len(out.tensors), dict[int, Any]()  # tensors shared by several parameters
            state = {
                name: [
                    self._capture(out, name, key, value, met)
                    for key, value in self._items(name, items)
                ]
                for name, items in held
            }
            found = state, json_io.canonical(state)
            if is_plain:
                self._known.learn(out, structure, sources, before=before, result=found)
        state, out.spelled[self.name, "state"] = found
        return state

    def _items(self, parameter: str, items: Any) -> Iterable[tuple[Any, Any]]:
        if not isinstance(items, dict):
            raise UnknownValue(
                f"{self.name} keeps a {type(items).__qualname__} as the state of {parameter}",
                hint="let state[parameter] be a dict, as those of torch's optimizers",
            )
        return items.items()

    def _capture(
        self, out: Captured, parameter: str, key: object, value: Any, met: dict[int, Any]
    ) -> list[Any]:
        """Encode one item of a parameter's state, mostly a tensor with a string key."""
        path = self._path(parameter, key)
        if type(key) is str and type(value) is torch.Tensor:
            node = met.get(id(value))
            if node is None:
                node = met[id(value)] = out.add(path, value, self.name)
            return [key, node]
        return [out.encode(key, self.name), out.encode(value, path, self.name)]

    def differences(self, saved: Saved, names: Mapping[int, str]) -> list[str]:
        """Return the differences: another kind of optimizer, or groups of other parameters."""
        known, kind = self._names(names), type(self.optimizer).__qualname__
        kind_then = saved.values[self.name]["kind"]
        if kind_then != kind:
            return [f"{self.name} was a {kind_then}, is a {kind}"]
        then = [group["params"] for group in saved.values[self.name]["groups"]]
        now = [[known[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        missing = then[len(now) :] if then[: len(now)] == now else []
        why = cannot_be_added(self.optimizer.param_groups, missing, names) if missing else ""
        if len(then) != len(now) and (why or not missing):
            told = f": {why}; add them before the Checkpointer is made" if why else ""
            return [f"{self.name} had {len(then)} parameter groups, has {len(now)}{told}"]
        found = []
        for i, (old, new) in enumerate(zip(then, now, strict=False)):
            if old != new:
                gone, added = sorted(set(old) - set(new)), sorted(set(new) - set(old))
                what = f"lost {gone[:3]}, gained {added[:3]}" if gone or added else "another order"
                found.append(f"{self.name}: parameter group {i} {what}")
        for name, parameter in self.untracked(names).items():
            held = saved.tensors.get(name)
            fits = held is not None and held.shape == dtensor.local(parameter).shape
            if name in saved.shapes and not fits:
                found.append(
                    f"{name} has shape {list(saved.shapes[name])} in the snapshot, "
                    f"{list(parameter.shape)} now"
                )
        return found

    def changes(self, saved: Saved, choices: Mapping[str, str]) -> list[Change]:
        """Return the options that the script gives otherwise now. Call it before `apply`."""
        groups: dict[tuple[str, Any, Any], list[int]] = {}
        for number, key, then, now in self._given_otherwise(saved):
            groups.setdefault((key, then, now), []).append(number)
        found = []
        for (key, then, now), numbers in groups.items():
            is_of_all = len(numbers) == len(self._made)
            of = "" if is_of_all else f" of group {', '.join(map(str, numbers))}"
            kind = _KINDS.get(key, OPTIMIZER)
            name = f"{self.name} {key}{of}"
            found.append(Change(kind, name, str(then), str(now), choices[kind]))
        return found

    def take_from_script(
        self, saved: Saved, choices: Mapping[str, str]
    ) -> dict[int, tuple[float, float]]:
        """Put the script's options into `saved`, where they count. Call it before `apply`.

        A schedule has moved the learning rate: the moved one is scaled.

        Returns:
            Group -> learning rate of the snapshot's script, and of this one.
        """
        stored, rates = saved.values.get(self.name, {}), {}
        for number, key, then, now in self._given_otherwise(saved):
            if choices[_KINDS.get(key, OPTIMIZER)] != SCRIPT:
                continue
            options, given = stored["groups"][number]["options"], {key: now}
            if key == "lr":
                rates[number] = (then, now)
                given = {"initial_lr": now, key: scaled(saved.decode(options)[key], then, now)}
            _put_options(options, given)
            _put_options(stored["made"][number], {key: now})
        return rates

    def _given_otherwise(self, saved: Saved) -> list[tuple[int, str, Any, Any]]:
        """Return group, name, old and new value of each option that the script gives otherwise.

        In a second attempt with the objects of the first, options that training moves differ, such
        as the momentum of a cycle: the snapshot has them moved as well.
        """
        changed = _changed(self._made_then(saved), self._made)
        if not self._was_trained:
            return changed
        groups = saved.values[self.name]["groups"]
        moved = [_made(saved.decode(group["options"])) for group in groups]
        return [change for change in changed if moved[change[0]].get(change[1]) == change[2]]

    def _made_then(self, saved: Saved) -> list[dict[str, Any]]:
        stored = saved.values.get(self.name, {})
        return saved.decode(stored["made"]) if "made" in stored else []

    def add_groups(self, saved: Saved, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add the snapshot's groups not made yet by the script; `parameters` by full name."""
        missing = saved.values[self.name]["groups"][len(self.optimizer.param_groups) :]
        self.added += len(missing)
        groups = []
        for group in missing:
            held = [parameters[name] for name in group["params"]]
            options = saved.decode(group["options"], held[0].device if held else None)
            groups.append((held, options))
        if groups:
            add(self.optimizer, groups)

    @torch.no_grad()
    def apply(self, saved: Saved, names: Mapping[int, str]) -> None:
        """Restore groups and per-parameter state, each tensor with its saved type."""
        stored = saved.values[self.name]
        if "made" in stored:
            self._made = saved.decode(stored["made"])  # the next resume reports changes too
        if saved.is_again:
            own = [_options(group) for group in self.optimizer.param_groups]
            restored = [saved.decode(group["options"]) for group in stored["groups"]]
            self.undone = [
                f"{key} {old} set, {new} saved"
                for key, old, new in dict.fromkeys(
                    (key, old, new) for _, key, old, new in _changed(own, restored)
                )
            ]
        for name, parameter in self.untracked(names).items():
            dtensor.local(parameter).copy_(saved.tensors[name])
        for group, then in zip(self.optimizer.param_groups, stored["groups"], strict=True):
            device = group["params"][0].device if group["params"] else None
            for key, value in saved.decode(then["options"], device).items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.copy_(value)  # schedulers and graphs may refer to this very tensor
                elif isinstance(live, torch.Tensor) and isinstance(value, (int, float)):
                    live.fill_(value)  # taken from the script
                else:
                    group[key] = value
        self._apply_state(saved, names)
        for key, value in stored.get("own", ()):
            self.optimizer.state[saved.decode(key)] = saved.decode(value)
        if "number" in stored and (number := _number(self.optimizer)) is not None:
            holder, attribute = number
            setattr(holder, attribute, saved.decode(stored["number"]))

    def _apply_state(self, saved: Saved, names: Mapping[int, str]) -> None:
        """Replace the state of every parameter.

        State is applied twice: on resume, and at the first boundary. The second time fills the
        tensors of the first if they are still in use.
        """
        stored, known = saved.values[self.name]["state"], self._names(names)
        before, copies = dict(self.optimizer.state), CopyBatch()
        self.optimizer.state.clear()
        earlier, self._put = self._put, {}
        made: dict[str, torch.Tensor] = {}  # by name: parameters may share one state tensor
        for parameter in self.parameters():
            if known[id(parameter)] not in stored:
                continue
            live = before.get(parameter, {})
            state = self.optimizer.state[parameter] = {}
            for coded, tree in stored[known[id(parameter)]]:
                key = coded if type(coded) is str else saved.decode(coded)
                place = id(parameter), key
                name = tree.get("$tensor", "") if isinstance(tree, dict) else ""
                value: Any = earlier.get(place)
                is_in_use = value is not None and value is live.get(key)
                if name in made:
                    value = made[name]
                elif not (is_in_use and saved.put_again(tree, value, copies)):
                    # a script may resize it: then it must be torch's own memory
                    as_large = saved.shapes.get(name) == tuple(parameter.shape)
                    value = saved.make(tree, parameter.device, copies, gives=as_large)
                if type(value) is torch.Tensor:
                    self._put[place] = value
                    if name:
                        made[name] = value
                state[key] = value
        copies.run(saved.num_threads)

    def settled(self) -> None:
        """Forget the restored tensors: nothing is applied any more."""
        self._put.clear()
        if self.added:
            settle(self.optimizer)

    def _path(self, parameter: str, key: object) -> str:
        return f"{self.name}/{parameter}/{key}"

    def named(self, names: Mapping[int, str]) -> list[tuple[torch.Tensor, str]]:
        """Return every parameter with its name; `names` as for `capture`."""
        known = self._names(names)
        return [(parameter, known[id(parameter)]) for parameter in self.parameters()]

    def untracked(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """Return the parameters of no tracked model: only here their values are saved."""
        known = self._names(names)
        return {known[id(p)]: p for p in self.parameters() if id(p) not in names}

    def _names(self, names: Mapping[int, str]) -> Mapping[int, str]:
        """Return this optimizer's parameter names; by position for those of no tracked model."""
        if all(id(parameter) in names for parameter in self.parameters()):
            return names
        known = dict(names)
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                known.setdefault(id(parameter), f"{self.name}.group{i}.{j}")
        return known


def _tells_more(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if its state_dict may have state not captured here."""
    is_plain = _defined_in(optimizer).startswith(_PLAIN_PACKAGES)
    return not is_plain and _number(optimizer) is None


def _defined_in(optimizer: torch.optim.Optimizer) -> str:
    """Return the module defining its state_dict."""
    return str(getattr(type(optimizer).state_dict, "__module__", ""))


def _number(optimizer: torch.optim.Optimizer) -> tuple[Any, str] | None:
    """Return the object and attribute of the extra number in its state_dict, or None."""
    where = _NUMBERS.get(_defined_in(optimizer))
    return None if where is None else (getattr(optimizer, where[0]), where[1])


def inner_optimizers(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield inner optimizers by attribute, or by attribute and key."""
    for name, value in vars(optimizer).items():
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        items = enumerate(value) if isinstance(value, (list, tuple)) else items
        if isinstance(value, torch.optim.Optimizer):
            yield name, value
        for key, item in items:
            if isinstance(item, torch.optim.Optimizer):  # a key may be a parameter, slow to print
                yield f"{name}[{key!r}]", item


def _made(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group as made by the script: numbers, and tuples of them.

    A scheduler has already changed `lr`; then `initial_lr` is the script's choice.
    """
    plain = {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in _options(group).items()
        if not (
            isinstance(value, torch.Tensor) and (value.numel() != 1 or value.device.type != "cpu")
        )
    }
    first = plain.pop("initial_lr", None)
    if first is not None:
        plain["lr"] = first
    return {key: value for key, value in plain.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    parts = value if type(value) is tuple else (value,)
    return all(type(part) in (bool, int, float) for part in parts)


def _changed(
    then: list[dict[str, Any]], now: list[dict[str, Any]]
) -> list[tuple[int, str, Any, Any]]:
    """Return group, name, old and new value of each changed number among the groups' options."""
    return [
        (number, key, old[key], new[key])
        for number, (old, new) in enumerate(zip(then, now, strict=False))
        for key in old
        if key in new and _is_number(old[key]) and _is_number(new[key]) and old[key] != new[key]
    ]


def scaled(rate: Any, then: float, now: float) -> float:
    """Return a learning rate moved from `then` by a schedule, moved from `now` instead."""
    rate = float(rate)
    return now if rate == then or not then else rate * (now / then)


def _put_options(tree: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options in an encoded group, those that it has."""
    for pair in tree["of"]:
        if pair[0] in options:
            pair[1] = values.encode(options[pair[0]], pair[0], lambda path, _: path)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def cannot_be_added(
    live: Sequence[Mapping[str, Any]], added: Sequence[Sequence[str]], known: Mapping[int, str]
) -> str:
    """Return the reason why groups of these parameters cannot be added; "" if they can.

    Args:
        live: The groups before them.
        added: Full names of their parameters.
        known: id(parameter) -> name, of the parameters of all tracked models.
    """
    held = [known[id(p)] for g in live for p in g["params"] if id(p) in known]
    wanted = [name for names in added for name in names]
    strange = sorted(set(wanted) - set(known.values()))
    if strange:
        return f"no tracked model has {strange[0]}"
    if len({*held, *wanted}) < len(held) + len(wanted):
        return "they hold parameters that are in another group too"
    if any("param_names" in group for group in live):
        return "the script gave the others' parameters names"
    return ""


def add(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[tuple[list[torch.Tensor], dict[str, Any]]],
) -> None:
    """Add groups of these parameters and options; until `settle` ignore the script's repetition."""
    for parameters, options in groups:
        optimizer.add_param_group({**options, "params": parameters})
    there = {id(parameter) for parameters, _ in groups for parameter in parameters}
    # On this object alone; the class and its other optimizers are unchanged.
    vars(optimizer)["add_param_group"] = partial(_add_unless, optimizer, there)


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Make adding an existing group torch's error again."""
    with suppress(KeyError):
        del vars(optimizer)["add_param_group"]


def _add_unless(
    optimizer: torch.optim.Optimizer, there: set[int], param_group: dict[str, Any]
) -> None:
    given = param_group["params"]
    given = given if isinstance(given, (list, tuple)) else [given]
    if not given or not all(id(parameter) in there for parameter in given):
        type(optimizer).add_param_group(optimizer, param_group)

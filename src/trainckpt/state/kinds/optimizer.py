"""Optimizers: the state of every parameter as it is, and the parameter groups.

`load_state_dict` is not used: it casts moments to the type of the parameter, which loses bits of
fp32 moments on bf16 parameters. Parameters are named by their module path, never by position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainckpt.format.exactness import How, Restored
from trainckpt.state import sharded
from trainckpt.state.copies import Copies
from trainckpt.state.kinds import added_groups
from trainckpt.state.values import UnknownValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trainckpt.state.captured import Captured, Saved


# Whose state_dict tells nothing that state and param_groups do not.
_PLAIN_PACKAGES = ("torch.optim.", "accelerate.")
# Whose state_dict tells a number more, which is kept: attribute that has it -> its name there.
_NUMBERS = {"torch.distributed.optim.post_localSGD_optimizer": ("averager", "step")}


class OptimizerState:
    """One tracked `torch.optim.Optimizer`.

    Attributes:
        added: Groups that a resume added, as the saved run had.
        implied: Tracked because another tracked object steps by it. Snapshots of older releases
            lack it.
    """

    def __init__(
        self, name: str, optimizer: torch.optim.Optimizer, *, implied: bool = False
    ) -> None:
        self.name = name
        self.optimizer = optimizer
        self.implied = implied
        self.added = 0
        self._put: dict[tuple[int, Any], torch.Tensor] = {}  # by the last `apply`

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of every group, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def problems(self, tracks: Callable[[object], bool]) -> list[str]:
        """What may be lost, one sentence each: state beside `state` and `param_groups`.

        `tracks`: whether an object is tracked.
        """
        optimizer = self.optimizer
        # What steps on its state is seen with it, unless it is tracked and so seen by itself.
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
        """Return what a snapshot of an older release lacks."""
        return [Restored(self.name, How.NOT_KEPT, sentence) for sentence in self._lost(saved)]

    def _lost(self, saved: Saved) -> list[str]:
        if self.implied and self.name not in saved.values:
            return [f"the state of {self.name} is not in the snapshot"]
        if _number(self.optimizer) is None or "number" in saved.values[self.name]:
            return []
        owner, name = _NUMBERS[_defined_in(self.optimizer)]
        return [f"the {name} of {self.name}'s {owner} begins anew: the snapshot does not hold it"]

    def capture(self, out: Captured, names: Mapping[int, str]) -> None:
        """Add groups and per-parameter state; `names` maps id(parameter) to its full name."""
        known, group = self._names(names), self.name
        out.apart[group] = 1
        groups = [
            {
                "options": out.encode(_options(group), f"{self.name}/group{i}", self.name),
                "params": [known[id(p)] for p in group["params"]],
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]
        met: dict[int, Any] = {}  # tensors that are the state of several parameters at once
        state = {
            known[id(p)]: [
                self._capture(out, known[id(p)], key, value, met)
                for key, value in self._items(known[id(p)], items)
            ]
            for p, items in self.optimizer.state.items()
            if id(p) in known
        }
        for name, parameter in self.untracked(names).items():
            out.add(name, parameter, self.name)
        kind = type(self.optimizer).__qualname__  # only ever compared
        out.values[self.name] = {"kind": kind, "groups": groups, "state": state}
        own = [
            [out.encode(key, self.name), out.encode(value, self._path("own", key), group)]
            for key, value in self.optimizer.state.items()
            if not isinstance(key, torch.Tensor)
        ]
        if own:  # what the optimizer keeps for itself, beside its parameters' state
            out.values[self.name]["own"] = own
        if (number := _number(self.optimizer)) is not None:
            holder, attribute = number
            out.values[self.name]["number"] = out.encode(getattr(holder, attribute), self.name)

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
        """One item of a parameter's state. There are many, most often a tensor by a word."""
        path = self._path(parameter, key)
        if type(key) is str and type(value) is torch.Tensor:
            node = met.get(id(value))
            if node is None:
                node = met[id(value)] = out.add(path, value, self.name)
            return [key, node]
        return [out.encode(key, self.name), out.encode(value, path, self.name)]

    def differences(self, saved: Saved, names: Mapping[int, str]) -> list[str]:
        """Another kind of optimizer, or groups that hold other parameters than the saved ones."""
        known, kind = self._names(names), type(self.optimizer).__qualname__
        kind_then = saved.values[self.name]["kind"]
        if kind_then != kind:
            return [f"{self.name} was a {kind_then}, is a {kind}"]
        then = [group["params"] for group in saved.values[self.name]["groups"]]
        now = [[known[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]
        missing = then[len(now) :] if then[: len(now)] == now else []
        why = (
            added_groups.cannot_be_added(self.optimizer.param_groups, missing, names)
            if missing
            else ""
        )
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
            fits = held is not None and held.shape == sharded.local(parameter).shape
            if name in saved.shapes and not fits:
                found.append(f"{name} has shape {list(saved.shapes[name])} in the snapshot, "
                             f"{list(parameter.shape)} now")  # fmt: skip
        return found

    def add_groups(self, saved: Saved, parameters: Mapping[str, torch.Tensor]) -> None:
        """Add those of the snapshot that the script has not made yet, of `parameters` by name."""
        missing = saved.values[self.name]["groups"][len(self.optimizer.param_groups) :]
        if missing:
            self.added = len(missing)
            groups = [([parameters[n] for n in g["params"]], g["options"]) for g in missing]
            added_groups.add(self.optimizer, [
                (held, saved.decode(options, held[0].device if held else None))
                for held, options in groups
            ])  # fmt: skip

    @torch.no_grad()
    def apply(self, saved: Saved, names: Mapping[int, str]) -> None:
        """Put groups and per-parameter state back, each tensor with the type it was saved with."""
        stored = saved.values[self.name]
        for name, parameter in self.untracked(names).items():
            sharded.local(parameter).copy_(saved.tensors[name])
        for group, then in zip(self.optimizer.param_groups, stored["groups"], strict=True):
            device = group["params"][0].device if group["params"] else None
            for key, value in saved.decode(then["options"], device).items():
                live = group.get(key)
                if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                    live.copy_(value)  # schedulers and graphs may hold on to this very tensor
                else:
                    group[key] = value
        known, copies = self._names(names), Copies()
        before = dict(self.optimizer.state)
        self.optimizer.state.clear()
        put, self._put = self._put, {}
        made: dict[str, torch.Tensor] = {}
        for parameter in self.parameters():
            items = stored["state"].get(known[id(parameter)])
            if items is not None:
                live = before.get(parameter, {})
                self.optimizer.state[parameter] = {
                    (key := saved.decode(coded)): self._value(
                        saved, value, parameter, key, put, live.get(key), copies, made
                    )
                    for coded, value in items
                }
        copies.run(saved.num_threads)
        for key, value in stored.get("own", ()):
            self.optimizer.state[saved.decode(key)] = saved.decode(value)
        if "number" in stored and (number := _number(self.optimizer)) is not None:
            holder, attribute = number
            setattr(holder, attribute, saved.decode(stored["number"]))

    def _value(
        self,
        saved: Saved,
        tree: Any,
        parameter: torch.Tensor,
        key: Any,
        put: Mapping[tuple[int, Any], torch.Tensor],
        live: Any,
        copies: Copies,
        made: dict[str, torch.Tensor],
    ) -> Any:
        """One saved value; in the tensor that the last `apply` made for it, if it is there still.

        State is applied twice: on resuming, and at the first boundary. One tensor that was the
        state of several parameters is one again: `made`, by its name.
        """
        where = id(parameter), key
        name = tree.get("$tensor", "") if isinstance(tree, dict) else ""
        if name in made:
            self._put[where] = made[name]
            return made[name]
        ours = isinstance(live, torch.Tensor) and live is put.get(where)
        if ours and saved.put_again(tree, live, copies):
            value = live
        else:
            # what a script may give another size must be memory of torch's own
            as_large = saved.shapes.get(name) == tuple(parameter.shape)
            value = saved.make(tree, parameter.device, copies, gives=as_large)
        if type(value) is torch.Tensor:
            self._put[where] = value
            if name:
                made[name] = value
        return value

    def settled(self) -> None:
        """Nothing is applied any more: forget what was made for it."""
        self._put.clear()
        if self.added:
            added_groups.settle(self.optimizer)

    def _path(self, parameter: str, key: object) -> str:
        return f"{self.name}/{parameter}/{key}"

    def named(self, names: Mapping[int, str]) -> list[tuple[torch.Tensor, str]]:
        """Every parameter with its name; `names` as for `capture`."""
        known = self._names(names)
        return [(parameter, known[id(parameter)]) for parameter in self.parameters()]

    def untracked(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """Parameters of no tracked model: their values are kept here, or nobody would."""
        known = self._names(names)
        return {known[id(p)]: p for p in self.parameters() if id(p) not in names}

    def _names(self, names: Mapping[int, str]) -> dict[int, str]:
        """Names of this optimizer's parameters; those of no tracked model by their position."""
        known = dict(names)
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                known.setdefault(id(parameter), f"{self.name}.group{i}.{j}")
        return known


def counted_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step hooks count its steps: itself, or one that it steps by.

    Torch sees to the hooks in `Optimizer.__init__`, which some wrappers leave out. None: of neither
    they are called.
    """
    tried = (optimizer, *(inner for _, inner in inner_optimizers(optimizer)))
    return next((one for one in tried if hasattr(type(one).step, "hooked")), None)


def _tells_more(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict may hold what is not kept."""
    is_plain = _defined_in(optimizer).startswith(_PLAIN_PACKAGES)
    return not is_plain and _number(optimizer) is None


def _defined_in(optimizer: torch.optim.Optimizer) -> str:
    """The module that defines its state_dict."""
    return str(getattr(type(optimizer).state_dict, "__module__", ""))


def _number(optimizer: torch.optim.Optimizer) -> tuple[Any, str] | None:
    """The object and its attribute that its state_dict tells beside state and param_groups."""
    where = _NUMBERS.get(_defined_in(optimizer))
    return None if where is None else (getattr(optimizer, where[0]), where[1])


def inner_optimizers(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers that it holds, by the attribute, or by attribute and key."""
    for name, value in vars(optimizer).items():
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        items = enumerate(value) if isinstance(value, (list, tuple)) else items
        for path, item in ((name, value), *((f"{name}[{key!r}]", item) for key, item in items)):
            if isinstance(item, torch.optim.Optimizer):
                yield path, item


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}

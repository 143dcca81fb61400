"""Fit an imported state to the script's objects.

`trainckpt import` writes the state of another library's checkpoint into a new run. It lacks facts
that only the live objects have: the order of an optimizer's parameters, its class, which names are
tied, which buffers are not persistent. `fit` adds them, and a resume or `load` goes on from there
as with any snapshot, in any layout. What the source did not have stays as the script made it.

An imported parameter of an optimizer is "#3" (number 3, as torch's optimizers count) or a path in
a model ("blocks.0.weight", as DCP names it).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.errors import StateMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainckpt.format.manifest import TensorEntry
    from trainckpt.state.adapters.model import ModelState
    from trainckpt.state.adapters.optimizer import OptimizerState
    from trainckpt.state.registry import Registry

PART = "imported"  # {"from": path, "format": name}
BY_NUMBER = "#"
TWINS = "twins"  # in the values of a model: name -> another tensor's name, with the same bytes
# Options that a scheduler adds to a group; the class of an optimizer shows in the other numbers.
_OF_SCHEDULERS = frozenset(
    ("initial_lr", "base_momentum", "max_momentum", "max_lr", "min_lr", "swa_lr")
)
_LIKE_THE_PARAMETER = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg")


def fit(
    values: Mapping[str, Any], entries: Mapping[str, TensorEntry], registry: Registry
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return the values and tensors of an imported snapshot, completed from the live objects.

    Raises:
        StateMismatch: The optimizer's parameters are not those of the source.
    """
    fitted, kept = dict(values), dict(entries)
    for model in registry.models:
        if model.name in values:
            fitted[model.name] = _model(values[model.name], kept, model)
    for optimizer in registry.optimizers:
        if optimizer.name in values:
            tree = values[optimizer.name]
            fitted[optimizer.name] = _Optimizer(optimizer, registry, entries).fit(tree)
    return fitted, kept


def source(values: Mapping[str, Any]) -> str:
    """Return the path of the imported checkpoint; "" for any other snapshot."""
    return str(values[PART]["from"]) if PART in values else ""


def _model(
    tree: Mapping[str, Any], entries: dict[str, TensorEntry], model: ModelState
) -> dict[str, Any]:
    """Take the live model's tied names if the source agrees, and excuse buffers it cannot have."""
    prefix, twins = f"{model.name}/", tree.get(TWINS, {})
    tied = model.tied()
    for path, first in tied.items():
        if prefix + path in entries and twins.get(path, path) == twins.get(first, first):
            entries.pop(prefix + path)
    left = [name for name in model.transient() if name not in entries]
    return {**tree, "tied": tied, "excluded": left}


class _Optimizer:
    def __init__(
        self, live: OptimizerState, registry: Registry, entries: Mapping[str, TensorEntry]
    ) -> None:
        names = registry.parameter_names()
        self._live, self._entries = live, entries
        self._parameters = {name: p for p, name in live.named(names)}
        self._groups = [
            [names.get(id(p), "") for p in group["params"]] for group in live.optimizer.param_groups
        ]

    def fit(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state, its parameters named and grouped as in the live optimizer."""
        then = [group["params"] for group in tree["groups"]]
        given = [name for group in then for name in group]
        live = [name for group in self._groups for name in group]
        if "" in live:
            self._refuse([f"{self._live.name} has parameters of no tracked model"])
        if all(name.startswith(BY_NUMBER) for name in given):
            sizes, sizes_now = [len(group) for group in then], [len(g) for g in self._groups]
            if sizes != sizes_now:
                self._refuse(
                    [f"{self._live.name}: groups of {sizes} parameters then, {sizes_now} now"]
                )
            full = dict(zip(given, live, strict=True))
        else:
            by_path = {name.partition("/")[2]: name for name in live}
            full = {name: by_path.get(name, name) for name in given}
            if other := sorted({*full.values()} ^ {*live}):
                more = f" and {len(other) - 3} more" if len(other) > 3 else ""
                self._refuse([f"{self._live.name}: only there or only here: {other[:3]}{more}"])
        options = {full[n]: group["options"] for group in tree["groups"] for n in group["params"]}
        state = {full[name]: items for name, items in tree["state"].items() if name in full}
        self._must_have_shapes(state)
        self._must_have_options(options)
        groups = [
            {"options": options[group[0]] if group else {}, "params": group}
            for group in self._groups
        ]
        return {**tree, "kind": type(self._live.optimizer).__qualname__, "groups": groups} | {
            "state": state
        }

    def _must_have_shapes(self, state: Mapping[str, Any]) -> None:
        """Parameters by number may have another order: shapes tell most of them."""
        found = []
        for name, items in state.items():
            shape = tuple(self._parameters[name].shape)
            for key, node in items:
                entry = (
                    self._entries.get(node.get("$tensor", "")) if isinstance(node, dict) else None
                )
                if entry is not None and key in _LIKE_THE_PARAMETER and entry.shape != shape:
                    found.append(f"{key} has shape {list(entry.shape)}, {name} has {list(shape)}")
        if found:
            self._refuse(found)

    def _must_have_options(self, options: Mapping[str, Any]) -> None:
        """Options of a group come from its first parameter; an optimizer shows in their names."""
        found = []
        for number, (group, live) in enumerate(
            zip(self._groups, self._live.optimizer.param_groups, strict=True)
        ):
            if not group:
                continue
            where = f"{self._live.name}: group {number}"
            if any(options[name] != options[group[0]] for name in group):
                found.append(f"{where} has parameters of groups with other options")
            saved = dict(options[group[0]]["of"])
            lost, added = _numbers(saved) - live.keys(), _numbers(live) - saved.keys()
            found += [f"{where} had {name}, and has none now" for name in sorted(lost)]
            found += [f"{where} has {name}, and had none" for name in sorted(added)]
        if found:
            self._refuse(found)

    def _refuse(self, differences: list[str]) -> None:
        raise StateMismatch(
            f"the optimizer {self._live.name} is not the one of the imported checkpoint",
            differences,
            hint="give the optimizer the same parameters in the same order, or take the weights "
            "alone: Checkpointer(NEW_RUN, init_from=RUN)",
        )


def _numbers(options: Mapping[str, Any]) -> set[str]:
    """Return the options that are numbers; flags come and go with releases of torch."""
    found = {k for k, v in options.items() if not isinstance(v, (bool, str, type(None)))}
    return found - _OF_SCHEDULERS - {"params"}

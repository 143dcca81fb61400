"""Parameter groups that the script added as it trained: gradual unfreezing, by `add_param_group`.

A fresh optimizer lacks them, so a resume adds them as they were. The script may come by the place
where it adds one before the first batch, where an epoch begins for instance: what it does until
then is undone at the first boundary in any case, so that is no error as torch's would be.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


def cannot_be_added(
    live: Sequence[Mapping[str, Any]], added: Sequence[Sequence[str]], known: Mapping[int, str]
) -> str:
    """Why groups of these parameters cannot be added to the live ones; "" if they can.

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
    """Add groups of these parameters and options; and until `settle` let the script do so again."""
    for parameters, options in groups:
        optimizer.add_param_group({**options, "params": parameters})
    there = {id(parameter) for parameters, _ in groups for parameter in parameters}
    # Of this object alone; the class and its other optimizers are as they were.
    vars(optimizer)["add_param_group"] = partial(_add_unless, optimizer, there)


def settle(optimizer: torch.optim.Optimizer) -> None:
    """From now on a group that is there is torch's error again."""
    with suppress(KeyError):
        del vars(optimizer)["add_param_group"]


def _add_unless(
    optimizer: torch.optim.Optimizer, there: set[int], param_group: dict[str, Any]
) -> None:
    given = param_group["params"]
    given = given if isinstance(given, (list, tuple)) else [given]
    if not given or not all(id(parameter) in there for parameter in given):
        type(optimizer).add_param_group(optimizer, param_group)

"""Capture and restore models: parameters, each rank's buffers, extra state, and tied names.

Buffers are captured whether persistent or not, and stay rank-local unless all ranks have the
same bytes: DDP's constructor overwrites them with rank 0's, so they are loaded after wrapping.
Loading copies into the existing storage, so tensors sharing it still share it. Only a buffer made
or enlarged in a forward (a mask, a rotary cache) may have no matching storage yet: it is made.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from trainckpt.state import dtensor, tensor_subclasses
from trainckpt.state.adapters import ddp, fsdp
from trainckpt.state.capture_cache import KnownTensors, ModuleWalk
from trainckpt.state.captured import in_memory_order, inner_tensors, memory_order
from trainckpt.state.parallel_copy import CopyBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

    from trainckpt.state.captured import Captured, Saved


T = TypeVar("T")
_KEPT = "_trainckpt_keeps_its_state"
FROZEN = "frozen"  # parameters without `requires_grad`: compared, never restored
MODES = "modes"  # training or evaluation, of the model and of the modules that are otherwise


class Owner(NamedTuple):
    """A module with a registered buffer, and the buffer's name in it."""

    module: nn.Module
    key: str

    @property
    def buffer(self) -> torch.Tensor | None:
        """Return the present buffer."""
        return self.module._buffers[self.key]

    def differs(self, saved: torch.Tensor) -> bool:
        """Return True if the saved buffer must replace this one rather than be copied to it.

        A persistent buffer of another shape belongs to another model, as for `load_state_dict`.
        """
        live = self.buffer
        if live is None:
            return True
        transient = self.key in self.module._non_persistent_buffers_set
        return transient and type(live) in dtensor.PLAIN and live.shape != saved.shape

    def device(self, model: nn.Module) -> torch.device:
        """Return the device of the buffer, else of other tensors of the module or model."""
        near = chain(
            self.module.buffers(), self.module.parameters(), model.parameters(), model.buffers()
        )
        first = self.buffer if self.buffer is not None else next(near, None)
        return torch.device("cpu") if first is None else first.device

    def put(self, buffer: torch.Tensor | None) -> None:
        """Set the buffer."""
        self.module._buffers[self.key] = buffer


class ModelState:
    """One tracked `nn.Module`, wrapped in DDP or not: names are equal with and without it.

    Attributes:
        excluded: Full names of parameters and buffers left out of captures.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.wrapped = module
        self.module = ddp.unwrap(module)
        self._ddp = ddp.wrapped_in(module)
        self.excluded: frozenset[str] = frozenset()
        self._walk: ModuleWalk | None = None  # the newest inside `unchanged`
        self._is_unchanged = False
        self._known = KnownTensors()
        self._empty: set[str] = set()  # buffers still None at the first restore

    @property
    def reducing(self) -> nn.Module:
        """Return the DDP wrapper around or inside the module; without one, the module itself.

        The script may have made another since, and need not have tracked the wrapper itself.
        """
        if len(self._ddp) > 1:
            return self.wrapped
        inner = next(iter(self._ddp.values()), None)
        newest = ddp.newest(ddp.unwrap(self.module if inner is None else inner))
        found = inner if newest is None else newest
        return self.wrapped if found is None else found

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context in which the module gains or loses no tensor: it is walked only once.

        The walk of the context before is used again if the module has changed nothing since.
        Contexts may be nested.
        """
        if self._is_unchanged:
            yield
            return
        if self._walk is None or not self._walk.is_current():
            self._walk = ModuleWalk(self.module)
        self._is_unchanged = True
        try:
            yield
        finally:
            self._is_unchanged = False

    def current_walk(self) -> ModuleWalk | None:
        """Return a walk that is valid now, the last one if possible; None if none would last."""
        if self._is_unchanged:
            return self._walk
        walk = self._walk
        if walk is None or (walk.can_be_proven and not walk.is_current()):
            walk = self._walk = ModuleWalk(self.module)
        return walk if walk.can_be_proven else None

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return each parameter once, by its full name `<tracked name>/<module path>`."""
        return self._once("parameters", lambda: self._full_names(fsdp.parameters(self.module)))

    def names(self) -> list[str]:
        """Return the name of every parameter and buffer, once; also of buffers still None."""
        with self.unchanged():
            named = chain[tuple[str, torch.Tensor]](self.parameters(), self._buffers())
            empty = [name for name, owner in self.owners().items() if owner.buffer is None]
            return [*(name for name, _ in named), *empty]

    def left_out(self, values: Mapping[str, Any], stored: Container[str]) -> list[str]:
        """Return the tensors rightly missing from a snapshot: excluded then, or now."""
        tree = values.get(self.name)
        then = tree.get("excluded", ()) if isinstance(tree, dict) else ()
        excused = {*self.excluded, *then}
        names = (name for name in self.tensors() if name not in stored)
        return [name for name in names if name.partition("#")[0] in excused]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return full name -> every parameter and buffer as stored: whole or sharded."""
        live: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters():
            live.update(inner_tensors(parameter, name))
        for name, buffer in self._buffers():
            live.update(inner_tensors(buffer, name))
        return live

    def capture(self, out: Captured) -> None:
        """Add parameters, buffers, extra state and the tied names."""
        facts = self._capture_tensors(out)
        extra = {
            path: out.encode(module.get_extra_state(), f"{self.name}<extra>/{path}")
            for path, module in self._with_extra().items()
        }
        out.values[self.name] = {**facts, "tied": self.tied(), "extra": extra}
        out.values[self.name] |= self._of_buffers()
        if self.excluded:
            out.values[self.name]["excluded"] = sorted(self.excluded)

    def _capture_tensors(self, out: Captured) -> dict[str, Any]:
        """Add parameters and buffers; return what else is stored of them."""
        parameters, buffers = self.parameters(), self._buffers()
        sources = [tensor for _, tensor in (*parameters, *buffers)]
        structure = ([name for name, _ in (*parameters, *buffers)], [len(parameters)])
        known = None if self.excluded else self._known.recall(out, structure, sources)
        if known is not None:
            return dict(known)
        before, orders = len(out.tensors), dict[str, list[int]]()
        for name, parameter in parameters:
            self._add(out, name, parameter, f"{self.name} parameters")
        for name, buffer in buffers:
            self._add(out, name, buffer, f"{self.name} buffers")
            order = memory_order(buffer) if _is_dense(buffer) else []
            if order:
                orders[name] = order
        frozen = [name for name, parameter in parameters if not parameter.requires_grad]
        found: dict[str, Any] = {"orders": orders, FROZEN: frozen}
        if subclasses := self._subclasses():
            found["subclasses"] = subclasses
        if not self.excluded:
            self._known.learn(out, structure, sources, before=before, result=found)
        return found

    def _add(self, out: Captured, name: str, tensor: torch.Tensor, group: str) -> None:
        if name in self.excluded:
            return
        if type(tensor) is nn.Parameter:  # nearly all; they have no inner tensors
            out.add(name, tensor, group)
            return
        for inner, part in inner_tensors(tensor, name).items():
            out.add(inner, part, group)

    def _subclasses(self) -> dict[str, Any]:
        """Return full name -> class and context of each tensor subclass, neither ever restored."""
        named = (*self.parameters(), *self._buffers())
        return {
            name: described
            for name, tensor in named
            if type(tensor) not in dtensor.PLAIN
            and (described := tensor_subclasses.describe(tensor)) is not None
        }

    def problems(self) -> list[str]:
        """Return a sentence for each possible loss, such as a module's own `state_dict`."""
        found = [
            f"{self.name}/{path or type(part).__name__} has a state_dict of its own; only its "
            "parameters, buffers and get_extra_state are kept"
            for path, part in self.module.named_modules()
            if keeps_own_state(part)
        ]
        if len(self._ddp) > 1:
            found.append(
                f"{self.name} holds several DDP modules ({', '.join(self._ddp)}), and "
                "what each keeps to itself is not kept; track each by itself"
            )
        if ddp.is_hidden(self.module):
            found.append(
                f"{self.name} is in a DDP that torch's replicate makes amid a forward, so "
                "what that keeps to itself is not put back"
            )
        return found + ddp.problems(self.reducing, self.name)

    def differences(self, saved: Saved) -> list[str]:
        """Return the differences to the saved model: names, shapes, types, ties.

        A buffer may differ if a forward makes it, or remakes it where it is not persistent.
        """
        live, prefix = self.tensors(), f"{self.name}/"
        stored = {name for name in saved.shapes if name.startswith(prefix)}
        made = _made_by_forward(self.owners(), saved)
        live = {n: t for n, t in live.items() if n not in saved.left and n not in made}
        transient = {self._full(path) for path in saved.values[self.name].get("transient", ())}
        unknown = (transient & stored) - live.keys() - made.keys()
        found = compare(live, stored - made.keys() - unknown, saved)
        found += [
            f"{name} is gone: only the snapshot has it; if a forward makes it, register that "
            "buffer before, as None or not persistent"
            for name in unknown
        ]
        of_subclasses = self._subclasses()
        for name, then in saved.values[self.name].get("subclasses", {}).items():
            if name in of_subclasses and name not in saved.left and of_subclasses[name] != then:
                found.append(f"{name} was {then}, is {of_subclasses[name]}")
        extra_then = saved.values[self.name]["extra"].keys()
        for path in extra_then ^ self._with_extra().keys():
            when = "in the snapshot only" if path in extra_then else "now only"
            found.append(f"{self._full(path)} has extra state {when}")
        tied_then = saved.values[self.name]["tied"]
        if not found and tied_then != self.tied():
            found.append(f"{self.name}: tied names were {tied_then}, are {self.tied()}")
        return sorted(found)

    def frozen_otherwise(self, saved: Saved) -> dict[str, bool]:
        """Return name -> frozen then, for each parameter with another `requires_grad` now.

        Freezing is the script's own doing. If it unfreezes a layer only at the start of some epoch,
        a later resume trains on with that layer frozen. Older releases did not save it.
        """
        if FROZEN not in saved.values[self.name]:
            return {}
        frozen = set(saved.values[self.name][FROZEN])
        return {
            name: name in frozen
            for name, parameter in self.parameters()
            if parameter.requires_grad == (name in frozen) and name not in saved.left
        }

    def capture_modes(self, out: Captured) -> None:
        """Add `training` of the model, and the modules where it is otherwise."""
        mode = self.module.training
        modules = self._modules(remove_duplicate=True)
        otherwise = [path for path, module in modules if module.training != mode]
        paths = [fsdp.plain_path(path) for path in otherwise]
        out.values[self.name][MODES] = {"training": mode, "otherwise": paths}

    def apply_modes(self, saved: Saved) -> None:
        """Set `training` of each module as saved; older releases did not save it."""
        modes = saved.values[self.name].get(MODES)
        if modes is None:
            return
        otherwise = set(modes["otherwise"])
        for path, module in self._modules(remove_duplicate=True):
            training = modes["training"] != (fsdp.plain_path(path) in otherwise)
            if module.training != training:
                module.training = training

    @torch.no_grad()
    def apply_parameters(self, saved: Saved) -> None:
        """Copy the saved parameters into the live ones."""
        live: dict[str, torch.Tensor] = {}
        for name, parameter in self.parameters():
            live.update(inner_tensors(parameter, name))
        copy(live, saved)

    @torch.no_grad()
    def apply_buffers(self, saved: Saved) -> None:
        """Copy this rank's buffers and extra state back; after DDP has been constructed."""
        owners = self.owners()
        self._make_buffers(owners, saved)
        self._lay_buffers(owners, saved)
        with self.unchanged():
            buffers, with_extra = self._buffers(), self._with_extra()
        for name, buffer in buffers:
            copy(inner_tensors(buffer, name), saved)
        for path, module in with_extra.items():
            module.set_extra_state(saved.decode(saved.values[self.name]["extra"][path]))

    def owners(self) -> dict[str, Owner]:
        """Return full name -> owner of each buffer, also of those still None."""
        return {
            self._full(f"{path}.{key}" if path else key): Owner(module, key)
            for path, module in self._modules(remove_duplicate=True)
            for key in module._buffers
        }

    def _make_buffers(self, owners: Mapping[str, Owner], saved: Saved) -> None:
        """Set those buffers to the saved ones, and empty buffers to None again.

        Empty buffers were None at the first restore; a forward may have made them since.
        """
        for name, owner in _made_by_forward(owners, saved).items():
            buffer = saved.tensor({"$tensor": name}, owner.device(self.module))
            self._put(name, buffer, owners, saved)
        if not saved.is_again:
            empty = {name for name, owner in owners.items() if owner.buffer is None}
            self._empty = empty - self.excluded
        for name in self._empty & owners.keys():
            owners[name].put(None)

    def _lay_buffers(self, owners: Mapping[str, Owner], saved: Saved) -> None:
        """Give each buffer its saved memory order: later results may round by it."""
        orders = saved.values[self.name].get("orders")
        if orders is None:  # an older release did not say
            return
        for name, owner in owners.items():
            live = owner.buffer
            if live is None or name not in saved.tensors or not _is_dense(live):
                continue
            then = orders.get(name, [])
            if memory_order(live) != then:
                order = then or list(range(live.dim()))
                self._put(name, in_memory_order(live.detach(), order), owners, saved)

    def _put(
        self, name: str, buffer: torch.Tensor, owners: Mapping[str, Owner], saved: Saved
    ) -> None:
        """Set a buffer under all its saved names."""
        owners[name].put(buffer)
        for path, first in saved.values[self.name].get("tied buffers", {}).items():
            if self._full(first) == name and self._full(path) in owners:
                owners[self._full(path)].put(buffer)

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return each buffer once, by its full name."""
        return self._once("buffers", lambda: self._full_names(self.module.named_buffers()))

    def _modules(self, *, remove_duplicate: bool) -> list[tuple[str, nn.Module]]:
        return self._once(
            f"modules {remove_duplicate}",
            lambda: list(self.module.named_modules(remove_duplicate=remove_duplicate)),
        )

    def _full_names(self, found: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        return [(self._full(path), value) for path, value in found]

    def _once(self, what: str, find: Callable[[], T]) -> T:
        if (walk := self.current_walk()) is None:
            return find()
        if what not in walk.found:
            walk.found[what] = find()
        found: T = walk.found[what]
        return found

    def _full(self, path: str) -> str:
        return f"{self.name}/{fsdp.plain_path(path)}"

    def _with_extra(self) -> dict[str, nn.Module]:
        """Return the modules with extra state of their own, by path."""
        return {
            fsdp.plain_path(path): module
            for path, module in self._modules(remove_duplicate=True)
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }

    def transient(self) -> list[str]:
        """Return the full names of the buffers outside a `state_dict`."""
        return [self._full(path) for path in self._of_buffers()["transient"]]

    def _of_buffers(self) -> dict[str, Any]:
        """Return the buffers outside a `state_dict` and the tied ones, for exports of the model."""
        return self._once("of buffers", self._find_of_buffers)

    def _find_of_buffers(self) -> dict[str, Any]:
        transient = [
            fsdp.plain_path(f"{path}.{name}" if path else name)
            for path, part in self._modules(remove_duplicate=False)
            for name in part._non_persistent_buffers_set
        ]
        first: dict[int, str] = {}
        tied = {
            fsdp.plain_path(path): fsdp.plain_path(first[id(buffer)])
            for path, buffer in self.module.named_buffers(remove_duplicate=False)
            if first.setdefault(id(buffer), path) != path
        }
        return {"transient": sorted(transient), "tied buffers": tied}

    def tied(self) -> dict[str, str]:
        """Return name in the module -> the first name of the same parameter."""
        return self._once("tied", self._find_tied)

    def _find_tied(self) -> dict[str, str]:
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for path, parameter in fsdp.parameters(self.module, remove_duplicate=False):
            name = first.setdefault(id(parameter), path)
            if name != path:
                tied[fsdp.plain_path(path)] = fsdp.plain_path(name)
        return tied


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the elements lie without gaps, in any order."""
    plain = type(tensor) in dtensor.PLAIN and tensor.layout is torch.strided
    return plain and (tensor.is_contiguous() or bool(memory_order(tensor)))


def keeps_own_state(module: nn.Module) -> bool:
    """Return True if the script's own class overrides its `state_dict`."""
    kind = type(module)
    if kind.__module__.split(".")[0] == "torch" or _KEPT in vars(module):
        return False
    own = ("state_dict", "_save_to_state_dict")
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in own)


def kept_elsewhere(module: nn.Module) -> None:
    """Mark a module: an integration tracks its own state beside the model."""
    object.__setattr__(module, _KEPT, True)


def compare(live: Mapping[str, torch.Tensor], stored: set[str], saved: Saved) -> list[str]:
    """Return the differences of names, shapes and types, one sentence each."""
    of_another = (live.keys() | stored) & saved.elsewhere
    found = [
        f"{name} was another rank's alone: it goes on only on the rank that had it, and on as "
        "many ranks"
        for name in of_another
    ]
    new, gone = live.keys() - stored - of_another, stored - live.keys() - of_another
    found += [f"{name} is new: the snapshot has no such tensor" for name in new]
    found += [f"{name} is gone: only the snapshot has it" for name in gone]
    for name in sorted(live.keys() & stored - of_another):
        mine, theirs = live[name], saved.tensors.get(name)
        if theirs is None or theirs.shape != dtensor.local(mine).shape:
            found.append(
                f"{name} has shape {list(saved.shapes[name])} in the snapshot, "
                f"{list(mine.shape)} now"
            )
        elif mine.dtype != theirs.dtype:
            found.append(f"{name} is {theirs.dtype} in the snapshot, {mine.dtype} now")
    return found


@torch.no_grad()
def copy(live: Mapping[str, torch.Tensor], saved: Saved) -> None:
    """Copy saved tensors into live ones; excluded ones stay unchanged."""
    copies = CopyBatch()
    for name, tensor in live.items():
        if name in saved.left:
            continue
        held = dtensor.local(tensor)
        if _once(held) is held:
            saved.copy(name, held, copies)
        else:
            _once(held).copy_(_once(held, saved.tensors[name]))
    copies.run(saved.num_threads)


def _made_by_forward(owners: Mapping[str, Owner], saved: Saved) -> dict[str, Owner]:
    """Return the owners of restored buffers that are None now or of another shape."""
    return {
        name: owner
        for name, owner in owners.items()
        if name in saved.tensors and owner.differs(saved.tensors[name])
    }


def _once(expanded: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return `tensor` without the rows which `expanded` repeats by a stride of 0."""
    tensor = expanded if tensor is None else tensor
    for d in range(expanded.dim()):
        if expanded.stride(d) == 0 and expanded.shape[d] > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor

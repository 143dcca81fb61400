"""Captured: one rank's state at a boundary, by name. Saved: the state read back from a snapshot.

Capturing copies nothing: the tensors are the live ones, to be staged before training goes on.
Names are paths of the state (`model/blocks.0.weight`, `optimizer/model/blocks.0.weight/exp_avg`,
`gradients/model/blocks.0.weight`, `rng/torch`). The first part names the part of the state in
reports of a difference between two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import UnusableSnapshot
from trainckpt.format import json_io
from trainckpt.format.layout import replicated
from trainckpt.state import dtensor, tensor_subclasses, values
from trainckpt.state.device_copy import can_upload, upload
from trainckpt.state.parallel_copy import as_copied
from trainckpt.state.values import UnknownValue
from trainckpt.state.zero_copy import FROM_BYTES, Proofs, has_memory
from trainckpt.storage.direct_io import at_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.layout import Box, Layout
    from trainckpt.state.capture_cache import TensorBlock
    from trainckpt.state.parallel_copy import CopyBatch
    from trainckpt.state.zero_copy import AdoptedTensors


_LAZY = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
_CONVERTED = frozenset(("sparse", "order", "subclass"))  # in the node of a tensor
VALUES = "values.json"  # the tensor (bytes) of all values of a rank


@dataclass(frozen=True)
class Placed:
    """The position of this rank's part in the whole of a sharded tensor."""

    layout: Layout
    shape: tuple[int, ...]
    box: Box


@dataclass
class Captured:
    """State of one rank, by name.

    Attributes:
        tensors: Live, dense tensors, on any device: this rank's part of sharded ones.
        groups: Tensor name -> group. Ranks with equal bytes in the whole group store one copy,
            split over them; a tensor without a group is this rank's own.
        placed: Name of a sharded tensor -> its position. A sharded tensor without an entry has no
            regular layout.
        apart: Group of tensors present only at some boundaries -> its number, from 1.
        values: Part of the state -> encoded values.
        spelled: (part, key) -> canonical JSON of `values[part][key]`, where it is known.
        blocks: Tensors captured as in an earlier capture, or kept for the next one.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    apart: dict[str, int] = field(default_factory=dict)
    placed: dict[str, Placed] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    spelled: dict[tuple[str, str], bytes] = field(default_factory=dict)
    blocks: list[TensorBlock] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor, group: str = "") -> dict[str, Any]:
        """Add a tensor, and return its JSON node.

        Raises:
            values.UnknownValue: The tensor is of a kind not supported; by name.
        """
        if type(tensor) not in dtensor.PLAIN:
            if dtensor.is_sharded(tensor):
                return self._add_sharded(name, tensor, group)
            if (flat := tensor_subclasses.flatten(tensor)) is not None:
                return self._add_subclass(name, tensor, flat, group)
        if tensor.layout is torch.sparse_coo and type(tensor) is torch.Tensor:
            indices = self.add(f"{name}/indices", tensor._indices(), group)
            values_ = self.add(f"{name}/values", tensor._values(), group)
            shape = [list(tensor.shape), tensor.is_coalesced()]
            parts = [indices["$tensor"], values_["$tensor"]]
            device = tensor.device.type
            return {"$tensor": name, "device": device, "sparse": shape, "parts": parts}
        while name in self.tensors:  # paths of the state can meet: {"a.b": x, "a": {"b": y}}
            name += "'"
        self.tensors[name] = dense(tensor, name).resolve_conj().resolve_neg()
        if group:
            self.groups[name] = group
        node = {"$tensor": name, "device": "cpu" if tensor.is_cpu else tensor.device.type}
        order = memory_order(tensor)
        return {**node, "order": order} if order else node

    def layouts(self, world: int) -> dict[str, Layout]:
        """Return tensor -> layout, for tensors in a group: their replicas may be equal.

        Equal replicas are divided layout by layout. Tensors present only at some boundaries get a
        layout of their own. So a window's gradients do not move the cuts through the parameters,
        and the parameters' parts still match those in an older file.
        """
        plain = replicated(world)
        if not self.placed and plain.num_replicas == 1:
            return dict.fromkeys(self.groups, plain)
        met: dict[tuple[Layout, int], Layout] = {}
        layouts: dict[str, Layout] = {}
        for name, group in self.groups.items():
            layout = self.placed[name].layout if name in self.placed else plain
            key = layout, self.apart.get(group, 0)
            if key not in met:
                met[key] = layout.respelled(key[1]) if layout.num_replicas > 1 else layout
            layouts[name] = met[key]
        return layouts

    def _add_subclass(
        self, name: str, tensor: torch.Tensor, flat: tensor_subclasses.Flat, group: str
    ) -> dict[str, Any]:
        kind = type(tensor)
        if not hasattr(kind, tensor_subclasses.UNFLATTEN):
            raise values.UnknownValue(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that cannot "
                "be put together again",
                hint=f"give the class {tensor_subclasses.UNFLATTEN}",
            )
        for attribute, part in flat.inner.items():
            if dtensor.is_sharded(part):
                raise values.UnknownValue(f"{name}#{attribute} is a DTensor inside another tensor")
        inner = {key: self.add(f"{name}#{key}", each, group) for key, each in flat.inner.items()}
        return {
            "$tensor": name,
            "subclass": tensor_subclasses.name_of(kind),
            "inner": inner,
            "parts": [
                part for node in inner.values() for part in node.get("parts", [node["$tensor"]])
            ],
            "context": values.encode(
                flat.context, f"{name}#context", tensor_subclasses.refuse_tensor
            ),
            "size": values.encode(
                list(tensor.shape), f"{name}#size", tensor_subclasses.refuse_tensor
            ),
            "stride": values.encode(
                list(tensor.stride()), f"{name}#stride", tensor_subclasses.refuse_tensor
            ),
        }

    def _add_sharded(self, name: str, tensor: torch.Tensor, group: str) -> dict[str, Any]:
        if tensor_subclasses.flatten(dtensor.local(tensor)) is not None:
            raise values.UnknownValue(
                f"{name} is a DTensor whose local part is a tensor subclass, which cannot be stored"
            )
        layout = dtensor.layout_of(tensor)
        node = self.add(name, dtensor.local(tensor), group if layout else "")
        if layout is not None:
            shape, rank = tuple(tensor.shape), torch.distributed.get_rank()
            box = layout.box(shape, layout.coordinate(rank))
            self.placed[node["$tensor"]] = Placed(layout, shape, box)
        return {**node, "sharded": dtensor.describe(tensor)}

    def encode(self, value: Any, path: str, group: str = "") -> Any:
        """Encode any value under `path`; its tensors are added to this capture."""
        return values.encode(value, path, lambda name, tensor: self.add(name, tensor, group))


@dataclass
class Saved:
    """State of one rank as read from a snapshot: CPU tensors, all verified, and values.

    Attributes:
        tensors: This rank's part of tensors sharded now; others whole.
        values: The donor's captured values.
        shapes: Tensor name -> shape of the whole, of every tensor of the snapshot.
        wraps: Tensor name -> function from this rank's part to the sharded tensor.
        exact: Every tensor has its saved layout, so the open window can go on; else it begins anew.
        is_own: This very rank saved the values, for the same position in the data.
        worlds: Number of ranks of the snapshot, and now.
        elsewhere: Names missing on this rank's donor, but present on other ranks.
        left: Excluded live tensors; they stay as the script made them.
        proofs: Proofs of tensors read to their final memory.
        given: Those of `tensors` adopted as live; None: each is copied.
        is_again: The state was applied before, so most of it is in place.
        num_threads: Number of threads for copies.
    """

    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    wraps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    exact: bool = True
    is_own: bool = True
    worlds: tuple[int, int] = (1, 1)
    elsewhere: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    proofs: Proofs = field(default_factory=Proofs)
    given: AdoptedTensors | None = None
    is_again: bool = False
    num_threads: int = 1

    def without_state(self) -> Saved:
        """Return a copy without tensors and values, for use after it was applied."""
        return replace(
            self, tensors={}, values={}, shapes={}, wraps={}, proofs=Proofs(), given=None
        )

    def copy(self, name: str, live: torch.Tensor, copies: CopyBatch) -> None:
        """Copy the saved tensor of this name into a live one of the same shape, by `copies`."""
        found = self.tensors[name]
        is_large = found.nbytes >= FROM_BYTES
        copies.add(live, found, self.proofs.of(found) if self.is_again and is_large else None)

    def decode(self, tree: Any, device: torch.device | None = None) -> Any:
        """Decode a tree; tensors not on the CPU then go to `device`. Tensors are fresh copies."""
        return values.decode(tree, lambda node: self.tensor(node, device))

    def tensor(self, node: Any, device: torch.device | None = None) -> torch.Tensor:
        """Return the tensor of a `{"$tensor": ...}` node, as a fresh copy."""
        target = device if device is not None and node.get("device") != "cpu" else None
        if "subclass" in node:
            inner = {key: self.tensor(each, device) for key, each in node["inner"].items()}
            context = values.decode(node["context"], values.no_tensor)
            return tensor_subclasses.rebuild(
                node["subclass"], inner, context, node["size"], node["stride"]
            )
        if "sparse" in node:
            shape, coalesced = node["sparse"]
            parts = [self._fresh(name, target) for name in node["parts"]]
            return torch.sparse_coo_tensor(
                parts[0],
                parts[1],
                tuple(shape),
                device=parts[1].device,
                is_coalesced=coalesced,
                check_invariants=True,
            )
        fresh = self._fresh(node["$tensor"], target)
        fresh = in_memory_order(fresh, node["order"]) if "order" in node else fresh
        wrap = self.wraps.get(node["$tensor"])
        return fresh if wrap is None else wrap(fresh)

    def make(
        self, tree: Any, device: torch.device, copies: CopyBatch, *, gives: bool = True
    ) -> Any:
        """Decode a tree. A lone tensor is adopted, or completed by `copies`.

        `gives`: allow adoption. Torch cannot resize adopted memory.
        """
        name = self._plain(tree)
        if name is None:
            return self.decode(tree, device)
        found = self.tensors[name]
        target = device if tree.get("device") != "cpu" else found.device
        if target.type != "cpu":
            fresh = torch.empty_like(found, device=target)
        elif gives and self.given is not None and self.given.give(name):
            return found
        else:
            fresh = torch.empty_like(found)
        copies.add(fresh, found)
        return fresh

    def put_again(self, tree: Any, live: torch.Tensor, copies: CopyBatch) -> bool:
        """Reset the result of `make` for this tree to its saved value; False if impossible.

        Adopted tensors were mended before.
        """
        name = self._plain(tree)
        if name is None:
            return False
        found = self.tensors[name]
        if self.given is not None and name in self.given:
            return found is live
        if (live.dtype, live.shape, live.stride()) != (found.dtype, found.shape, found.stride()):
            return False
        if live.is_cpu and not has_memory(live):
            return False
        self.copy(name, live, copies)
        return True

    def _plain(self, tree: Any) -> str | None:
        """Return the tensor's name if a tree is a tensor in no need of conversion."""
        name = tree.get("$tensor") if isinstance(tree, dict) else None
        if (
            not isinstance(name, str)
            or name in self.wraps
            or not _CONVERTED.isdisjoint(tree)
            or (found := self.tensors.get(name)) is None
        ):
            return None
        return name if found.is_contiguous() else None

    def _fresh(self, name: str, device: torch.device | None) -> torch.Tensor:
        if name not in self.tensors:
            raise UnusableSnapshot(f"the tensor {name} is missing from the snapshot")
        found = self.tensors[name]
        plain = as_copied(found)
        if device is None:
            fresh = plain.clone()
        else:
            fresh = torch.empty_like(plain, device=device)
            if can_upload(fresh, plain):
                upload([(fresh, plain)])
            else:
                fresh.copy_(plain)
        return fresh if plain is found else fresh.view(found.dtype)


def dense(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return `tensor`, detached, if it consists of plain bytes; else raise `UnknownValue`.

    The result shares its memory, as a restore needs, even if conjugated or negated.
    """
    if type(tensor) not in dtensor.PLAIN:
        if isinstance(tensor, _LAZY):
            raise values.UnknownValue(
                f"{name} is a lazy parameter without a shape",
                hint="run one forward pass before the Checkpointer is made",
            )
        raise values.UnknownValue(
            f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor subclass "
            "that does not show its inner tensors",
            hint="give the class __tensor_flatten__ and __tensor_unflatten__, or keep the tensor "
            "out of what is tracked",
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else tensor.layout
        raise values.UnknownValue(f"{name} is a {kind} tensor, which cannot be captured")
    if tensor.data_ptr() == 0 and tensor.numel():
        raise values.UnknownValue(
            f"{name} has no memory: its storage was released",
            hint="keep the tensor out of what is tracked, or fill it before a save",
        )
    return tensor.detach()


def memory_order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions from slowest to fastest in memory; [] for row-major, gaps or overlaps.

    Fused optimizers walk parameter, gradient and moments in memory order: in a channels_last model
    a row-major moment would be paired with other elements.
    """
    if tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    stride = 1
    for d in reversed(order):
        if tensor.shape[d] != 1 and tensor.stride(d) != stride:
            return []  # with gaps or overlaps
        stride *= tensor.shape[d]
    return order


def in_memory_order(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return the same elements in the order given by `memory_order`."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def inner_tensors(tensor: torch.Tensor, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors inside `tensor`: itself, sharded or not, or those of a subclass."""
    if dtensor.is_sharded(tensor):
        return {name: tensor.detach()}
    flat = tensor_subclasses.flatten(tensor)
    if flat is None:
        return {name: dense(tensor, name)}
    found: dict[str, torch.Tensor] = {}
    for attribute, inner in flat.inner.items():
        found.update(inner_tensors(inner, f"{name}#{attribute}"))
    return found


# ---- the values of a rank, stored as one tensor of JSON bytes
#
# Used by staging, and by every reader of a snapshot.


MAX_VALUES_BYTES = 1 << 30
VALUES_STEP_BYTES = 1024  # values are padded, so that the layout seldom differs from save to save


def add_values(captured: Captured) -> None:
    """Add all values as one more tensor.

    Raises:
        UnknownValue: They exceed the limit of a resume.
    """
    text = spell(captured)
    text += b" " * (-len(text) % VALUES_STEP_BYTES)
    if len(text) > MAX_VALUES_BYTES:
        sizes = {part: len(json_io.canonical(tree)) for part, tree in captured.values.items()}
        most = max(sizes, key=sizes.__getitem__)
        raise UnknownValue(
            f"what is no tensor takes {len(text)} bytes, of which {most} takes {sizes[most]}; a "
            f"resume reads at most {MAX_VALUES_BYTES}",
            hint=f"let {most} keep it in tensors or NumPy arrays",
        )
    captured.tensors[VALUES] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def spell(captured: Captured) -> bytes:
    """Return the canonical JSON of all values; known texts are not made anew."""
    with_texts = {part for part, _ in captured.spelled}
    texts = {}
    for part, tree in captured.values.items():
        if part in with_texts:
            keys = {
                k: captured.spelled.get((part, k)) or json_io.canonical(v) for k, v in tree.items()
            }
            text = json_io.canonical_object(keys)
        else:
            text = json_io.canonical(tree)
        texts[part] = text
    return json_io.canonical_object(texts)


def parse_values(raw: torch.Tensor) -> dict[str, Any]:
    """Return the values of one rank from their stored bytes.

    Raises:
        UnusableSnapshot: The bytes are not valid.
    """
    plain = raw.contiguous()
    data = at_address(plain.data_ptr(), plain.nbytes, plain) if plain.nbytes else memoryview(b"")
    parsed = json_io.parse(data, "the values", max_bytes=MAX_VALUES_BYTES)
    if not isinstance(parsed, dict):
        raise UnusableSnapshot("the values are not an object")
    return parsed

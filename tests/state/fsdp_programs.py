"""Programs of real ranks: FSDP2 over gloo, stopped inside a window and gone on with elsewhere."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # FSDP2 does at its first use: a second that no rank needs to spend anew
from torch import distributed, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from trainckpt.state.adapters import fsdp
from trainckpt.state.captured import Captured, Saved

WINDOW, STOP, END = 3, 1, 4  # micro-batches: one of the window's three is done; one follows it
WIDTH, CLASSES = 12, 5  # 5 rows are spread unevenly over any number of ranks


@dataclass(frozen=True)
class Case:
    """One way of training.

    Attributes:
        name: What it is called.
        mixed: Compute in bfloat16, reduce in float32.
        reshard: After each forward.
        accumulate: What is left out until the window's last backward: "sync", "all-reduce",
            "nothing"; with "once" it is only said where it changes.
        layout: Over the ranks: "shard", "replicate", "hybrid", "tensor".
        gathered: Stay gathered over the window, and evaluate inside it.
        wrapped: With activation checkpointing, and modules that are sharded together.
    """

    name: str
    mixed: bool = True
    reshard: bool = True
    accumulate: str = "sync"
    layout: str = "shard"
    gathered: bool = False
    wrapped: bool = False


def _usual(mixed, reshard, accumulate):
    words = ("mixed" if mixed else "plain", "reshard" if reshard else "keep", f"no {accumulate}")
    return Case(", ".join(words), mixed, reshard, accumulate)


USUAL = tuple(
    _usual(*of) for of in itertools.product((True, False), (True, False), ("sync", "nothing"))
)
CASES = {
    2: (
        *USUAL,
        Case("said once", mixed=False, accumulate="sync once"),
        Case("replicated", layout="replicate"),
        Case("replicated, no all-reduce", layout="replicate", accumulate="all-reduce"),
        Case("gathered", gathered=True),
        Case("wrapped", wrapped=True, reshard=False),
    ),
    3: USUAL,
    4: (
        Case("hybrid", layout="hybrid"),
        Case("hybrid, no all-reduce", layout="hybrid", accumulate="all-reduce"),
        Case("hybrid, said once", mixed=False, layout="hybrid", accumulate="all-reduce once"),
        Case("tensor", layout="tensor"),
        Case("tensor, plain", mixed=False, layout="tensor", reshard=False),
    ),
}
# What a resume can do without only if it is not needed: world -> case -> what is left out of it.
LEFT_OUT = {
    2: {
        "mixed, reshard, no sync": ("all", "accumulated"),
        "plain, reshard, no sync": ("unsharded", "flags"),
        "said once": ("flags",),
    },
    3: {},
    4: {"hybrid, no all-reduce": ("all", "partial"), "tensor": ("accumulated",)},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.words.weight
        self.head = nn.Linear(WIDTH, CLASSES)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.tied(x))


@functools.cache
def mixed_type():
    """Another type than float32 that gloo carries: Debian's was built without the half ones."""
    one = torch.zeros(1, dtype=torch.bfloat16)
    try:
        distributed.all_reduce(one)
    except RuntimeError:
        return torch.float64
    return torch.bfloat16


def build(case, meshes):
    """The model of a case, as a script makes it, and its optimizer."""
    torch.manual_seed(0)
    net, mesh = Net(), meshes.get(case.layout)
    if case.layout == "tensor":
        for block in net.blocks:
            whole, cut = Replicate(), Shard(1)
            plan = {
                "": PrepareModuleInputOutput(
                    input_layouts=whole,
                    desired_input_layouts=cut,
                    use_local_input=True,
                    output_layouts=cut,
                    desired_output_layouts=whole,
                ),
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=cut),
                "down": RowwiseParallel(output_layouts=cut),
            }
            parallelize_module(block, mesh["tensor"], plan)
        mesh = mesh["shard"]
    mixed = MixedPrecisionPolicy(mixed_type(), torch.float32)
    options = {"mesh": mesh, "mp_policy": mixed if case.mixed else MixedPrecisionPolicy()}
    if case.wrapped:
        apply_activation_checkpointing(net, check_fn=lambda part: isinstance(part, Block))
    if case.layout != "replicate":
        options["reshard_after_forward"] = case.reshard
    spread = replicate if case.layout == "replicate" else fully_shard
    for part in [list(net.blocks)] if case.wrapped else net.blocks:
        spread(part, **options)
    spread(net, **options)
    return net, torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1)


def make_meshes(world):
    """Meshes by layout; the usual one is torch's default."""
    if world < 4:
        return {}
    return {
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard")),
        "tensor": init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor")),
    }


def tell(case, net, at):
    """What the script says before micro-batch `at`."""
    last = (at + 1) % WINDOW == 0
    what, once = case.accumulate.removesuffix(" once"), case.accumulate.endswith(" once")
    if once and not last and at % WINDOW:
        return
    net.set_is_last_backward(last)
    if what == "sync":
        net.set_requires_gradient_sync(last)
    elif what == "all-reduce":
        net.set_requires_all_reduce(last)
    if case.gathered:
        net.set_reshard_after_backward(last)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"-" if tensor is None else local(tensor.detach()).numpy().tobytes())
    return found.hexdigest()


def train(case, net, optimizer, rank, first, end):
    """Micro-batches `first` to `end`: losses, and digests of gradients and parameters at steps."""
    seen = {}
    for at in range(first, end):
        draw = torch.Generator().manual_seed(100 * at + (0 if case.layout == "tensor" else rank))
        x = torch.randn(4, 2, WIDTH, generator=draw)
        if case.gathered:
            with torch.no_grad():
                net(x)
        tell(case, net, at)
        loss = net(x).float().square().mean()
        loss.backward()
        seen[f"loss {at}"] = loss.item().hex()
        if (at + 1) % WINDOW == 0:
            seen[f"gradients {at}"] = digest(p.grad for p in net.parameters())
            optimizer.step()
            optimizer.zero_grad()
            seen[f"parameters {at}"] = digest(net.parameters())
    return seen


def save(net, file):
    """The whole state inside a window, `fsdp`'s part by its own words, in one file."""
    out = Captured()
    fsdp.rest(net)
    tree = json.dumps(fsdp.capture(net, "model", out))
    assert not out.groups
    parts = {
        fsdp.plain_path(path): (local(p.detach()), None if p.grad is None else local(p.grad))
        for path, p in net.named_parameters()
    }
    torch.save((tree, dict(out.tensors), parts), file)
    kinds = {f"{name.split('#')[1]} {t.dtype}" for name, t in out.tensors.items()}
    placements = set(re.findall(r'\["(partial|shard|replicate)"', tree))
    num_bytes = sum(t.nbytes for t in out.tensors.values())
    return {
        "kinds": sorted(kinds),
        "placements": sorted(placements),
        "bytes": num_bytes,
        "gradient_bytes": fsdp.gradient_bytes(net),
    }


def load(net, file, leave_out=""):
    """What `save` wrote, into a fresh model."""
    tree, tensors, parts = torch.load(file, weights_only=True)
    tree = json.loads(tree)
    assert fsdp.differences(net, "model", tree) == []
    for path, p in fsdp.parameters(net):
        value, gradient = parts[fsdp.plain_path(path)]
        with torch.no_grad():
            local(p).copy_(value)
        if gradient is not None:
            p.grad = DTensor.from_local(
                gradient, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
    if leave_out != "all":
        fsdp.apply(net, without(tree, leave_out), Saved(tensors, {}))


def without(tree, leave_out):
    """The same tree without one kind of gradients, or with the flags of a fresh model."""
    for unit in tree.values():
        for group in unit["groups"]:
            for gradients in group["gradients"].values():
                gradients.pop(leave_out, None)
            if leave_out == "partial":
                group["partial"] = None
            if leave_out == "flags":
                group["flags"] = dict.fromkeys(group["flags"], True)
    return tree


def start(rank, world, folder):
    """Every case, uninterrupted, and with a capture on the way; and what else one can ask."""
    torch.set_num_threads(1)
    meshes, found = make_meshes(world), {}
    for i, case in enumerate(CASES[world]):
        full = train(case, *build(case, meshes), rank, 0, END)
        net, optimizer = build(case, meshes)
        seen = train(case, net, optimizer, rank, 0, STOP)
        facts = save(net, Path(folder) / f"{i}.{rank}")
        seen |= train(case, net, optimizer, rank, STOP, END)
        found[case.name] = (full, seen, facts)
    return found, walks(rank) if world == 2 else None


def go_on(rank, world, folder):
    """Every case from its capture on; and again with parts of it left out."""
    torch.set_num_threads(1)
    meshes, found = make_meshes(world), {}
    for i, case in enumerate(CASES[world]):
        for leave_out in ("", *LEFT_OUT[world].get(case.name, ())):
            net, optimizer = build(case, meshes)
            load(net, Path(folder) / f"{i}.{rank}", leave_out)
            found[case.name, leave_out] = train(case, net, optimizer, rank, STOP, END)
    return found


def walks(rank):
    """Names and sameness of parameters while the model trains, seen from another thread."""
    case = Case("walked", reshard=False, gathered=True, wrapped=True)
    net, optimizer = build(case, {})
    known = [(path, id(p)) for path, p in net.named_parameters()]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    odd, sizes, done = [], set(), threading.Event()

    def look():
        while not done.is_set():
            walk = [(path, id(p)) for path, p in fsdp.parameters(net)]
            sizes.add(fsdp.gradient_bytes(net)[1])
            if walk != known:
                odd.append(walk)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        train(case, net, optimizer, rank, 0, 2)
    finally:
        done.set()
        thread.join()
    registered = [id(p) for p in net.parameters()]
    ties = [path for path, _ in fsdp.parameters(net, remove_duplicate=False)]
    after = [id(p) for _, p in fsdp.parameters(net)]
    fsdp.rest(net)
    return {
        "odd walks": len(odd),
        "sizes": sizes,
        "gathered": registered != held,
        "sharded": after == held == [id(p) for p in net.parameters()],
        "paths": [fsdp.plain_path(path) for path, _ in known],
        "ties": ties.count("tied.weight"),
    }

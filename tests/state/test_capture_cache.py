"""A save that reuses what the one before found out writes the same file as one that does not."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainckpt.save.deduplication import SavePlanCache
from trainckpt.state import staging
from trainckpt.state.capture import capture
from trainckpt.state.capture_cache import ModuleWalk, TensorBlock, own_parts
from trainckpt.state.captured import Captured
from trainckpt.state.dtensor import mesh_key, position_facts
from trainckpt.state.registry import Registry


class Part(nn.Module):
    """Two parameters and two buffers, of one shape."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("seen", torch.randn(4, 4))
        self.register_buffer("mask", torch.randn(4, 4), persistent=False)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


class Training:
    """A model whose parameters have state, but for those of the last part."""

    def __init__(self, *, sharded=False):
        torch.manual_seed(0)
        self.model = nn.ModuleDict({name: Part() for name in ("x", "y", "z")})
        self.x, self.y, self.z = self.model.values()
        if sharded:
            fully_shard(self.x)
        self.optimizer = torch.optim.AdamW([*self.x.parameters(), *self.y.parameters()])
        self.step(self.x, self.y)

    def step(self, *parts):
        for part in parts:
            part.a.grad, part.b.grad = torch.ones_like(part.a), part.b.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self, parameter):
        return self.optimizer.state[parameter]


class Saves:
    """The saves of one attempt, up to the file that is written."""

    def __init__(self, training):
        self.registry = Registry()
        self.registry.add("model", training.model)
        self.registry.add("optimizer", training.optimizer)
        self.registry.watched  # noqa: B018 - begins to watch
        self.plans, self.cache = SavePlanCache(self.registry, 0, 1), staging.StagingCache()

    def file(self):
        with self.registry.unchanged():
            captured = capture(self.registry)
            plan = self.plans.plan(captured, [])
            shard = staging.stage(captured, plan.regions, rank=0, world=1, cache=self.cache)
        return b"".join(shard.blocks())


def replace_module(t):
    t.model["y"] = Part()


def rename(t):
    t.y.c, t.y.a = t.y.a, None


def move(t):
    t.x.register_parameter("b", None)
    t.y.register_parameter("a", None)
    t.x.register_parameter("b", t.z.a)
    t.z.register_parameter("a", None)


def enlarge(t):
    t.x.a.data = torch.randn(8, 4)


def tie(t):
    t.y.a = t.x.a


def untie(t):
    t.y.b = nn.Parameter(t.y.b.detach().clone())


def add_parameter(t):
    t.z.extra = nn.Parameter(torch.randn(3))


def replace_state(t):
    t.state(t.x.a)["exp_avg"] = torch.randn(4, 4)


def swap_states(t):
    one, two = t.state(t.x.a), t.state(t.x.b)
    one["exp_avg"], two["exp_avg"] = two["exp_avg"], one["exp_avg"]


def share_state(t):
    t.state(t.x.a)["exp_avg"] = t.state(t.x.b)["exp_avg"]


def add_key(t):
    t.state(t.x.a)["more"] = torch.randn(2)


def sparse(t):
    t.state(t.x.a)["exp_avg"] = torch.eye(4).to_sparse()


def number(t):
    t.state(t.x.a)["step"] = 7


def rename_key(t):
    items = t.state(t.x.b)
    items["mean"] = items.pop("exp_avg")


def late_state(t):
    t.optimizer.add_param_group({"params": list(t.z.parameters())})
    t.step(t.x, t.y, t.z)


def parametrized(t):
    parametrize.register_parametrization(t.x, "a", Double())


CHANGES = {
    "a parameter is added": add_parameter,
    "a parameter is removed": lambda t: setattr(t.z, "a", None),
    "a parameter is replaced": lambda t: setattr(t.z, "a", nn.Parameter(torch.randn(4, 4))),
    "a parameter has other data": lambda t: setattr(t.x.a, "data", torch.randn(4, 4)),
    "a parameter is resized": enlarge,
    "a parameter lies in another order": lambda t: setattr(t.x.a, "data", t.x.a.data.t()),
    "a parameter is frozen": lambda t: t.x.a.requires_grad_(False),
    "a parameter is renamed": rename,
    "a parameter is moved": move,
    "a parameter is parametrized": parametrized,
    "parameters are tied": tie,
    "the type is another": lambda t: t.model.to(torch.bfloat16),
    "a module is replaced": replace_module,
    "a module is added": lambda t: t.model.update({"w": Part()}),
    "a buffer is added": lambda t: t.x.register_buffer("new", torch.randn(2)),
    "a buffer is replaced": lambda t: setattr(t.x, "seen", torch.randn(4, 4)),
    "a buffer is none": lambda t: setattr(t.x, "seen", None),
    "a buffer is not persistent": lambda t: t.x.register_buffer("seen", t.x.seen, persistent=False),
    "buffers are tied": lambda t: setattr(t.y, "seen", t.x.seen),
    "a state tensor is replaced": replace_state,
    "state tensors are swapped": swap_states,
    "a state tensor is shared": share_state,
    "a state tensor is resized": lambda t: t.state(t.x.a)["exp_avg"].resize_(2, 8),
    "a state tensor has another type": lambda t: t.state(t.x.a).update(step=torch.tensor(3)),
    "a state tensor is a number": number,
    "a state tensor is sparse": sparse,
    "a state key is added": add_key,
    "a state key is renamed": rename_key,
    "a state is gone": lambda t: t.optimizer.state.pop(t.y.a),
    "a group is added, and state made late": late_state,
}
IN_PLACE = {
    "values": lambda t: t.step(t.x, t.y),
    "a buffer": lambda t: t.x.seen.add_(1),
    "an option": lambda t: t.optimizer.param_groups[0].update(lr=0.5),
    "nothing": lambda _: None,
    "an untied one": untie,
}


def place(t, placement, *, names=None):
    """Let the first moment of `x.a` keep its memory, and lie over its mesh in this way."""
    moment = t.state(t.x.a)["exp_avg"]
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=names) if names else moment.device_mesh
    t.state(t.x.a)["exp_avg"] = DTensor.from_local(moment.to_local(), mesh, [placement])


def unshard_state(t):
    t.state(t.x.a)["exp_avg"] = t.state(t.x.a)["exp_avg"].to_local()


def reallocate(t):
    moment = t.state(t.x.a)["exp_avg"]
    fresh = torch.randn(moment.to_local().shape)
    t.state(t.x.a)["exp_avg"] = DTensor.from_local(fresh, moment.device_mesh, moment.placements)


SHARDED = {
    "a moment is replicated": lambda t: place(t, Replicate()),
    "a moment is cut along another dimension": lambda t: place(t, Shard(1)),
    "a moment lies on another mesh": lambda t: place(t, Shard(0), names=("others",)),
    "a moment is not sharded": unshard_state,
    "a moment has other memory": reallocate,
    "a parameter is frozen": lambda t: t.x.a.requires_grad_(False),
}


@pytest.fixture
def one_rank():
    """A group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_placements_that_torch_calls_equal_are_told_apart(monkeypatch):
    """In torch 2.6 a strided placement equals a plain one along the same dimension."""
    monkeypatch.setattr(_StridedShard, "__eq__", lambda self, other: self.dim == other.dim)
    training = Training(sharded=True)
    moment = training.state(training.x.a)["exp_avg"]
    whole, mesh = moment.to_local(), moment.device_mesh
    facts = [
        position_facts(DTensor.from_local(whole, mesh, [placement], run_check=False))
        for placement in (Shard(0), _StridedShard(0, split_factor=2))
    ]
    assert facts[0] != facts[1]


def test_the_ranks_of_a_part_of_a_mesh_are_those_of_the_rank_that_asks():
    for rank, ranks in ((0, [0, 1]), (3, [2, 3])):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh_key(mesh["tp"]) == f"tp [2] {ranks}"
        distributed.destroy_process_group()


@pytest.mark.parametrize("case", [*CHANGES, *IN_PLACE])
def test_a_save_after_a_change_is_the_same_file_as_a_first_one(case):
    training = Training()
    saves, first, another = (Saves(training) for _ in range(3))
    saves.file()
    saves.file()
    {**CHANGES, **IN_PLACE}[case](training)
    assert saves.file() == first.file()
    training.model["z"].seen.add_(1)
    assert saves.file() == another.file()


@pytest.mark.parametrize("case", [*SHARDED, *IN_PLACE])
@pytest.mark.usefixtures("one_rank")
def test_a_save_after_a_change_of_sharded_tensors_is_the_same_file_as_a_first_one(case):
    training = Training(sharded=True)
    saves, first, another = (Saves(training) for _ in range(3))
    saves.file()
    saves.file()
    {**SHARDED, **IN_PLACE}[case](training)
    assert saves.file() == first.file()
    training.model["z"].seen.add_(1)
    assert saves.file() == another.file()


@pytest.mark.parametrize("case", CHANGES)
def test_without_the_proof_of_sameness_it_would_be_another_file(case, monkeypatch):
    _is_another_file_without_proof(Training(), CHANGES[case], monkeypatch)


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.usefixtures("one_rank")
def test_without_the_proof_it_would_be_another_file_of_sharded_tensors(case, monkeypatch):
    _is_another_file_without_proof(Training(sharded=True), SHARDED[case], monkeypatch)


def _is_another_file_without_proof(training, change, monkeypatch):
    saves, first = Saves(training), Saves(training)
    saves.file()
    saves.file()
    change(training)
    right = first.file()
    monkeypatch.setattr(ModuleWalk, "is_current", lambda _: True)
    monkeypatch.setattr(TensorBlock, "same_parts", lambda _, __, sources: own_parts(sources))
    try:
        assert saves.file() != right
    except (ValueError, AttributeError, TypeError, RuntimeError, KeyError):
        pass  # lists of other lengths do not fit together at all


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.usefixtures("one_rank")
def test_a_second_save_makes_no_names_anew(sharded, monkeypatch):
    saves = Saves(Training(sharded=sharded))
    saves.file()
    captured, walked = [], []
    add, named_parameters = Captured.add, nn.Module.named_parameters

    def adds(self, name, *rest):
        captured.append(name)
        return add(self, name, *rest)

    def walks(self, *args, **options):
        walked.append(self)
        return named_parameters(self, *args, **options)

    monkeypatch.setattr(Captured, "add", adds)
    monkeypatch.setattr(nn.Module, "named_parameters", walks)
    saves.file()
    assert captured == ["rng/torch"]
    assert sharded or not walked  # the modules of FSDP2 hold other parameters while gathered


def test_a_model_that_names_its_parameters_in_its_own_way_is_walked_each_time():
    class Own(Part):
        hidden = False

        def named_parameters(self, *args, **more):
            found = super().named_parameters(*args, **more)
            return ((n, p) for n, p in found if not (self.hidden and n == "b"))

    training = Training()
    training.model = Own()
    training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1)
    saves, first = Saves(training), Saves(training)
    saves.file()
    training.model.hidden = True
    assert saves.file() == first.file()


def test_a_scripted_model_is_walked_each_time():
    training = Training()
    training.model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    training.optimizer = torch.optim.SGD(training.model.parameters(), 0.1, momentum=0.9)
    saves, first = Saves(training), Saves(training)
    saves.file()
    training.model(torch.randn(3, 4)).sum().backward()
    training.optimizer.step()
    assert saves.file() == first.file()

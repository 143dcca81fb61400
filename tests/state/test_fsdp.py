"""FSDP2's open window: in fresh processes training goes on to the same bits, on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from tests.ranks.processes import preload, run_ranks
from tests.state import fsdp_programs as programs
from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.state.adapters import fsdp
from trainckpt.state.captured import Captured, Saved
from trainckpt.state.values import UnknownValue

# Importing FSDP2 takes a second, which no rank needs to spend anew.
preload("tests.state.fsdp_programs")
EVERY = [(world, case.name) for world, cases in programs.CASES.items() for case in cases]
LAST = f"parameters {programs.WINDOW - 1}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World -> what its ranks saw, in one set of processes and in the next."""
    done = {}

    def of(world):
        if world not in done:
            folder = str(tmp_path_factory.mktemp(f"world{world}"))
            first = run_ranks(programs.start, world, world, folder)
            done[world] = first, run_ranks(programs.go_on, world, world, folder)
        return done[world]

    return of


@pytest.fixture
def alone():
    """A group of one rank."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("world", "case"), EVERY)
def test_fresh_processes_go_on_to_the_same_bits(runs, world, case):
    first, second = runs(world)
    for (started, _), resumed in zip(first, second, strict=True):
        full = started[case][0]
        assert resumed[case, ""] == {key: full[key] for key in resumed[case, ""]}
        assert {LAST, f"loss {programs.END - 1}"} <= resumed[case, ""].keys()


@pytest.mark.parametrize(("world", "case"), EVERY)
def test_a_capture_leaves_the_later_steps_as_they_were(runs, world, case):
    for started, _ in runs(world)[0]:
        full, seen, _ = started[case]
        assert seen == full


@pytest.mark.parametrize(
    ("world", "case", "left_out"),
    [
        (2, "mixed, reshard, no sync", "all"),
        (2, "mixed, reshard, no sync", "accumulated"),
        (2, "plain, reshard, no sync", "unsharded"),
        (4, "hybrid, no all-reduce", "all"),
        (4, "hybrid, no all-reduce", "partial"),
        (4, "tensor", "accumulated"),
    ],
)
def test_gradients_that_are_left_out_are_missed(runs, world, case, left_out):
    first, second = runs(world)
    assert second[0][case, left_out][LAST] != first[0][0][case][0][LAST]


@pytest.mark.parametrize(
    ("world", "case", "kinds"),
    [
        (2, "mixed, reshard, no sync", ["accumulated torch.float32"]),
        (2, "plain, reshard, no sync", ["unsharded torch.float32"]),
        (2, "mixed, reshard, no nothing", []),
        (2, "replicated, no all-reduce", ["partial torch.float32"]),
        (4, "hybrid, no all-reduce", ["partial torch.float32"]),
        (4, "tensor", ["accumulated torch.float32"]),
        (4, "tensor, plain", ["unsharded torch.float32"]),
    ],
)
def test_gradients_are_found_where_torch_keeps_them(runs, world, case, kinds):
    for started, _ in runs(world)[0]:
        assert started[case][2]["kinds"] == kinds


def test_gradients_of_tensor_parallel_parts_keep_how_they_lie_over_the_ranks(runs):
    """Each rank has only its own tokens' share of what a sequence-parallel norm gets."""
    assert runs(4)[0][0][0]["tensor"][2]["placements"] == ["partial", "replicate", "shard"]


@pytest.mark.parametrize(("world", "case"), EVERY)
def test_the_weight_of_gradients_is_that_of_what_is_captured(runs, world, case):
    for started, _ in runs(world)[0]:
        facts = started[case][2]
        coming, possible = facts["gradient_bytes"]
        assert coming == facts["bytes"] <= possible
        if "no sync" in case:
            assert coming == possible


def test_a_script_may_say_only_once_that_a_window_does_not_sync(runs):
    second = runs(2)[1]
    assert second[0]["said once", "flags"] != second[0]["said once", ""]


def test_a_script_that_says_it_each_time_needs_no_flags(runs):
    case, second = "plain, reshard, no sync", runs(2)[1]
    assert second[0][case, "flags"] == second[0][case, ""]


def test_the_sharded_parameters_are_seen_from_another_thread_whatever_is_gathered(runs):
    for _, walks in runs(2)[0]:
        assert walks["odd walks"] == 0
        assert walks["gathered"]
        assert walks["sharded"]
        assert len(walks["sizes"]) == 1


def test_names_are_those_of_a_plain_model(runs):
    plain = programs.Net()
    for _, walks in runs(2)[0]:
        assert walks["paths"] == [path for path, _ in plain.named_parameters()]
        assert walks["ties"] == 1


def test_a_model_without_fsdp_is_left_alone():
    model = nn.Linear(2, 2)
    fsdp.self_test(model, "model")
    fsdp.rest(model)
    fsdp.apply(model, None, Saved({}, {}))
    assert fsdp.capture(model, "model", Captured()) is None
    assert fsdp.differences(model, "model", None) == []
    assert fsdp.gradient_bytes(model) == (0, 0)
    assert list(fsdp.parameters(model)) == list(model.named_parameters())


def test_wrappers_of_modules_do_not_change_names():
    assert fsdp.plain_path("_orig_mod.a._checkpoint_wrapped_module.0._orig_mod.w") == "a.0.w"
    wrapped = checkpoint_wrapper(nn.Linear(2, 2, bias=False))
    model = nn.Sequential(torch.compile(wrapped))
    assert [fsdp.plain_path(path) for path, _ in fsdp.parameters(model)] == ["0.weight"]


def test_another_way_of_sharding_is_told(alone):
    def sharded(*parts):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for part in parts:
            fully_shard(model[part])
        return fully_shard(model)

    tree = fsdp.capture(sharded(0), "model", Captured())
    assert fsdp.differences(sharded(0), "model", tree) == []
    assert fsdp.differences(sharded(1), "model", tree) == [
        "model was sharded together with other parameters than now",
        "model/0 was sharded by itself, is not now",
        "model/1 is sharded by itself now, was not",
    ]
    assert len(fsdp.differences(nn.Linear(2, 2), "model", tree)) == 2
    assert len(fsdp.differences(sharded(0), "model", None)) == 2


def test_a_parameter_replaced_before_the_first_forward_is_the_one_that_counts(alone):
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    fully_shard(model)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert dict(fsdp.parameters(model))["0.weight"] is model[0].weight


def test_a_gather_under_way_does_not_bring_old_parameters_back(alone):
    model = fully_shard(nn.Linear(2, 2))
    tree = fsdp.capture(model, "model", Captured())
    model.unshard(async_op=True)
    with torch.no_grad():
        for _, parameter in fsdp.parameters(model):
            parameter.fill_(3.0)
    fsdp.apply(model, tree, Saved({}, {}))
    assert model(torch.ones(1, 2)).tolist() == [[9.0, 9.0]]


def test_gradients_of_an_abandoned_window_are_taken_away(alone):
    model = fully_shard(nn.Linear(2, 2))
    tree = fsdp.capture(model, "model", Captured())
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 2)).sum().backward()
    left, taken = Captured(), Captured()
    fsdp.capture(model, "model", left)
    fsdp.apply(model, tree, Saved({}, {}))
    fsdp.capture(model, "model", taken)
    assert (len(left.tensors), len(taken.tensors)) == (2, 0)


def test_a_torch_that_lacks_a_private_name_is_told_at_the_start(alone, monkeypatch):
    model = fully_shard(nn.Linear(2, 2))
    fsdp.self_test(model, "model")
    group = model._get_fsdp_state()._fsdp_param_groups[0]
    monkeypatch.delattr(group, "_partial_reduce_output")
    monkeypatch.delattr(group.fsdp_params[0], "unsharded_accumulated_grad")
    monkeypatch.delitem(type(group.fsdp_params[0]).__annotations__, "unsharded_accumulated_grad")
    with pytest.raises(ConfigurationError, match="no longer has FSDPParamGroup") as error:
        fsdp.self_test(model, "model")
    assert "FSDPParam.unsharded_accumulated_grad" in error.value.message


def test_a_gradient_placed_in_an_unknown_way_is_refused_both_ways():
    class Scattered:
        _local_tensor = torch.ones(1)
        shape, placements = (1,), ("odd",)

        def stride(self):
            return (1,)

    with pytest.raises(UnknownValue, match="gradients/model/w"):
        fsdp._capture_gradient(Scattered(), "gradients/model/w", Captured())
    with pytest.raises(UnusableSnapshot, match="odd"):
        fsdp._saved_placement("odd")

"""What cannot be tracked is refused by name, without the libraries being there."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from tests.ranks.processes import preload, run_ranks
from tests.state import refused_programs
from trainckpt.errors import ConfigurationError
from trainckpt.state.adapters.unsupported import refusal, refuse

preload("tests.state.refused_programs")


def of(library, kind, *bases):
    """An object of a class that `library` would define."""
    made = type(kind, bases, {})
    made.__module__ = library
    return made()


@pytest.fixture
def alone():
    """A group of one rank."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_the_first_fsdp_is_refused_and_the_second_is_named(alone):
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    found = refusal(nn.Sequential(model), "model")
    assert found.startswith("model/0 is FSDP1's")
    assert "fully_shard" in found


@pytest.mark.parametrize("has_trained", [False, True])
def test_tensor_parallelism_under_ddp_is_refused_and_fully_shard_is_named(tmp_path, has_trained):
    """After a forward it has no parameters, and was saved as the optimizer's, without a name."""
    program = refused_programs.parallel_under_ddp
    for message, hint in run_ranks(program, 2, str(tmp_path), has_trained):
        assert message.startswith("model has tensor-parallel parameters under DDP")
        assert "fully_shard" in hint


def test_the_second_fsdp_is_not_refused(alone):
    assert refusal(fully_shard(nn.Linear(2, 2)), "model") is None


def test_an_optimizer_whose_state_lies_elsewhere_is_refused(alone):
    parameters = nn.Linear(2, 2).parameters()
    optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    assert "other ranks" in refusal(optimizer, "optimizer")


@pytest.mark.parametrize(
    ("library", "kind", "instead"),
    [
        ("deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint"),
        ("deepspeed.runtime.pipe.engine", "PipelineEngine", "save_checkpoint"),
        ("accelerate.utils.deepspeed", "DeepSpeedEngineWrapper", "save_checkpoint"),
        ("megatron.core.distributed", "DistributedDataParallel", "dist_checkpointing"),
        ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear", "dist_checkpointing"),
        ("fairscale.nn.data_parallel", "FullyShardedDataParallel", "fully_shard"),
    ],
)
def test_modules_of_other_libraries_are_refused_with_what_to_use_instead(library, kind, instead):
    module = of(library, kind, nn.Module)
    assert instead in refusal(module, "model")
    with pytest.raises(ConfigurationError, match="model/0 is ") as error:
        refuse(nn.Sequential(module), "model")
    assert instead in error.value.hint


@pytest.mark.parametrize(
    ("library", "kind", "instead"),
    [
        ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "model=engine"),
        ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "save_checkpoint"),
        ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer", "model=engine"),
        ("accelerate.utils.deepspeed", "DeepSpeedOptimizerWrapper", "save_checkpoint"),
        ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer", "dist_check"),
    ],
)
def test_their_optimizers_are_refused_whatever_they_inherit_from(library, kind, instead):
    """DeepSpeed's are no `torch.optim.Optimizer`: they look like any object with a state."""
    assert instead in refusal(of(library, kind), "optimizer")


def test_a_class_of_the_script_is_refused_for_what_it_inherits_from():
    engine = type(of("deepspeed.runtime.engine", "DeepSpeedEngine", nn.Module))
    assert refusal(type("Mine", (engine,), {})(), "model") is not None


def test_plain_modules_that_deepspeed_has_taken_the_parameters_of_are_refused():
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0
    assert refusal(model, "model").startswith("model/weight is DeepSpeed's")


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("script", "DeepSpeedEngine"),
        ("script", "FullyShardedDataParallel"),
        ("megatronics.layers", "Layer"),
        ("deepspeed.moe.layer", "MoE"),
    ],
)
def test_only_the_libraries_own_classes_are_meant(library, kind):
    assert refusal(of(library, kind, nn.Module), "model") is None


def test_what_those_libraries_have_for_plain_training_is_not_refused():
    """Schedulers and fused optimizers keep no state elsewhere."""
    for library in ("deepspeed.ops.adam.fused_adam", "deepspeed.runtime.lr_schedules"):
        assert refusal(of(library, "Any"), "any") is None
    refuse(torch.optim.SGD([torch.zeros(1)], 0.1), "optimizer")

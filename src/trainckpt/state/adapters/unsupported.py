"""Refuse unsupported kinds of objects, and name the alternative.

Objects are recognized by the names of classes and their modules, over all base classes. Nothing is
imported, and a script's class of the same name is not affected. DeepSpeed's engine with ZeRO-1 or 2
is tracked by `deepspeed_engine`, and comes here inside another module only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import nn

from trainckpt.errors import ConfigurationError


class _Rule(NamedTuple):
    modules: tuple[str, ...]  # modules defining the class, submodules included
    kinds: tuple[str, ...]  # names of classes; none: all
    why: str
    instead: str


_FSDP1 = _Rule(
    ("torch.distributed.fsdp", "fairscale.nn"),
    ("FullyShardedDataParallel",),
    "FSDP1's FullyShardedDataParallel, which flattens parameters and hides their gradients",
    "use torch.distributed.fsdp.fully_shard (FSDP2)",
)
_ZERO_1_OR_2 = _Rule(
    ("deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.bf16_optimizer"),
    ("DeepSpeedZeroOptimizer", "BF16_Optimizer"),
    "the optimizer inside a DeepSpeed engine",
    "leave it out: model=engine tracks the engine's optimizer too",
)
_DEEPSPEED = _Rule(
    (
        "deepspeed.runtime.engine",
        "deepspeed.runtime.hybrid_engine",
        "deepspeed.runtime.pipe",
        "deepspeed.runtime.zero",
        "deepspeed.runtime.fp16",
        "deepspeed.runtime.bf16_optimizer",
        "deepspeed.runtime.base_optimizer",
        "deepspeed.inference",
        "accelerate.utils.deepspeed",
    ),
    (),
    "DeepSpeed's, which keeps parameters, gradients and optimizer state in partitions of its own",
    "use a plain engine with ZeRO-1 or ZeRO-2, torch.distributed.fsdp.fully_shard (FSDP2), or "
    "DeepSpeed's own save_checkpoint",
)
_MEGATRON = _Rule(
    (
        "megatron.core.optimizer",
        "megatron.core.distributed",
        "megatron.optimizer",
        "accelerate.utils.megatron_lm",
    ),
    (),
    "Megatron's, which keeps gradients and optimizer state in buffers of its own",
    "use Megatron's dist_checkpointing",
)
_MEGATRON_MODULE = _MEGATRON._replace(modules=("megatron",))
_ZERO1 = _Rule(
    ("torch.distributed.optim",),
    ("ZeroRedundancyOptimizer",),
    "a ZeroRedundancyOptimizer, whose state lies on other ranks",
    "use the plain optimizer, with fully_shard (FSDP2) to spread its state",
)
# After the first forward they are no longer parameters of the module.
_PARALLEL_UNDER_DDP = (
    "has tensor-parallel parameters under DDP, which a forward takes away from the module",
    "in place of DDP use torch.distributed.fsdp.fully_shard over the mesh's data dimension",
)
_RULES = (_FSDP1, _ZERO_1_OR_2, _DEEPSPEED, _MEGATRON, _ZERO1)


def refusal(value: object, name: str) -> str | None:
    """Return the reason why `value` cannot be tracked, in one sentence; None if it can."""
    found = _reason(value, name)
    return None if found is None else f"{found[0]}: {found[1]}"


def refuse(value: object, name: str) -> None:
    """Raise `ConfigurationError` if `value`, or a module inside it, cannot be tracked."""
    found = _reason(value, name)
    if found is not None:
        raise ConfigurationError(found[0], hint=found[1])


def _reason(value: object, name: str) -> tuple[str, str] | None:
    if not isinstance(value, nn.Module):
        return _match(value, name, _RULES)
    rules = (*_RULES, _MEGATRON_MODULE)
    for path, part in value.named_modules():
        found = _match(part, f"{name}/{path}" if path else name, rules)
        if found is not None:
            return found
    if _is_parallel_under_ddp(value):
        return f"{name} {_PARALLEL_UNDER_DDP[0]}", _PARALLEL_UNDER_DDP[1]
    for path, parameter in value.named_parameters():
        if hasattr(parameter, "ds_id"):  # ZeRO-3 takes plain modules' parameters away
            return _match_rule(f"{name}/{path}", _DEEPSPEED)
    return None


def _is_parallel_under_ddp(value: nn.Module) -> bool:
    """Return True if `DDP(device_mesh=...)`, or its helper, has localized a module's DTensors."""
    if any(hasattr(parameter, "_st_info") for parameter in value.parameters()):
        return True
    hooks = (hook for part in value.modules() for hook in part._forward_hooks.values())
    return any(getattr(hook, "__name__", "") == "_localize_dtensor" for hook in hooks)


def _match(value: object, name: str, rules: tuple[_Rule, ...]) -> tuple[str, str] | None:
    value_type: Any = type(value)  # mypy does not know that types are hashable
    rule = _rule_of(value_type, rules)
    return None if rule is None else _match_rule(name, rule)


@lru_cache  # a model has few types of modules, and many of each
def _rule_of(value_type: type[Any], rules: tuple[_Rule, ...]) -> _Rule | None:
    for kind in value_type.__mro__:
        for rule in rules:
            if rule.kinds and kind.__name__ not in rule.kinds:
                continue
            if any(f"{kind.__module__}.".startswith(f"{module}.") for module in rule.modules):
                return rule
    return None


def _match_rule(name: str, rule: _Rule) -> tuple[str, str]:
    return f"{name} is {rule.why}", rule.instead

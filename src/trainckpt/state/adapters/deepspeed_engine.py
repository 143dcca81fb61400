"""Capture and restore what a DeepSpeed engine with ZeRO-1 or ZeRO-2 keeps to itself.

The engine's module is tracked as any model, its optimizer by `partitioned_optimizer`. Here is the
rest: counters, and gradients of the open window. Where those lie depends on stage and types:

    ZeRO-1    `.grad` of each parameter, as without DeepSpeed; or, if gradients accumulate in
              another type, `.grad_accum`, or flat buffers of the whole model (`BF16_Optimizer`)
    ZeRO-2    gradients averaged over the ranks already, those of this rank's partition: a list of
              tensors a parameter group, or one flat buffer if they accumulate in fp32

Whether a micro-batch ends its window follows from the engine's own count of micro-batches.

DeepSpeed is not imported. Its names are private, and `self_test` reports a missing one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from trainckpt.errors import ConfigurationError, UnusableSnapshot
from trainckpt.format import json_io

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainckpt.state.captured import Captured, Saved

PART, WINDOW = "deepspeed engines", "deepspeed gradients"  # no keyword can be spelled so
ATTRIBUTES = frozenset({"grad_accum", "_hp_grad"})  # of parameters: gradients of the window
_ENGINE = ("deepspeed.runtime.engine", "DeepSpeedEngine")
_ZERO = ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
_BF16 = ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer")
_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
_COUNTERS = (
    *("micro_steps", "global_steps", "global_samples", "skipped_steps"),
    *("_unmanaged_backward_count", "_step_applied", "_global_grad_norm"),
    "_is_gradient_accumulation_boundary",
)
_OPTIMIZER_COUNTERS = (
    *("overflow", "_global_grad_norm", "micro_step_id", "custom_loss_scaler"),
    *("external_loss_scale", "_is_gradient_accumulation_boundary"),
)
_ENGINE_NAMES = (
    *(*_COUNTERS, "module", "lr_scheduler", "zero_optimization_stage", "zero_cpu_offload"),
    *("gradient_accumulation_steps", "has_moe_layers", "mp_world_size"),
    *("random_ltd_enabled", "curriculum_learning_enabled", "is_deepcompile_enabled"),
)
_OPTIMIZER_NAMES = ("step", "optimizer", "dp_process_group", "refresh_fp32_params")
_LINKS = ("_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state")
_ZERO_NAMES = (
    *(*_OPTIMIZER_NAMES, *_LINKS, "bit16_groups", "bit16_groups_flat", "averaged_gradients"),
    *("single_partition_of_fp32_groups", "round_robin_bit16_groups", "round_robin_bit16_offsets"),
    *("all_grad_tensors", "loss_scaler"),
    *("_build_compact_grad_partition_buffer", "gradient_accumulation_dtype"),
)
_BF16_NAMES = (
    *(*_OPTIMIZER_NAMES, *_LINKS, "bf16_groups", "bf16_groups_flat", "clear_hp_grads"),
    *("fp32_groups_flat_partition", "fp32_groups_gradients", "fp32_groups_gradients_flat"),
    *("fp32_groups_has_gradients", "grad_acc_dtype"),
)
_RATES = "_last_lr"
_FSDP2 = "use torch.distributed.fsdp.fully_shard (FSDP2)"
_SAVE = "DeepSpeed's own save_checkpoint"
_OPTIMIZERS = ("deepspeed.runtime.fp16.onebit", "deepspeed.runtime.zero.muon")


def is_engine(value: object) -> bool:
    """Return True for DeepSpeed's engine itself; its subclasses keep state of their own."""
    return _kind(value) == _ENGINE


class EngineState:
    """One tracked DeepSpeed engine, of ZeRO stage 1 or 2.

    Attributes:
        zero: The optimizer that holds the partitions, around torch's.
        inner: Torch's, which steps one flat parameter for each parameter group.
    """

    def __init__(self, name: str, engine: Any) -> None:
        """Raise `ConfigurationError` if a part of the engine could not be restored exactly."""
        self.name, self.engine, self.zero = name, engine, engine.optimizer
        self_test(engine, name)
        if (found := _unsupported(engine)) is not None:
            raise ConfigurationError(
                f"{name} is a DeepSpeed engine {found[0]}, whose state is not restored exactly",
                hint=found[1],
            )
        self.inner: torch.optim.Optimizer = self.zero.optimizer
        self._is_bf16 = _kind(self.zero) == _BF16

    def groups(self) -> list[list[Any]]:
        """Return the parameters of each group, in the optimizer's order."""
        found: list[list[Any]] = self.zero.bf16_groups if self._is_bf16 else self.zero.bit16_groups
        return found

    def places(self) -> list[list[tuple[Any, int]]]:
        """Return, for each group, its parameters and their first element in the flat one."""
        if not self._is_bf16:
            zero = self.zero
            flat = zip(zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets, strict=True)
            return [list(zip(group, offsets, strict=True)) for group, offsets in flat]
        found: list[list[tuple[Any, int]]] = []
        for group in self.groups():
            places, first = list[tuple[Any, int]](), 0
            for parameter in group:
                places.append((parameter, first))
                first += parameter.numel()
            found.append(places)
        return found

    def link(self) -> None:
        """Let DeepSpeed's own functions that gather moments see the present ones."""
        state, flats = self.inner.state, [g["params"][0] for g in self.inner.param_groups]
        self.zero._hp_optimizer_states_linked = False
        if all(flat in state for flat in flats):
            self.zero._lazy_init_hp_params_optimizer_state()

    def refresh(self) -> None:
        """Copy the model's weights into the partitions, after they were loaded by themselves."""
        self.zero.refresh_fp32_params()

    # ---- counters

    def capture(self, out: Captured) -> None:
        """Add counters, loss scale, and the window's gradients."""
        scaler = getattr(self.zero, "loss_scaler", None)
        counters = {key: getattr(self.engine, key) for key in _COUNTERS}
        of_optimizer = {
            k: getattr(self.zero, k) for k in _OPTIMIZER_COUNTERS if hasattr(self.zero, k)
        }
        path = f"{PART}/{self.name}"
        out.values.setdefault(PART, {})[self.name] = {
            "facts": self._facts(),
            "engine": out.encode(counters, path, PART),
            "optimizer": out.encode(of_optimizer, f"{path}.optimizer", PART),
            "scaler": out.encode(_numbers(scaler), f"{path}.scaler", PART),
        }
        out.values.setdefault(WINDOW, {})[self.name] = self._capture_window(out)

    def _facts(self) -> dict[str, Any]:
        """Return what the open window's gradients depend on."""
        kept = "grad_acc_dtype" if self._is_bf16 else "gradient_accumulation_dtype"
        return {
            "stage": int(self.engine.zero_optimization_stage()),
            "optimizer": type(self.zero).__name__,
            "accumulates": str(getattr(self.zero, kept)),
            "accumulation_steps": int(self.engine.gradient_accumulation_steps()),
            "partitions": [group["params"][0].numel() for group in self.inner.param_groups],
        }

    def is_as_saved(self, tree: Any) -> bool:
        """Return True if the window can go on; `tree` is the value of `PART`."""
        stored = tree.get(self.name) if isinstance(tree, dict) else None
        return isinstance(stored, dict) and stored.get("facts") == self._facts()

    def apply(self, saved: Saved) -> None:
        """Restore the counters; if the window begins anew, those of its start."""
        stored = _stored(saved, PART, self.name)
        if stored is None:  # weights alone, from another source
            self.refresh()
            return
        _set(self.engine, saved.decode(stored["engine"]))
        _set(self.zero, saved.decode(stored["optimizer"]))
        _set(getattr(self.zero, "loss_scaler", None), saved.decode(stored["scaler"]))
        if not saved.exact:
            then = json_io.field(stored["facts"], "accumulation_steps", int, PART)
            now = int(self.engine.gradient_accumulation_steps())
            self.engine.micro_steps = self.engine.micro_steps // max(then, 1) * now
            self.engine._unmanaged_backward_count = 0
            self._clear_window()

    # ---- gradients of the window

    def _capture_window(self, out: Captured) -> dict[str, Any]:
        path = f"{WINDOW}/{self.name}"
        if self._is_bf16:
            return {"flat": [self._capture_flat(i, f"{path}.group{i}", out) for i in self._range()]}
        local = {
            str(i): {
                str(j): out.add(f"{path}.group{i}.{j}#local", parameter.grad_accum)
                for j, parameter in enumerate(group)
                if getattr(parameter, "grad_accum", None) is not None
            }
            for i, group in enumerate(self.groups())
        }
        return {
            "local": local,
            "sums": [self._capture_list("all_grad_tensors", i, path, out) for i in self._range()],
            "means": [self._capture_means(i, path, out) for i in self._range()],
        }

    def _capture_flat(self, i: int, path: str, out: Captured) -> dict[str, Any]:
        """Add a group's buffer, unless the optimizer has just cleared it."""
        has = self.zero.fp32_groups_has_gradients[i]
        buffer = self.zero.fp32_groups_gradients_flat[i]
        shown = [getattr(parameter, "_hp_grad", None) is not None for parameter in self.groups()[i]]
        return {"has": has, "shown": shown, "buffer": out.add(path, buffer) if any(has) else None}

    def _capture_list(self, kind: str, i: int, path: str, out: Captured) -> list[Any] | None:
        tensors = getattr(self.zero, kind).get(i)
        if tensors is None:
            return None
        return [out.add(f"{path}.group{i}.{kind}{j}", tensor) for j, tensor in enumerate(tensors)]

    def _capture_means(self, i: int, path: str, out: Captured) -> dict[str, Any] | None:
        means = self.zero.averaged_gradients.get(i)
        flat = getattr(means, "flat_partition", None)
        if flat is not None:
            return {"flat": out.add(f"{path}.group{i}", flat)}
        if means is None:
            return None
        padding = [bool(getattr(tensor, "_zero_padding", False)) for tensor in means]
        return {"list": self._capture_list("averaged_gradients", i, path, out), "padding": padding}

    @torch.no_grad()
    def apply_window(self, saved: Saved) -> None:
        """Restore the gradients accumulated so far, absent ones included."""
        stored = _stored(saved, WINDOW, self.name)
        if stored is None:
            return
        if self._is_bf16:
            for i, then in enumerate(stored["flat"]):
                self._apply_flat(i, then, saved)
            return
        for i, group in enumerate(self.groups()):
            device = self.inner.param_groups[i]["params"][0].device
            for j, parameter in enumerate(group):
                node = stored["local"][str(i)].get(str(j))
                parameter.grad_accum = None if node is None else saved.tensor(node, device)
            sums, means = stored["sums"][i], stored["means"][i]
            self.zero.all_grad_tensors[i] = (
                None if sums is None else [saved.tensor(node, device) for node in sums]
            )
            self.zero.averaged_gradients[i] = self._means(i, means, saved, device)

    def _means(self, i: int, then: Any, saved: Saved, device: torch.device) -> Any:
        if then is None:
            return None
        if "flat" in then:
            buffer = self.zero._build_compact_grad_partition_buffer(i)
            buffer.flat_partition.copy_(saved.tensor(then["flat"], device))
            return buffer
        tensors = [saved.tensor(node, device) for node in then["list"]]
        for tensor, is_padding in zip(tensors, then["padding"], strict=True):
            if is_padding:
                tensor._zero_padding = True  # type: ignore[attr-defined]
        return tensors

    def _apply_flat(self, i: int, then: Mapping[str, Any], saved: Saved) -> None:
        zero, buffer = self.zero, self.zero.fp32_groups_gradients_flat[i]
        if then["buffer"] is None:
            buffer.zero_()
        else:
            buffer.copy_(saved.tensor(then["buffer"], buffer.device))
        zero.fp32_groups_has_gradients[i] = list(then["has"])
        views = zero.fp32_groups_gradients[i]
        for parameter, view, shown in zip(self.groups()[i], views, then["shown"], strict=True):
            parameter._hp_grad = view if shown else None

    def _clear_window(self) -> None:
        for parameter in (parameter for group in self.groups() for parameter in group):
            parameter.grad = None
        if self._is_bf16:
            self.zero.clear_hp_grads()
            return
        for i, group in enumerate(self.groups()):
            self.zero.all_grad_tensors[i] = self.zero.averaged_gradients[i] = None
            for parameter in group:
                parameter.grad_accum = None

    def window_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that `capture` adds for the open window."""
        zero = self.zero
        if self._is_bf16:
            flats = zero.fp32_groups_gradients_flat
            yield from (flats[i] for i in self._range() if any(zero.fp32_groups_has_gradients[i]))
            return
        for i, group in enumerate(self.groups()):
            kept = (getattr(parameter, "grad_accum", None) for parameter in group)
            yield from (tensor for tensor in kept if tensor is not None)
            yield from zero.all_grad_tensors.get(i) or ()
            yield from zero.averaged_gradients.get(i) or ()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of gradients that the window may add to those of the parameters. Any thread."""
        flats = self.zero.fp32_groups_gradients_flat if self._is_bf16 else ()
        return sum(flat.nbytes for flat in flats)

    def _range(self) -> range:
        return range(len(self.inner.param_groups))


class EngineSchedule:
    """One of DeepSpeed's schedules, with the learning rates that its own state leaves out."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, and its last learning rates, if it has taken a step."""
        rates = getattr(self.schedule, _RATES, None)
        return {**self.schedule.state_dict(), _RATES: None if rates is None else list(rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both."""
        self.schedule.load_state_dict({k: v for k, v in state.items() if k != _RATES})
        if state.get(_RATES) is not None:
            setattr(self.schedule, _RATES, list(state[_RATES]))


def complete(value: Any) -> Any:
    """Return an object with all state of `value`: itself, unless it is DeepSpeed's schedule."""
    is_schedule = type(value).__module__ == "deepspeed.runtime.lr_schedules"
    return EngineSchedule(value) if is_schedule else value


def _stored(saved: Saved, part: str, name: str) -> dict[str, Any] | None:
    """Return what was saved of an engine; None if nothing was.

    Raises:
        UnusableSnapshot: It is not made by `capture`.
    """
    found = saved.values.get(part, {}).get(name)
    if found is not None and not isinstance(found, dict):
        raise UnusableSnapshot(f"the state of {name}'s DeepSpeed engine is no object")
    return found


def _numbers(holder: Any) -> dict[str, Any]:
    """Return the numbers of a loss scaler; {} for none."""
    kinds = (bool, int, float)
    return {key: v for key, v in vars(holder).items() if type(v) in kinds} if holder else {}


def _set(holder: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        setattr(holder, key, value)


def _kind(value: object) -> tuple[str, str]:
    return type(value).__module__, type(value).__name__


# ---- engines that cannot be restored exactly, and what to use in their place


def _unsupported(engine: Any) -> tuple[str, str] | None:
    """Return the reason why an engine is refused and what to use instead; None if it is not."""
    stage, zero = int(engine.zero_optimization_stage()), engine.optimizer
    two = '"zero_optimization": {"stage": 2}'
    if stage == 0:
        return "without ZeRO", f"use ZeRO-1 or ZeRO-2 ({two}), or DDP without DeepSpeed"
    if stage not in (1, 2):
        return f"with ZeRO-{stage}", f"use ZeRO-2 ({two}), {_FSDP2}, or {_SAVE}"
    if engine.zero_cpu_offload() or getattr(zero, "cpu_offload", False):
        return "with ZeRO-Offload", f"leave offload_optimizer out, or use {_SAVE}"
    if engine.has_moe_layers:
        return "with experts (MoE)", f"use {_SAVE}"
    if not _is_data_parallel(engine):
        return "whose ranks share their data (tensor or sequence parallel)", f"use {_SAVE}"
    return _unsupported_extension(engine)


def _is_data_parallel(engine: Any) -> bool:
    """Return True if each rank trains samples of its own, and has its part of all partitions."""
    zero = engine.optimizer
    size = torch.distributed.get_world_size(zero.dp_process_group)
    is_whole = size == torch.distributed.get_world_size() and engine.mp_world_size == 1
    return is_whole and getattr(zero, "sequence_parallel_size", 1) == 1


def _unsupported_extension(engine: Any) -> tuple[str, str] | None:
    zero = engine.optimizer
    if getattr(zero, "torch_autocast_gradscaler", None) is not None:
        return "with a GradScaler (torch_autocast in float16)", 'use "bf16", or bfloat16 there'
    if engine.is_deepcompile_enabled():
        return "with DeepCompile", 'leave "compile": {"deepcompile": true} out'
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        return "with random-LTD or curriculum learning", f"leave it out, or use {_SAVE}"
    if type(zero.optimizer).__module__.startswith(_OPTIMIZERS):
        return f"with the optimizer {type(zero.optimizer).__name__}", "use AdamW"
    kernel = type(zero.optimizer).__name__
    on_cpu = zero.optimizer.param_groups[0]["params"][0].device.type == "cpu"
    if on_cpu and kernel in ("FusedAdam", "DeepSpeedCPUAdam"):
        return (
            f"with {kernel} on CPUs, whose kernel keeps the powers of its betas to itself",
            'add "torch_adam": true to the optimizer\'s params, or give torch.optim.AdamW',
        )
    tracker = getattr(sys.modules.get(_CHECKPOINTING), "get_cuda_rng_tracker", None)
    if tracker is not None and tracker().get_states():
        return "with random generators of its own (model_parallel_cuda_manual_seed)", f"use {_SAVE}"
    return None


def self_test(engine: Any, name: str) -> None:
    """Raise `ConfigurationError` if this DeepSpeed lacks a name used here."""
    names: dict[str, tuple[Any, tuple[str, ...]]] = {_ENGINE[1]: (engine, _ENGINE_NAMES)}
    kind = _kind(engine.optimizer)
    if kind == _ZERO:
        names[_ZERO[1]] = engine.optimizer, _ZERO_NAMES
    elif kind == _BF16:
        names[_BF16[1]] = engine.optimizer, _BF16_NAMES
    missing = [f"{k}.{n}" for k, (o, ns) in names.items() for n in ns if not hasattr(o, n)]
    if missing:
        version = getattr(sys.modules.get("deepspeed"), "__version__", "")
        raise ConfigurationError(
            f"{name}: DeepSpeed {version} has no {', '.join(missing)}, so its hidden state cannot "
            "be restored exactly",
            hint="use a DeepSpeed version that trainckpt was tested with (docs/deepspeed.md)",
        )
    stage = int(engine.zero_optimization_stage())
    if stage in (1, 2) and kind not in (_ZERO, _BF16):
        raise ConfigurationError(
            f"{name} is a DeepSpeed engine with a {kind[1]}, whose state is not restored exactly"
            if engine.optimizer is not None
            else f"{name} is a DeepSpeed engine without an optimizer",
            hint="give deepspeed.initialize an optimizer, and ZeRO-1 or ZeRO-2 without extensions",
        )

"""Restore the hidden state of DDP (evidence: docs/design.md, "Hidden state").

Bucket order: after its first synchronized backward DDP regroups gradients by the order in which
they became ready. A ring all-reduce adds in another order for another grouping, so from three
ranks on a fresh DDP rounds differently. There the order is replayed without a forward pass: a
dummy backward calls the reducer's own hooks in the recorded order. Between the first backward and
the next forward the regrouping is due but not done, and the order is not known. So `capture`
triggers it, as the next forward would.

With `static_graph` the first backward differs from all others: it counts how often each parameter
becomes ready, and would count a dummy instead. There the reducer is remade with the recorded
buckets from the start; the first backward counts, and changes no bucket.

`require_forward_param_sync`: False inside a window under no_sync; a fresh DDP would broadcast
rank 0's buffers on its next forward.

Used parameters, with `find_unused_parameters`: the parameters used in the window so far.

Private names of torch's DDP are checked by `self_test`, which reports a missing one.
"""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from trainckpt.errors import ConfigurationError
from trainckpt.gc_pause import gc_paused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


# ---- the live DDP of a module, behind its wrappers
#
# Fabric and Accelerate give a script thin wrappers of modules and optimizers. Their state is that
# of the inner object, so the inner object is tracked, counted and named.
#
# Scripts may track the inner module, wrap it after the Checkpointer is made, and wrap it again
# after unfreezing parameters. So DDP modules are noted as they are made: torch calls a hook for
# each module registered in another. Earlier ones are searched for once.


_REPLICATE = "torch.distributed._composable.replicate"

# Each DDP module, in the order they were made -> ids of its parts, computed at first use.
_live: WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = WeakKeyDictionary()
_watching: list[Any] = []


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP, DataParallel, torch.compile and Fabric wrappers."""
    wrappers: tuple[Any, ...] = (DistributedDataParallel, nn.DataParallel)
    while True:
        # no `or`: modules may have a length, and torch.compile's wrapper may raise on it
        inner = module.module if isinstance(module, wrappers) else None
        if inner is None:
            inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ == "_FabricModule":
            inner = getattr(module, "_forward_module", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def unwrap_optimizer(value: Any) -> Any:
    """Return the inner optimizer if `value` exposes its groups and state, or `value` itself.

    Fabric's and Accelerate's wrappers do. An optimizer with state besides its inner one (SAM,
    Lookahead) does not.
    """
    inner = inner_optimizer(value)
    while inner is not None and _shows(value, inner):
        value, inner = inner, inner_optimizer(inner)
    return value


def inner_optimizer(value: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer stepped by an object, its `.optimizer`, or None.

    Schedulers have one too, but no `zero_grad`.
    """
    inner = getattr(value, "optimizer", None) if hasattr(value, "zero_grad") else None
    is_one = isinstance(inner, torch.optim.Optimizer) and not isinstance(value, nn.Module)
    return inner if is_one and inner is not value else None


def _shows(wrapper: Any, inner: torch.optim.Optimizer) -> bool:
    groups, state = getattr(wrapper, "param_groups", None), getattr(wrapper, "state", None)
    return groups is inner.param_groups and state is inner.state


def newest(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP of a module, or None: its own, or else that of an enclosing module.

    Of several it is the last one made, preferably among those used in a forward.
    """
    if not torch.distributed.is_initialized():
        return None
    _watch()
    known = [each for each in _live if hasattr(each, "reducer")]  # made to the end
    found = [each for each in known if unwrap(each) is module]
    found = found or [each for each in known if _holds(each, module)]
    used = [each for each in found if getattr(each, "_lazy_init_ran", False)]
    return next(reversed(used or found), None)


def is_hidden(module: nn.Module) -> bool:
    """Return True if torch's older `replicate` makes the DDP during the first forward."""
    kind = getattr(sys.modules.get(_REPLICATE), "DDP", None)
    return kind is not None and any(isinstance(part, kind) for part in module.modules())


def _watch() -> None:
    if _watching:
        return
    _watching.append(register_module_module_registration_hook(_note))
    for each in _from_the_oldest():
        # type() and not isinstance(), which asks proxies for their __class__
        if issubclass(type(each), DistributedDataParallel):
            _live[each] = frozenset()


def _from_the_oldest() -> list[Any]:
    """Return all objects, oldest generation first.

    A collection in between would move some objects past the search.
    """
    with gc_paused():
        return [each for generation in (2, 1, 0) for each in gc.get_objects(generation)]


def _note(parent: nn.Module, name: str, _: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _live[parent] = frozenset()


def _holds(wrapper: DistributedDataParallel, module: nn.Module) -> bool:
    """Return True if the wrapper trains the module as a part of another, or only its parameters."""
    if not _live[wrapper]:
        parts = (*wrapper.modules(), *wrapper.parameters())
        _live[wrapper] = frozenset(id(part) for part in parts)
    first = next((p for p in module.parameters() if p.requires_grad), None)
    return id(module) in _live[wrapper] or id(first) in _live[wrapper]


# ---- DDP's hidden state


_DDP_NAMES = (
    "_set_ddp_runtime_logging_sample_rate",
    "_get_ddp_logging_data",
    "logger",
    "reducer",
    "require_forward_param_sync",
)
_REMADE_BY = (
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_ddp_init_helper",
    "_set_static_graph",
    "bucket_bytes_cap",
)
_WAYS = ("mixed_precision", "_delay_all_reduce_params", "_use_python_reducer", "_accum_grad_hooks")
_REDUCER_NAMES = (
    "prepare_for_forward",
    "prepare_for_backward",
    "_autograd_hook",
    "_rebuild_buckets",
)

# A module -> its logger, which identifies its reducer; weak, since it keeps the buckets alive.
_IN_BACKWARD: WeakKeyDictionary[Any, tuple[Any, bool]] = WeakKeyDictionary()


def wrapped_in(module: nn.Module) -> dict[str, DistributedDataParallel]:
    """Return path -> DDP wrapper in a module: itself, under torch.compile's, or deeper."""
    parts = module.named_modules()
    return {path: part for path, part in parts if isinstance(part, DistributedDataParallel)}


def self_test(module: nn.Module, name: str) -> None:
    """Raise `ConfigurationError` if this torch lacks a name used by capture or apply."""
    if not isinstance(module, DistributedDataParallel):
        return
    missing = [f"DistributedDataParallel.{n}" for n in _DDP_NAMES if not hasattr(module, n)]
    missing += [f"Reducer.{n}" for n in _REDUCER_NAMES if not hasattr(module.reducer, n)]
    if missing:
        raise ConfigurationError(
            f"{name}: torch {torch.__version__} no longer has {', '.join(missing)}, so DDP's "
            "hidden state cannot be restored exactly",
            hint="use a torch version that trainckpt was tested with, or a newer trainckpt",
        )


def capture(module: nn.Module, known_order: str) -> dict[str, Any] | None:
    """Return DDP's hidden state, or None if `module` is no DDP wrapper. Collective.

    `known_order` is the bucket order of an earlier capture: once rebuilt it never changes.
    """
    if not isinstance(module, DistributedDataParallel):
        return None
    return {
        "bucket_order": known_order or _bucket_order(module),
        "forward_sync": bool(module.require_forward_param_sync),
        "own_way": _has_ways_of_its_own(module),
    }


def rounds_by_buckets(module: nn.Module) -> bool:
    """Return True if sums of gradients depend on the grouping into buckets.

    Two ranks add two numbers, in whatever group: a + b is b + a. A replay of the order costs an
    all-reduce of all gradients and the memory of all buckets. The first forward after the first
    backward makes those anyway.
    """
    if not isinstance(module, DistributedDataParallel):
        return False
    return module.process_group.size() > 2 or _has_ways_of_its_own(module)


def counts(hidden: dict[str, Any], ranks: int) -> bool:
    """Return True if captured state affects further training on so many ranks."""
    rounds = ranks > 2 or hidden.get("own_way", True)
    has_state = not hidden["forward_sync"] or hidden.get("hooks")
    return bool(has_state or (hidden["bucket_order"] and rounds))


def fits(module: nn.Module, hidden: dict[str, Any] | None) -> bool:
    """Return True for a DDP with as many parameters as captured, or if no order was captured."""
    if not hidden or not isinstance(module, DistributedDataParallel):
        return False
    number = len(hidden["bucket_order"].replace(",", " ").split())
    private: Any = module
    return number in (0, private._get_ddp_logging_data()["num_parameter_tensors"])


def apply_bucket_order(module: nn.Module, saved: dict[str, Any] | None) -> None:
    """Make DDP add gradients in the recorded buckets. Collective: all ranks call it."""
    if not saved or not saved["bucket_order"] or not isinstance(module, DistributedDataParallel):
        return
    buckets = [[int(i) for i in bucket.split()] for bucket in saved["bucket_order"].split(",")]
    if not module.static_graph:
        _replay(module, [index for bucket in buckets for index in bucket])
    elif _is_remade_whole(module):
        _make_reducer(module, buckets)
    for parameter in module.parameters():
        parameter.grad = None


def problems(module: nn.Module, name: str) -> list[str]:
    """Return the hidden state not restorable, one sentence each; `name`: the model's."""
    if not isinstance(module, DistributedDataParallel) or not module.static_graph:
        return []
    if _is_remade_whole(module) or not rounds_by_buckets(module):
        return []
    why = "with static_graph, whose reducer cannot be made anew, so after a resume"
    return [f"{name} is in a DDP {why} gradients are added in another order"]


def _replay(module: DistributedDataParallel, order: list[int]) -> None:
    """Rebuild the buckets by a backward with the parameters ready in this order."""
    reducer: Any = module.reducer
    reducer.prepare_for_forward()
    reducer.prepare_for_backward([])
    start = torch.zeros((), requires_grad=True, device="cpu")

    def call_hooks(_: torch.Tensor) -> None:
        for index in order:
            reducer._autograd_hook(index)

    start.register_hook(call_hooks)  # type: ignore[no-untyped-call]
    (start * 1).backward()  # type: ignore[no-untyped-call]
    _rebuild_buckets(module)


def _make_reducer(module: DistributedDataParallel, buckets: list[list[int]] | None = None) -> None:
    """Remake the reducer, with these buckets or DDP's initial ones."""
    private: Any = module
    c10d: Any = torch.distributed
    private.logger = private.reducer = None
    parameters, expect_sparse = private._build_params_for_reducer()
    names = private._build_debug_param_to_name_mapping(parameters)
    assign = c10d._compute_bucket_assignment_by_size

    def recorded(*_: Any) -> tuple[list[list[int]], list[int]]:
        backwards = (buckets or [])[::-1]  # DDP reverses them
        return backwards, [private.bucket_bytes_cap] * len(backwards)

    try:
        if buckets is not None:
            c10d._compute_bucket_assignment_by_size = recorded
        private._ddp_init_helper(parameters, expect_sparse, names, private.static_graph)
    finally:
        c10d._compute_bucket_assignment_by_size = assign
    private._has_rebuilt_buckets = False
    if private.static_graph:
        private.static_graph = False
        private._set_static_graph()
    for hook, state in getattr(private, "_comm_hooks", ()):
        private.logger._set_comm_hook_name(hook.__qualname__)
        c10d._register_comm_hook(private.reducer, state, hook)


def apply_used_parameters(
    module: nn.Module, saved: dict[str, Any] | None, used: Collection[torch.Tensor]
) -> None:
    """Mark parameters as used in the open window for DDP; overwrites their gradients.

    With `find_unused_parameters` the reducer remembers them over the window's no_sync
    micro-batches. Without the mark a parameter used only in an earlier micro-batch would not be
    reduced at the window's end, and the ranks would drift apart. A backward of zeros sets it.
    """
    inside_window = bool(saved) and not (saved or {})["forward_sync"]
    if not (isinstance(module, DistributedDataParallel) and module.find_unused_parameters):
        return
    own = {id(parameter) for parameter in module.parameters()}
    terms = [(p * 0).sum() for p in used if p.requires_grad and id(p) in own]
    if inside_window and terms:
        with module.no_sync():
            torch.stack([term.float() for term in terms]).sum().backward()  # type: ignore[no-untyped-call]


def apply_forward_sync(module: nn.Module, saved: dict[str, Any] | None) -> None:
    """Restore `require_forward_param_sync`."""
    if saved and isinstance(module, DistributedDataParallel):
        module.require_forward_param_sync = bool(saved["forward_sync"])


def let_go_of_buckets(module: nn.Module) -> Callable[[], None] | None:
    """Free DDP's buckets: they are unused between two backward passes.

    Returns:
        A function to remake them in the same order; collective. None if they stay: the module has
        none of its own, or its reducer has more state than can be remade.
    """
    private: Any = module
    if not isinstance(module, DistributedDataParallel) or not _is_plain(private):
        return None
    order, forward_sync = _bucket_order(module), module.require_forward_param_sync
    private.logger = private.reducer = None

    def make() -> None:
        gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
        _make_reducer(module)
        apply_bucket_order(module, {"bucket_order": order})
        for parameter, gradient in gradients:
            parameter.grad = gradient
        module.require_forward_param_sync = forward_sync

    return make


def _is_plain(module: Any) -> bool:
    """Return True if the reducer's state is only the parameters and the order of its buckets."""
    more = ("gradient_as_bucket_view", "find_unused_parameters", "static_graph")
    return not (
        _lacks_names(module)
        or _has_ways_of_its_own(module)
        or any(getattr(module, name) for name in more)
    )


def _is_remade_whole(module: Any) -> bool:
    """Return True if a reducer remade before the first backward equals the first one."""
    if _lacks_names(module) or any(getattr(module, name, None) for name in _WAYS):
        return False
    has_hook = module.logger is not None and module._get_ddp_logging_data().get("comm_hook")
    is_known = not has_hook or bool(getattr(module, "_comm_hooks", None))  # else one of C++
    return is_known and not _steps_in_backward(module, module.logger)


def _lacks_names(module: Any) -> bool:
    known = hasattr(torch.distributed, "_compute_bucket_assignment_by_size")
    return not known or any(not hasattr(module, name) for name in (*_DDP_NAMES, *_REMADE_BY))


def _has_ways_of_its_own(module: Any) -> bool:
    """Return True if gradients are reduced by other means than a plain sum of each bucket."""
    ways = (*_WAYS, "_comm_hooks")
    logger = module.logger
    return bool(
        any(getattr(module, name, None) for name in ways)
        or (logger is not None and module._get_ddp_logging_data().get("comm_hook"))
        or _steps_in_backward(module, logger)
    )


def _steps_in_backward(module: Any, logger: Any) -> bool:
    """Return True if optimizers step during backward, as first seen with this reducer.

    Cached for each save: a walk through a thousand parameters takes half a millisecond.
    """
    known = _IN_BACKWARD.get(module)
    if logger is None or known is None or known[0]() is not logger:
        found = any(hasattr(each, "_in_backward_optimizers") for each in module.parameters())
        if logger is None:
            return found
        known = _IN_BACKWARD[module] = ref(logger), found
    return known[1]


def _bucket_order(module: DistributedDataParallel) -> str:
    logger: Any = module.logger
    if logger is None or (module.find_unused_parameters and not module.static_graph):
        return ""  # with find_unused_parameters buckets are never rebuilt
    private: Any = module
    _rebuild_buckets(private)
    private._set_ddp_runtime_logging_sample_rate(1)
    logger.set_runtime_stats_and_log()
    data: dict[str, Any] = private._get_ddp_logging_data()
    return str(data.get("rebuilt_per_bucket_param_indices", ""))


def _rebuild_buckets(module: Any) -> None:
    """Rebuild the buckets if due, as each forward does first."""
    if module.reducer._rebuild_buckets():
        module._has_rebuilt_buckets = True

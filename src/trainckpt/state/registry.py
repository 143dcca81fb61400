"""The tracked objects, by name, sorted into kinds."""

from __future__ import annotations

import operator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from trainckpt.data.state_dict_methods import refuse_arguments
from trainckpt.errors import ConfigurationError
from trainckpt.format.changes import choice_by_kind
from trainckpt.format.exactness import How, Restored
from trainckpt.format.globs import select
from trainckpt.state import (
    attributes,
    imported,
    object_values,
    open_loaders,
    plain_tensors,
    script_objects,
    script_randomness,
    script_variables,
)
from trainckpt.state.adapters import (
    ddp,
    ddp_hooks,
    deepspeed_engine,
    fsdp,
    gradients,
    rng,
    tracked_file,
    tracked_run,
)
from trainckpt.state.adapters.ddp import inner_optimizer, unwrap, unwrap_optimizer
from trainckpt.state.adapters.deepspeed_engine import EngineState
from trainckpt.state.adapters.loader import LoaderState
from trainckpt.state.adapters.model import ModelState, keeps_own_state
from trainckpt.state.adapters.optimizer import OptimizerState, inner_optimizers
from trainckpt.state.adapters.partitioned_optimizer import PartitionedOptimizerState
from trainckpt.state.adapters.stateful import (
    GenericState,
    MetricState,
    is_metric,
    live_objects,
    metrics_in,
)
from trainckpt.state.adapters.tracked_file import TrackedFile
from trainckpt.state.adapters.unsupported import refuse
from trainckpt.state.attributes import Attributes, Watched
from trainckpt.state.capture import DDP, FSDP, LOADERS
from trainckpt.state.captured import VALUES
from trainckpt.state.dtensor import training_device
from trainckpt.state.object_values import ObjectValues
from trainckpt.state.plain_tensors import PlainTensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainckpt.data.loader import TrackedLoader
    from trainckpt.state.adapters.tracked_run import TrackedRun

K = TypeVar("K")
V = TypeVar("V")

# Parts of a snapshot belonging to no tracked object.
RESERVED = frozenset(
    (
        *(DDP, FSDP, LOADERS, VALUES, gradients.PART, rng.PART, tracked_file.PART),
        *(deepspeed_engine.PART, deepspeed_engine.WINDOW),
        tracked_run.PART,
        *(attributes.PART, attributes.GENERATORS, script_randomness.GENERATORS_PART),
        *(script_randomness.EPOCH_HEAD_PART, plain_tensors.PART, open_loaders.PART),
        *(script_variables.PART, script_objects.PART, object_values.PART, imported.PART),
    )
)


class Registry:
    """Tracked objects, in the order they were added.

    Attributes:
        models, optimizers, generics, loaders: The adapters, one a tracked object.
        engines: DeepSpeed engines; their modules and optimizers are among the others.
        files: Tracked files, which have a length and no other state.
        runs: Runs of experiment trackers, by name.
        left_s: Returns the seconds before a stop's deadline; None: there is none.
        epoch_head: Generators before the running epoch.
        open_loaders: Untracked loaders that the script is in the middle of.
        script_variables: Variables that the script carries from batch to batch.
        bucket_orders: DDP wrapper -> its rebuilt bucket order, once known.
        as_saved: DDP wrappers that add gradients as the resume's snapshot says.
        is_over: Training has ended; the script may have set the models to evaluation.
        has_peers: Several ranks train the same samples, and must draw the same for them.
        choices: Kind of change -> the value that counts at a resume, as in `format.changes`.
    """

    def __init__(
        self, *, has_peers: bool = False, choices: Mapping[str, str] | None = None
    ) -> None:
        self.has_peers = has_peers
        self.choices = choice_by_kind() if choices is None else choices
        self.is_over = False
        self.models: list[ModelState] = []
        self.optimizers: list[OptimizerState] = []
        self.generics: list[GenericState] = []
        self.loaders: list[LoaderState] = []
        self.engines: list[EngineState] = []
        self.files: list[TrackedFile] = []
        self.runs: dict[str, TrackedRun] = {}
        self.left_s: Callable[[], float | None] = lambda: None
        self.epoch_head = script_randomness.EpochHead(self)
        self.open_loaders = open_loaders.OpenLoaders()
        self.script_variables = script_variables.ScriptVariables(self)
        self.bucket_orders: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self.as_saved: WeakSet[nn.Module] = WeakSet()
        self._owners: dict[int, str] = {}
        # Sizes of parameter groups, walks and parameters, for which the tables in `_found` hold.
        self._proof: tuple[list[list[int]], list[Any]] = ([], [])
        self._found: dict[str, Any] = {}
        self._is_unchanged = False

    def add(self, name: str, value: Any) -> None:
        """Track `value` under `name`; the items of a list become `name.0`, `name.1`, ...

        Raises:
            ConfigurationError: No `state_dict`, tracked twice, or an unsupported kind.
        """
        if isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self.add(f"{name}.{i}", item)
            return
        if deepspeed_engine.is_engine(value):
            self._add_engine(name, value)
            return
        refuse(value, name)
        value = unwrap_optimizer(value)
        refuse(value, name)
        self._claim(name, value)
        if isinstance(value, nn.Module) and is_metric(value):
            self.generics.append(GenericState(name, MetricState(lambda: {"": value})))
        elif isinstance(value, nn.Module) and not _is_like_a_metric(value):
            model = ModelState(name, value)
            ddp.self_test(model.reducing, name)
            fsdp.self_test(value, name)
            self.models.append(model)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers.append(OptimizerState(name, value))
        elif callable(getattr(value, "state_dict", None)) and callable(
            getattr(value, "load_state_dict", None)
        ):
            refuse_arguments(value, name)
            self.generics.append(GenericState(name, deepspeed_engine.complete(value)))
        else:
            is_loader = isinstance(value, torch.utils.data.DataLoader)
            raise ConfigurationError(
                f"{name} is a {type(value).__name__}: neither an option of Checkpointer nor an "
                "object with state_dict and load_state_dict",
                hint=f"loader={name}"
                if is_loader
                else "check the keyword's spelling, or give the object both methods",
            )

    def _add_engine(self, name: str, engine: Any) -> None:
        """Track the module and the optimizer of a DeepSpeed engine; its schedule follows later."""
        state = EngineState(name, engine)
        if self.tracks(state.inner):
            raise ConfigurationError(
                f"{self._owners[id(state.inner)]} is the optimizer inside the DeepSpeed engine "
                f"{name}",
                hint=f"leave it out: {name}= tracks the engine's optimizer too",
            )
        self._claim(name, engine)
        self.add(name, engine.module)
        optimizer = PartitionedOptimizerState(f"{name}.optimizer", state)
        self._claim(optimizer.name, state.inner)
        self.optimizers.append(optimizer)
        self.engines.append(state)

    def add_implied(self) -> None:
        """Track unnamed metrics in models, schedules of engines, and optimizers in objects."""
        for engine in self.engines:
            schedule = engine.engine.lr_scheduler
            if schedule is not None and not self.tracks(schedule):
                self.add(f"{engine.name}.scheduler", schedule)
        for model in self.models:
            tracked = [g.target for g in self.generics if isinstance(g.target, MetricState)]
            metrics = metrics_in(model.module)
            if any(not any(t.holds(metric) for t in tracked) for metric in metrics):
                state = MetricState(partial(dict, {"": model.module}))
                implied = GenericState(f"{model.name}.metrics", state, implied=True)
                self._claim(implied.name, state)
                self.generics.append(implied)
        self._add_inner_optimizers()

    @cached_property
    def watched(self) -> Watched:
        """Return the watch on attributes missing from every state_dict, since its first use."""
        objects = [generic.target for generic in self.generics]
        return Watched(
            ((model.name, model.module) for model in self.models),
            objects,
            ((each.name, each.optimizer) for each in self.optimizers),
        )

    @cached_property
    def callback_values(self) -> ObjectValues:
        """Return the plain attributes of watched callbacks and trainers."""
        return ObjectValues(object_values.PART, self.watched.callbacks)

    @cached_property
    def plain_tensors(self) -> PlainTensors:
        """Return the tensors in plain attributes; the first use is at the start."""
        elsewhere = deepspeed_engine.ATTRIBUTES if self.engines else frozenset()
        return PlainTensors(self.watched.owners(), self.model_parameters, elsewhere)

    def _add_inner_optimizers(self) -> None:
        """Track the optimizers inside tracked objects, as `<name>.<attribute>`.

        SAM and Lookahead have one, and so do objects of a script's own. If their
        `load_state_dict` casts its moments, the implied optimizer restores them afterwards.
        """
        for generic in self.generics:
            inner = inner_optimizer(generic.target)
            if inner is not None:
                self._imply(f"{generic.name}.optimizer", inner)
            for key, value in live_objects(generic.target.state_dict()).items():
                if isinstance(value, torch.optim.Optimizer):
                    self._imply(f"{generic.name}.{key}", value)
        for outer in self.optimizers:  # including those added meanwhile
            for attribute, inner in inner_optimizers(outer.optimizer):
                if inner.state is not outer.optimizer.state:
                    self._imply(f"{outer.name}.{attribute}", inner)

    def _imply(self, name: str, inner: torch.optim.Optimizer) -> None:
        if not self.tracks(inner):
            refuse(inner, name)
            self._claim(name, inner)
            self.optimizers.append(OptimizerState(name, inner, implied=True))

    def problems(self) -> list[Restored]:
        """Return the state of models and optimizers not restorable exactly."""
        found = {model.name: model.problems() for model in self.models}
        for model in self.models:
            found[model.name] += ddp_hooks.problems(model.reducing, model.name, self.tracks)
        found |= {each.name: each.problems(self.tracks) for each in self.optimizers}
        return [
            Restored(name, How.NOT_KEPT, sentence)
            for name, sentences in found.items()
            for sentence in sentences
        ]

    def lacks(self) -> str:
        """Return a sentence if no weights or other state would be saved, or ""."""
        if self.models or self.optimizers or self.generics:
            return ""
        return (
            "no model and no optimizer is tracked, so none is saved: name them, as in "
            "Checkpointer(run, model=model, optimizer=optimizer, loader=loader)"
        )

    def add_loader(self, name: str, loader: TrackedLoader, wrapped: Any) -> None:
        """Track a loader under `name`; `wrapped` is the user's own object."""
        self._claim(name, wrapped)
        self.loaders.append(LoaderState(name, loader, self.choices))

    def tracked_places(self) -> set[tuple[int, str]]:
        """Return the id of each object with attributes tracked by `Attributes`, and their names."""
        objects = [each.target for each in self.generics]
        return {place for one in objects if isinstance(one, Attributes) for place in one.places}

    def add_file(self, file: Any) -> TrackedFile:
        """Track a file, by its path or as an open file; the same path gives the same object."""
        tracked = TrackedFile(file)
        for known in self.files:
            if known.path == tracked.path:
                return known
            if known.name == tracked.name:
                raise ConfigurationError(
                    f"two files are tracked as {tracked.name}: {known.path} and {tracked.path}",
                    hint="name at least one by its absolute path",
                )
        self.files.append(tracked)
        return tracked

    def exclude(self, globs: Iterable[str]) -> None:
        """Exclude these tensors of the models from captures; see `format.globs`.

        Raises:
            ConfigurationError: A glob matches no tensor of any model; names similar ones.
        """
        names = {model: frozenset(model.names()) for model in self.models}
        known = set(chain.from_iterable(names.values()))
        chosen = select(globs, known, [model.name for model in self.models])
        for model in self.models:
            model.excluded = names[model].intersection(chosen)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Return a context in which no model or optimizer gains or loses a parameter.

        Such as one boundary. Training thread. Contexts may be nested.
        """
        if self._is_unchanged:
            yield
            return
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.unchanged())
            sizes = [
                [len(group["params"]) for group in optimizer.optimizer.param_groups]
                for optimizer in self.optimizers
            ]
            objects: list[object] = [model.current_walk() for model in self.models]
            objects += [p for optimizer in self.optimizers for p in optimizer.parameters()]
            if sizes != self._proof[0] or not _are_same(objects, self._proof[1]):
                self._proof, self._found = (sizes, objects), {}
            self._is_unchanged = True
            try:
                yield
            finally:
                self._is_unchanged = False

    def _once(self, what: str, find: Callable[[], dict[K, V]]) -> dict[K, V]:
        """Return a table of parameters, made once as long as `unchanged` finds the same ones."""
        if not self._is_unchanged:
            return find()
        if what not in self._found:
            self._found[what] = find()
        found: dict[K, V] = self._found[what]
        return found

    def parameter_names(self) -> dict[int, str]:
        """Return id(parameter) -> full name, for the parameters of all tracked models."""
        return self._once(
            "names",
            lambda: {id(p): name for model in self.models for name, p in model.parameters()},
        )

    def model_parameters(self) -> dict[str, torch.Tensor]:
        """Return full name -> parameter, for all tracked models."""
        return self._once(
            "parameters",
            lambda: {name: p for model in self.models for name, p in model.parameters()},
        )

    def stepped_parameters(self) -> dict[str, torch.Tensor]:
        """Return full name -> model parameter, for those stepped by a tracked optimizer."""
        return self._once("stepped", self._find_stepped)

    def _find_stepped(self) -> dict[str, torch.Tensor]:
        stepped = {id(p) for optimizer in self.optimizers for p in optimizer.parameters()}
        return {name: p for name, p in self.model_parameters().items() if id(p) in stepped}

    def models_of(self, optimizer: OptimizerState) -> list[str]:
        """Return the models with parameters of this optimizer; "" for parameters of none."""
        return self._once("models", self._find_models)[optimizer.name]

    def _find_models(self) -> dict[str, list[str]]:
        known = self.parameter_names()
        return {
            each.name: sorted({known.get(id(p), "").partition("/")[0] for p in each.parameters()})
            for each in self.optimizers
        }

    def trained_parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> tensor, for all parameters of models, and others of optimizers."""
        return self._once("trained", self._find_trained)

    def _find_trained(self) -> dict[str, torch.Tensor]:
        found = dict(self.model_parameters())
        seen = {id(p) for p in found.values()}
        for optimizer in self.optimizers:
            if optimizer.is_partitioned:  # the gradients of partitions exist within a step alone
                continue
            for i, group in enumerate(optimizer.optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        found[f"{optimizer.name}.group{i}.{j}"] = parameter
        return found

    def all_parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all models and optimizers; some more than once."""
        for model in self.models:
            yield from (parameter for _, parameter in model.parameters())
        for optimizer in self.optimizers:
            yield from optimizer.parameters()

    def devices(self) -> list[torch.device]:
        """Return the devices of the computation, in the order of the first parameter on each."""
        parameters = list(self.all_parameters())
        devices = dict.fromkeys(parameter.device for parameter in parameters)
        if any(device.type == "cpu" for device in devices):  # some may be offloaded shards
            devices = dict.fromkeys(map(training_device, parameters))
        return list(devices)

    def names(self) -> Iterator[str]:
        """Yield the names of all models, optimizers, objects and loaders."""
        for kind in (self.models, self.optimizers, self.generics, self.loaders):
            for item in kind:
                yield item.name

    def tracks(self, value: object) -> bool:
        """Return True if `value` itself, or the module it wraps, is tracked."""
        return self._identity(value) in self._owners

    def _claim(self, name: str, value: object) -> None:
        if name in RESERVED:
            keywords = ", ".join(sorted(filter(str.isidentifier, RESERVED)))
            raise ConfigurationError(
                f"the name {name!r} is reserved, for a part of each snapshot",
                hint=f"choose another keyword; reserved are {keywords}",
            )
        if "/" in name or name in self.names():
            raise ConfigurationError(f"the name {name!r} is taken", hint="choose another keyword")
        owner = self._owners.setdefault(self._identity(value), name)
        if owner != name:
            raise ConfigurationError(
                f"{name} and {owner} are the same object", hint=f"track it once, as {owner}"
            )

    @staticmethod
    def _identity(value: object) -> int:
        value = unwrap(value) if isinstance(value, nn.Module) else unwrap_optimizer(value)
        return id(value)


def _are_same(objects: Sequence[object], then: Sequence[object]) -> bool:
    """Return True for the same objects in the same order."""
    return len(objects) == len(then) and all(map(operator.is_, objects, then))


def _is_like_a_metric(module: nn.Module) -> bool:
    """Return True for a module without parameters and with its own state methods, as a metric."""
    return keeps_own_state(module) and next(module.parameters(), None) is None

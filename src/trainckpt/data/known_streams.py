"""Streams of other libraries: what to refuse before training, and the numbers of their passes.

What their code shows (datasets 5.2, webdataset 1.0, mosaicml-streaming 0.13):

    datasets     the state lacks the shuffle buffer. A loader that resumes by that state drops the
                 buffer's samples; torch's DataLoader is tracked by trials, and fills it again
    webdataset   `shuffle` without a seed, and resampled shards that are not deterministic, are
                 seeded by the time: no resume repeats their order. A WebLoader has no position
    streaming    the number of the pass lies in memory shared with workers, which only the
                 library's own loader saves

No library is imported: classes are recognised by their names.

`pass_numbers` finds the numbers named `epoch` or `seed` inside a stream. A stage of a pipeline may
count its passes there, and seed its order by it (webdataset's detshuffle), or keep a seed there
that was drawn as it was made (webdataset's shardshuffle).

`outside_state` finds what a stream calls and its state does not hold: the functions of datasets.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import IterableDataset

from trainckpt.data.randomness import OBJECTS
from trainckpt.data.restored_numbers import attributes_inside
from trainckpt.data.state_dict_methods import has_state, is_of
from trainckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BUFFER = "BufferShuffledExamplesIterable"
_DEEPEST = 64  # stages inside each other


def refuse_lost_buffers(loader: Any, name: str) -> None:
    """Refuse a loader with its own state over a stream whose state lacks its shuffle buffer.

    Raises:
        ConfigurationError: As said.
    """
    if not any(map(_is_buffer, _stages(loader))):
        return
    kind = type(loader).__qualname__
    raise ConfigurationError(
        f"{name}: the state of {kind} lacks the shuffle buffer of the dataset inside it, so a "
        "resume would leave out the samples in the buffer",
        hint=f"use torch.utils.data.DataLoader in place of {kind}: a resume then fills the buffer "
        "again. Or shuffle the shards only, with buffer_size=1 and max_buffer_input_shards=1",
    )


def _is_buffer(stage: Any) -> bool:
    """Return True for a shuffle buffer of datasets with more than one sample."""
    is_one = type(stage).__name__ == _BUFFER and is_of(stage, "datasets")
    return is_one and getattr(stage, "buffer_size", 0) != 1


def refuse_unrepeatable(dataset: Any, name: str) -> None:
    """Refuse a pipeline of webdataset with an order that is seeded by the time.

    Raises:
        ConfigurationError: Names the stage, and the line to change.
    """
    for stage in _stages(dataset):
        if _is_unseeded_shuffle(stage):
            raise ConfigurationError(
                f"{name}: a shuffle of this {type(dataset).__qualname__} has no seed, and takes "
                "the time for one: no resume could repeat its order",
                hint="write .shuffle(1000, seed=0), or, for another order in each epoch, "
                ".compose(webdataset.detshuffle(1000, seed=0))",
            )
        if _is_unseeded_resampling(stage):
            raise ConfigurationError(
                f"{name}: the shards of this {type(dataset).__qualname__} are resampled by a seed "
                "from the time: no resume could repeat their order",
                hint="build the pipeline of webdataset.ResampledShards(urls, deterministic=True), "
                "webdataset.tarfile_to_samples() and the other stages",
            )


def _is_unseeded_shuffle(stage: Any) -> bool:
    function = getattr(stage, "f", None)
    if getattr(function, "__name__", "") != "_shuffle" or not is_of(function, "webdataset"):
        return False
    given = {
        **dict(zip(("bufsize", "initial", "rng", "seed"), stage.args, strict=False)),
        **stage.kw,
    }
    return given.get("seed") is None and given.get("rng") is None and given.get("bufsize") != 1


def _is_unseeded_resampling(stage: Any) -> bool:
    function = getattr(stage, "f", None)
    if getattr(function, "__name__", "") == "resampled_" and is_of(function, "webdataset"):
        return True
    is_list = type(stage).__name__ == "ResampledShards" and is_of(stage, "webdataset")
    return is_list and not stage.deterministic


def _stages(holder: Any) -> Iterator[Any]:
    """Yield the parts of a pipeline: those of a loader, of datasets, and of webdataset."""
    queue, seen = [(holder, 0)], set()
    for value, depth in queue:
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        names = getattr(value, "__dict__", None) or {}
        inner = [names.get(key) for key in _INNER]
        inner += [
            one for part in inner if isinstance(part, (list, tuple)) for one in part[:OBJECTS]
        ]
        is_own = depth and has_state(value) and not _is_of_library(value)
        # a script's own state may hold more than what is inside
        if depth < _DEEPEST and not is_own:
            stages = (one for one in inner if hasattr(one, "__dict__"))
            queue += [(one, depth + 1) for one in islice(stages, OBJECTS - len(queue))]


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("datasets", "torch", "torchdata")


_INNER = (
    *("dataset", "root", "source", "iterable"),  # of DataLoaders and torchdata's nodes
    *("_ex_iterable", "ex_iterable", "ex_iterables"),  # of datasets
    *("pipeline", "datasets"),  # of webdataset; of torch's chains
)


# ---- what a state does not hold


def outside_state(roots: Mapping[str, Any]) -> dict[str, Any]:
    """Return the roots, with the functions and generators of a stream of datasets in its place.

    Its state is a position. Each pass begins at the first sample, so no other part is left changed.
    """
    found = dict(roots)
    if not is_of(roots.get("dataset"), "datasets"):
        return found
    stages = [getattr(stage, "__dict__", {}) for stage in _stages(found.pop("dataset"))]
    for key in _CALLED:
        parts = [stage[key] for stage in stages if stage.get(key) is not None]
        found.update({f"{key}[{number}]": part for number, part in enumerate(parts)})
    return found


_CALLED = ("function", "fn_kwargs", "generate_examples_fn", "kwargs", "generator")


# ---- the numbers of passes


# its path, the namespace and the name there, and the value if the name is of the class alone
PassNumber: TypeAlias = tuple[str, dict[Any, Any], Any, float]
_NAMES = (".epoch", ".seed", "['epoch']", "['seed']")
_NUMBERS = (int, float)


def pass_numbers(dataset: Any) -> dict[str, float]:
    """Return path -> value of the numbers named `epoch` or `seed` inside a stream."""
    return values_of(find_pass_numbers(dataset))


def values_of(numbers: list[PassNumber]) -> dict[str, float]:
    """Return path -> present value, of those that are numbers still."""
    values = {path: names.get(key, default) for path, names, key, default in numbers}
    return {path: value for path, value in values.items() if type(value) in _NUMBERS}


def restore_pass_numbers(dataset: Any, saved: Mapping[str, float]) -> None:
    """Set the result of `pass_numbers`."""
    for path, names, key, _ in find_pass_numbers(dataset) if saved else ():
        if path in saved:
            names[key] = saved[path]


def find_pass_numbers(dataset: Any) -> list[PassNumber]:
    """Return where the numbers lie that `pass_numbers` returns."""
    if not isinstance(dataset, IterableDataset):
        return []
    return [
        (path, names, key, value)
        for path, names, key, value in attributes_inside({"dataset": dataset})
        if is_pass_number(path, type(value)) and names.get(key, value) is value
    ]


def is_pass_number(path: str, kind: type | None) -> bool:
    """Return True for path and type of a number that `pass_numbers` returns."""
    return path.startswith("dataset") and path.endswith(_NAMES) and kind in _NUMBERS

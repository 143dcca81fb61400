"""Streams of other libraries: what to refuse before training, and the numbers of their passes.

What their code shows (datasets 5.2, webdataset 1.0, mosaicml-streaming 0.13):

    datasets     the state lacks the shuffle buffer. A loader that resumes by that state drops the
                 buffer's samples; torch's DataLoader is tracked by trials, and fills it again
    webdataset   `shuffle` without a seed, and resampled shards that are not deterministic, are
                 seeded by the time: no resume repeats their order. A WebLoader has no position
    streaming    the number of the pass lies in memory shared with workers, which only the
                 library's own loader saves

No library is imported: classes are recognised by their names.

`pass_numbers` finds the attributes named `epoch` inside a stream without a state. A stage of a
pipeline may count its passes there (webdataset's detshuffle), and seed its order by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch.utils.data import IterableDataset

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
    if not any(type(stage).__name__ == _BUFFER for stage in _stages(loader)):
        return
    kind = type(loader).__qualname__
    raise ConfigurationError(
        f"{name}: the state of {kind} lacks the shuffle buffer of the dataset inside it, so a "
        "resume would leave out the samples in the buffer",
        hint=f"use torch.utils.data.DataLoader in place of {kind}: a resume then fills the buffer "
        "again. Or shuffle the shards only, with buffer_size=1",
    )


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
        if type(stage).__name__ == "ResampledShards" and not stage.deterministic:
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
        inner += [one for part in inner if isinstance(part, (list, tuple)) for one in part]
        is_own = depth and has_state(value) and not _is_of_library(value)
        if (
            depth < _DEEPEST and not is_own
        ):  # a script's own state may hold more than what is inside
            queue += [(one, depth + 1) for one in inner if hasattr(one, "__dict__")]


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("datasets", "torch", "torchdata")


_INNER = (
    *("dataset", "root", "source", "iterable"),  # of DataLoaders and torchdata's nodes
    *("_ex_iterable", "ex_iterable", "ex_iterables"),  # of datasets
    *("pipeline", "datasets"),  # of webdataset; of torch's chains
)


# ---- the numbers of passes


# its path, and the namespace and the name there
PassNumber: TypeAlias = tuple[str, dict[Any, Any], Any]


def pass_numbers(dataset: Any) -> dict[str, int]:
    """Return path -> value of the integers named `epoch` inside a stream without a state."""
    return {path: names[key] for path, names, key in find_pass_numbers(dataset)}


def restore_pass_numbers(dataset: Any, saved: Mapping[str, int]) -> None:
    """Set the result of `pass_numbers`."""
    for path, names, key in find_pass_numbers(dataset) if saved else ():
        names[key] = saved.get(path, names[key])


def find_pass_numbers(dataset: Any) -> list[PassNumber]:
    """Return where the integers lie that `pass_numbers` returns."""
    if not isinstance(dataset, IterableDataset) or has_state(dataset):  # which holds them
        return []
    return [
        (path, names, key)
        for path, names, key, value in attributes_inside({"dataset": dataset})
        if is_pass_number(path) and type(value) is int and names.get(key) is value
    ]


def is_pass_number(path: str) -> bool:
    """Return True for the path of a number that `pass_numbers` returns."""
    return path.startswith("dataset") and path.endswith(".epoch")

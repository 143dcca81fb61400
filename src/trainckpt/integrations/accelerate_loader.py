"""Track a loader prepared by Accelerate.

Accelerate reads one batch ahead, to know the last one. Its own code goes on doing that; during a
pass it reads from trainckpt's iterator instead of the DataLoader's. See `data.sources`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainckpt.data.prefetching import PrefetchingSource
from trainckpt.data.sampler import length, samplers_of
from trainckpt.errors import ConfigurationError
from trainckpt.integrations.compat import check, check_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainckpt.format.exactness import Report

_LOADERS = "accelerate.data_loader"
_RELIED = (
    (f"{_LOADERS}:DataLoaderShard", "adjust_state_dict_for_prefetch", "reads one ahead"),
    (f"{_LOADERS}:DataLoaderShard", "set_epoch", "tells the samplers the epoch"),
    (f"{_LOADERS}:DataLoaderDispatcher", "__iter__", "reads on rank 0 alone"),
    (f"{_LOADERS}:BatchSamplerShard", "__len__", "deals batches over the ranks"),
)
# attributes made in __init__ are not on the class
_USED = (
    (f"{_LOADERS}:DataLoaderAdapter.__init__", ("base_dataloader",)),
    (f"{_LOADERS}:DataLoaderShard.__init__", ("rng_types", "skip_batches", "iteration")),
    (
        f"{_LOADERS}:DataLoaderShard.__iter__",
        ("base_dataloader", "rng_types", "iteration", "__iter__"),
    ),
    (
        f"{_LOADERS}:BatchSamplerShard.__len__",
        ("process_index", "num_processes", "even_batches"),
    ),
)


def check_loaders() -> None:
    """Raise `ConfigurationError` if the loaders of this Accelerate are built in another way."""
    check("accelerate", _RELIED)
    check_code("accelerate", _USED)


class PreparedLoader:
    """The argument of `Checkpointer.loader` for a loader prepared by Accelerate.

    Args:
        shard: The prepared loader.
        name: Its name in messages.

    Raises:
        ConfigurationError: Its position cannot be saved exactly; says why and what to do.
    """

    def __init__(self, shard: Any, name: str = "the loader") -> None:
        refuse_loader(shard, name)
        self.shard = shard

    def __iter__(self) -> Iterator[Any]:
        return iter(self.shard)

    def __len__(self) -> int:
        return len(self.shard)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "shard":  # not constructed yet: copy or pickle is asking
            raise AttributeError(attribute)
        return getattr(self.shard, attribute)

    def __trainckpt_source__(self, name: str, report: Report) -> PrefetchingSource:
        return PrefetchingSource(ShardReader(self.shard), self.shard.base_dataloader, name, report)


class ShardReader:
    """Accelerate's DataLoaderShard on trainckpt's iterator; a `prefetching.PrefetchReader`."""

    elsewhere = (
        "Accelerate divides the batches over its processes, and the rest of an epoch cannot be "
        "divided over another number of them; resume with as many processes as the run had"
    )

    def __init__(self, shard: Any) -> None:
        _make_generators(shard)
        self.shard = shard

    def read(self, open_it: Callable[[], Iterator[Any]], *, resumed: bool) -> Iterator[Any]:
        """Yield one pass. A resumed pass does not synchronize generators: they already agree.

        Raises:
            ConfigurationError: `join_uneven_inputs` divides it unevenly by now.
        """
        shard = self.shard
        _refuse_uneven(shard, "the loader")
        under, rng_types = shard.base_dataloader, shard.rng_types

        def opened() -> Iterator[Any]:
            shard.base_dataloader, shard.rng_types = under, rng_types
            return open_it()

        shard.base_dataloader = _Underneath(under, opened)
        if resumed:
            shard.rng_types = None
        try:
            yield from iter(shard)
        finally:
            shard.base_dataloader, shard.rng_types = under, rng_types

    def goes_on(self) -> None:
        """Set the epoch of samplers and dataset: workers get the dataset in that state."""
        self.shard.set_epoch(self.shard.iteration)

    def was_over(self) -> None:
        """Count a pass already read to its end."""
        self.shard.iteration += 1

    def state(self) -> dict[str, Any]:
        """Return the number of passes read to the end: Accelerate's own epoch."""
        return {"iteration": self.shard.iteration}

    def load(self, state: dict[str, Any]) -> None:
        """Restore that number."""
        self.shard.iteration = state["iteration"]

    def facts(self) -> dict[str, Any]:
        """Return the division of batches over processes."""
        dealt = dealt_over(self.shard)
        return {
            "processes": getattr(dealt, "num_processes", 1),
            "split_batches": bool(getattr(dealt, "split_batches", False)),
            "even_batches": bool(getattr(dealt, "even_batches", True)),
        }


class _Underneath:
    """A substitute for the DataLoader at the start of a pass, with trainckpt's iterator."""

    def __init__(self, loader: DataLoader[Any], opened: Callable[[], Iterator[Any]]) -> None:
        self._loader = loader
        self._opened = opened

    def __iter__(self) -> Iterator[Any]:
        return self._opened()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._loader, attribute)


def _make_generators(shard: Any) -> None:
    # Accelerate's seedable sampler makes its generator at its first pass, and seeds it at each.
    # Made now, the loader's state has the same form before and after.
    for _, sampler in samplers_of(shard.base_dataloader):
        if hasattr(sampler, "initial_seed") and sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)


def dealt_over(shard: Any) -> Any:
    """Return the batch sampler dividing batches over processes; None in one process."""
    import accelerate.data_loader

    under = shard.base_dataloader
    for sampler in (under.batch_sampler, under.sampler):
        if isinstance(sampler, accelerate.data_loader.BatchSamplerShard):
            return sampler
    return None


def refuse_loader(shard: Any, name: str) -> None:
    """Raise `ConfigurationError` if this loader's position cannot be saved exactly."""
    import accelerate.data_loader as kinds

    if issubclass(type(shard), kinds.DataLoaderDispatcher):
        raise ConfigurationError(
            f"{name} is read by process 0 alone, which sends batches to the others "
            "(dispatch_batches=True, or an IterableDataset), so no process knows its own position",
            hint="use a map-style dataset, and leave dispatch_batches=None or False",
        )
    if not issubclass(type(shard), kinds.DataLoaderShard):
        raise ConfigurationError(
            f"{name} is a {type(shard).__qualname__}, which accelerator.prepare did not return",
            hint="loader = accelerator.prepare(loader), then ckpt.loader(loader)",
        )
    under = shard.base_dataloader
    if isinstance(under.dataset, IterableDataset):
        raise ConfigurationError(
            f"{name} reads an IterableDataset, whose position Accelerate does not keep",
            hint="use a map-style dataset",
        )
    if type(under) is not DataLoader:
        raise ConfigurationError(
            f"{name} is read through a {type(under).__qualname__}, which keeps no worker's "
            "randomness",
            hint="leave use_stateful_dataloader=False: trainckpt keeps the position itself",
        )
    if shard.skip_batches or isinstance(under.batch_sampler, kinds.SkipBatchSampler):
        raise ConfigurationError(
            f"{name} comes from skip_first_batches, and would skip them in every epoch",
            hint="pass the prepared loader itself: trainckpt goes on at the right batch",
        )
    _refuse_uneven(shard, name)


def _refuse_uneven(shard: Any, name: str) -> None:
    dealt = dealt_over(shard)
    if dealt is None or dealt.even_batches:
        return
    other, lengths = copy.copy(dealt), set()
    for rank in range(dealt.num_processes):
        other.process_index = rank
        lengths.add(length(other))
    if dealt.split_batches and not dealt.drop_last:  # its length is the same for all, and wrong
        lengths |= {len(dealt) - int(misses) for misses in _miss_last_part(dealt)}
    if len(lengths) > 1:
        raise ConfigurationError(
            f"{name} gives the processes different numbers of batches "
            f"({sorted(map(str, lengths))}), so some would wait for others at a stop",
            hint="leave even_batches=True, also in join_uneven_inputs, or use drop_last=True",
        )


def _miss_last_part(dealt: Any) -> list[bool]:
    """Return for each process whether it gets no part of the last, shorter batch."""
    samples = length(getattr(dealt.batch_sampler, "sampler", None))
    if samples is None or not dealt.batch_size:
        return []  # a batch sampler of another kind
    last, part = samples % dealt.batch_size, dealt.batch_size // dealt.num_processes
    return [0 < last <= part * rank for rank in range(dealt.num_processes)]

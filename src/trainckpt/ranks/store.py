"""Exchange small JSON values between ranks, over the store of torch.distributed.

No collective and no socket of our own: keys in the default process group's store (a TCPStore as a
rule), under "trainckpt/<namespace>". The namespace holds the attempt's number, so that a restart in
the same store never sees an old value. Nothing is pickled.

Two facts about stores shape this file (both tried, torch 2.13):
  * a blocking `wait` stalls every other call of the same client, so a waiting thread uses a
    connection of its own (`connection`), and never the client of the training;
  * a `wait` that times out makes c10d write warnings to stderr, so nothing here waits in slices:
    a thread that may have to be woken waits for a key that its waker can set.

Threads: any. Foreign errors leave as `NoAgreement`: without the store there is none.
"""

from __future__ import annotations

import json
import math
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from trainckpt.errors import (
    ConfigurationError,
    NoAgreement,
    NothingToResume,
    StateMismatch,
    TierUnavailable,
    TrainckptError,
    UnusableSnapshot,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainckpt.ranks.world import World

    Result = TypeVar("Result")


DAY_S = 86400.0
RANKS_TIMEOUT_S = 600.0  # to wait for an answer of all ranks, unless a deadline is nearer
_ARRIVED, _ALL_HERE, _FOLDED = "arrived", "all here", "folded"
WAITED = "see in their logs where the other ranks are: one of them hangs, or has ended"
Store = Any  # torch.distributed.Store, not exported to type checkers


class RankStore:
    """Keys and JSON values shared by all ranks of one attempt. Any thread, any order.

    A value is never `null`: `peek` returns None for a missing key.

    Attributes:
        torch_store: The torch store; our keys lie under its prefix.
    """

    def __init__(self, world: World, store: Store, prefix: str = "", made_of: Any = None) -> None:
        self.world = world
        self.torch_store = store
        self._made_of = made_of
        self._prefix = prefix

    def full(self, key: str) -> str:
        """Return the key as stored."""
        return self._prefix + key

    def put(self, key: str, value: Any) -> None:
        """Set `key`; an older value is replaced."""
        self._ask("set", key, lambda: self.torch_store.set(self._prefix + key, _dump(value)))

    def put_all(self, values: Mapping[str, Any]) -> None:
        """Set many keys, in one message if the store supports it."""
        keys = [self._prefix + key for key in values]
        texts = [_dump(value) for value in values.values()]
        self._ask("set", ", ".join(values), lambda: self.torch_store.multi_set(keys, texts))

    def peek(self, key: str) -> Any:
        """Return the value, or None if the key is not there. Does not block."""
        return self.peek_all([key])[0]

    def peek_all(self, keys: Sequence[str]) -> list[Any]:
        """`peek` for each key; one message if all are there."""
        full = [self._prefix + key for key in keys]
        return self._ask("read", ", ".join(keys), lambda: self._read(full))

    def propose(self, key: str, value: Any) -> Any:
        """Set `key` unless it exists. Return the value that stands: the first."""
        full, text = self._prefix + key, _dump(value)
        return json.loads(
            self._ask("set", key, lambda: self.torch_store.compare_set(full, "", text))
        )

    def count(self, key: str, by: int = 1) -> int:
        """Add `by` to a counter (absent: 0) and return the sum. A counter is no value."""
        return int(self._ask("count", key, lambda: self.torch_store.add(self._prefix + key, by)))

    def wait(self, key: str, timeout_s: float) -> bool:
        """Block until `key` is there; False after `timeout_s`.

        A time-out also makes c10d write a warning to stderr.
        """
        limit = timedelta(seconds=max(timeout_s, 0.001))
        try:
            self.torch_store.wait([self._prefix + key], limit)
        except RuntimeError as error:
            if _is_timeout(error):
                return False
            raise self._gone("wait for", key, error) from error
        return True

    def forget(self, keys: Sequence[str]) -> None:
        """Delete keys, values and counters without readers. One message each."""
        for key in keys:
            self._ask("delete", key, partial(self.torch_store.delete_key, self._prefix + key))

    def scoped(self, prefix: str) -> RankStore:
        """Return the same store with every key under `prefix`."""
        return RankStore(self.world, self.torch_store, f"{self._prefix}{prefix}/", self)

    def connection(self) -> RankStore:
        """Return the same channel on a store connection of its own, for a waiting thread."""
        store = self._ask("connect", self._prefix, lambda: own_connection(self.torch_store))
        return RankStore(self.world, store, self._prefix, self)

    def get(self, key: str, timeout_s: float) -> Any:
        """Block until `key` is there, and return its value.

        Raises:
            NoAgreement: it was not there after `timeout_s`.
        """
        if not self.wait(key, timeout_s):
            raise NoAgreement(
                f"rank {self.world.rank} waited {timeout_s:g} s for {key!r}: no rank brought it",
                hint=WAITED,
            )
        return self.peek(key)

    def gather(self, key: str, value: Any, timeout_s: float) -> list[Any]:
        """Exchange one value per rank; return all of them, in the order of ranks.

        Each rank calls it once per key.

        Raises:
            NoAgreement: after `timeout_s` some rank has not called; the message names it.
        """
        ranks = range(self.world.size)
        self.put(f"{key}/{self.world.rank}", value)
        self._assemble(key, timeout_s)
        return self.peek_all([f"{key}/{rank}" for rank in ranks])

    def fold(
        self, key: str, value: Any, function: Callable[[list[Any]], Any], timeout_s: float
    ) -> Any:
        """Reduce one value of every rank on rank 0 with `function`, and return the result on
        every rank.

        Less traffic than `gather` with many ranks. `function` must not raise.

        Raises:
            NoAgreement: after `timeout_s` some rank has not called.
        """
        self.put(f"{key}/{self.world.rank}", value)
        self._assemble(key, timeout_s)
        if self.world.rank == 0:
            made = function(self.peek_all([f"{key}/{rank}" for rank in range(self.world.size)]))
            self.put(f"{key}/{_FOLDED}", made)
            return made
        return self.get(f"{key}/{_FOLDED}", timeout_s)

    def fold_keys(self, key: str) -> list[str]:
        """Return the keys a `fold` leaves beside each rank's own `<key>/<rank>`."""
        return [f"{key}/{each}" for each in (_ARRIVED, _ALL_HERE, _FOLDED)]

    def barrier(self, key: str, timeout_s: float) -> None:
        """Return once every rank has called it with this key; each calls it once per key.

        Raises:
            NoAgreement: after `timeout_s` some rank has not called; the message names it.
        """
        self.gather(key, True, timeout_s)

    def _assemble(self, key: str, timeout_s: float) -> None:
        """Wait for all ranks: the last to arrive sets one key for the others. Few messages per
        rank."""
        arrived = self.count(f"{key}/{_ARRIVED}")
        if arrived > self.world.size:
            # Ranks that met under this key before would read each other's old values.
            raise AssertionError(f"rank {self.world.rank} exchanged {key!r} a second time")
        if arrived == self.world.size:
            self.put(f"{key}/{_ALL_HERE}", True)
        elif not self.wait(f"{key}/{_ALL_HERE}", timeout_s):
            here = self.peek_all([f"{key}/{rank}" for rank in range(self.world.size)])
            missing = ", ".join(str(rank) for rank, value in enumerate(here) if value is None)
            raise NoAgreement(
                f"rank {self.world.rank} waited {timeout_s:g} s for {key!r} from rank {missing}",
                hint=WAITED,
            )

    def _read(self, keys: list[str]) -> list[Any]:
        if self.torch_store.check(keys):
            return [json.loads(text) for text in self.torch_store.multi_get(keys)]
        if len(keys) == 1:
            return [None]
        return [self._read([key])[0] for key in keys]

    def _ask(self, verb: str, key: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except RuntimeError as error:
            raise self._gone(verb, key, error) from error

    def _gone(self, verb: str, key: str, error: RuntimeError) -> NoAgreement:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return NoAgreement(
            f"rank {self.world.rank} could not {verb} {key[:80]!r}: the store of "
            f"torch.distributed did not answer ({first_line})",
            hint="see how the process that holds the store (rank 0 or its torchrun) ended",
        )


def connect(world: World, namespace: str) -> RankStore:
    """Return the store between the ranks of `world`, on a connection of its own.

    Args:
        world: From `current_world`. One rank needs no store and no process group.
        namespace: Names the run and its attempt, the same on all ranks, such as "gpt/3".
    """
    if world.size == 1:
        return local_store(world).scoped(namespace)
    shared = RankStore(world, _default_store(), f"trainckpt/{namespace}/")
    return shared.connection()


def local_store(world: World) -> RankStore:
    """Return the store of a single rank, inside this process."""
    return RankStore(world, torch.distributed.HashStore())  # type: ignore[attr-defined]


def own_connection(store: Store, *, clone: bool = True) -> Store:
    """Return a second connection to the store behind `torch_store`.

    From torch 2.8 on `Store.clone` makes one and keeps the prefixes. Before, a new TCPStore client
    is made and the prefixes are lost (they cannot be read), on all ranks alike: our own namespace
    keeps us apart. Other stores hold no connection that a wait could stall.
    """
    if clone and hasattr(store, "clone"):
        return store.clone()
    innermost = store
    while hasattr(innermost, "underlying_store"):
        innermost = innermost.underlying_store
    if not hasattr(innermost, "host"):
        return innermost
    return type(innermost)(
        innermost.host, innermost.port, is_master=False, timeout=innermost.timeout
    )


def collective_timeout_s() -> float:
    """Return how long training's own collectives wait for a rank, in seconds; infinity if
    unknown."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return math.inf
    try:
        from torch.distributed import distributed_c10d

        group: Any = distributed_c10d._get_default_group()
        backends = [group._get_backend(device) for device in group._device_types]
        found = [backend.options._timeout.total_seconds() for backend in backends]
    except (AttributeError, RuntimeError, ValueError):  # a backend without such options
        return math.inf
    return min(found, default=math.inf)


def _default_store() -> Store:
    from torch.distributed import distributed_c10d

    try:
        return distributed_c10d._get_default_store()
    except (AttributeError, ValueError) as error:
        raise ConfigurationError(
            f"torch.distributed gives no store to agree over ({error})",
            hint="call torch.distributed.init_process_group before Checkpointer",
        ) from error


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _is_timeout(error: RuntimeError) -> bool:
    lost = getattr(torch.distributed, "DistNetworkError", ())
    return not isinstance(error, lost) and "timeout" in str(error).lower()


# ---- errors between ranks, as JSON, so that all ranks end by the same one


_CLASSES = {
    cls.__name__: cls
    for cls in (
        ConfigurationError,
        NothingToResume,
        TierUnavailable,
        UnusableSnapshot,
        TrainckptError,
    )
}


def to_json(error: TrainckptError) -> dict[str, Any]:
    """Return the error as JSON values."""
    name = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _CLASSES), "")
    values: dict[str, Any] = {"class": name, "message": error.message, "hint": error.hint}
    if isinstance(error, StateMismatch):
        values["differences"] = list(error.differences)
        values["what"] = error.what
    return values


def from_json(data: dict[str, Any]) -> TrainckptError:
    """Return the error from the result of `to_json`."""
    if "differences" in data:
        return StateMismatch(data["what"], data["differences"], hint=data["hint"])
    cls = _CLASSES.get(data["class"], TrainckptError)
    return cls(data["message"], hint=data["hint"])


def gather_or_raise(
    channel: RankStore, key: str, call: Callable[[], Result], timeout_s: float
) -> list[Result]:
    """Return every rank's result of `call`, or raise the error of the first failed rank on all."""
    result: dict[str, Any]
    own_error: TrainckptError | None = None
    try:
        result = {"value": call()}
    except TrainckptError as error:
        own_error, result = error, {"error": to_json(error)}
    everyone = channel.gather(key, result, timeout_s)
    for rank, other in enumerate(everyone):
        if "error" in other:
            raise (
                own_error if own_error and rank == channel.world.rank else from_json(other["error"])
            )
    return [other["value"] for other in everyone]

"""What runs inside a DataLoader worker: the tap that sends its randomness home with each batch.

A worker runs ahead of the trainer by some batches, so its generators "now" are of no use: wanted is
what they were after the last batch that was *consumed*. So each batch carries them, each generator
only if it changed since that worker's last batch; the main process keeps the latest it unpacked.

    worker starts  `WorkerStart`: shield, the user's worker_init_fn, then the saved generators
    each batch     `Tap`: the user's collate_fn, then (batch, worker, what changed)

So do the generators that its copies of dataset and collate_fn hold (own_random.py), as one, and
what these carry from batch to batch (carried.py).

Everything is at module level and picklable: spawn and forkserver send it to the worker. Exceptions
of the user's code pass through torch's ExceptionWrapper and are never wrapped here.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from trainckpt.data import carried, own_random
from trainckpt.data.carried import Carried, Seen, Watch
from trainckpt.data.randomness import changed_since, packed_rng, set_main_rng
from trainckpt.data.shield import shield_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OWN = "own"  # generators that the data holds
CARRIED = "carried"  # states of the data's own
_told: dict[str, bytes] = {}  # in a worker: its generators as the main process knows them
_watches: list[Watch] = []  # in a worker: the one that looks at its data


class Tapped(NamedTuple):
    """A batch on its way home; None means "as at this worker's last batch".

    Flat, because pin_memory rebuilds named tuples and passes ints, bytes and None untouched, but
    turns inner tuples into lists.
    """

    batch: Any
    worker: int
    python: bytes | None = None
    numpy: bytes | None = None
    torch: bytes | None = None
    own: bytes | None = None
    carried: Carried | None = None
    changing: bytes | None = None

    def changed(self) -> dict[str, Any]:
        """Return the generators that this batch changed, by name, and what the data carries."""
        states = None if self.carried is None else self.carried.states
        named = {
            "python": self.python,
            "numpy": self.numpy,
            "torch": self.torch,
            OWN: self.own,
            CARRIED: states,
        }
        return {key: value for key, value in named.items() if value is not None}

    def changes(self) -> Seen | None:
        """Return the attributes of the data that are seen to change and are not kept."""
        return None if self.changing is None else Seen(*json.loads(self.changing))


class Tap:
    """The user's collate_fn, with the worker's randomness added to what it returns.

    Attributes:
        carries: What the data carries from batch to batch counts; else it is loaded again.
    """

    def __init__(self, collate: Callable[[Any], Any], *, carries: bool) -> None:
        self.collate = collate
        self.carries = carries

    def data(self) -> dict[str, Any]:
        """What may hold generators, in a worker."""
        worker = get_worker_info()
        return {"dataset": None if worker is None else worker.dataset, "collate_fn": self.collate}

    def __call__(self, samples: Any) -> Any:
        """Collate, and add what this batch changed."""
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        news = changed_since(_told)
        own = own_random.pack(own_random.capture(self.data()))
        if own != _told.get(OWN, b""):
            news[OWN] = own
        _told.update(news)
        states = carried.capture(self.data()) if self.carries else {}
        changing = _watches[0].look() if _watches else None
        return Tapped(
            batch,
            worker.id,
            **news,
            carried=Carried(states) if states else None,
            changing=None if changing is None else json.dumps(changing).encode(),
        )


class WorkerStart:
    """The user's worker_init_fn, shielded before and with the saved generators put back after."""

    def __init__(
        self,
        user: Callable[[int], None] | None,
        saved: Mapping[int, dict[str, Any]],
        tap: Tap,
    ) -> None:
        self.user = user
        self.tap = tap
        self.saved = saved

    def __call__(self, worker: int) -> None:
        """Run in the new worker, once."""
        shield_worker()
        if self.user is not None:
            self.user(worker)
        if worker in self.saved:
            set_main_rng(self.saved[worker])
            own = own_random.unpack(self.saved[worker].get(OWN, b""))
            lost = own_random.restore(self.tap.data(), own, f"worker {worker}")
            if lost:
                warnings.warn(lost, stacklevel=2)
            carried.restore(self.tap.data(), self.saved[worker].get(CARRIED, {}))
        _told.clear()
        _told.update(packed_rng())
        _told[OWN] = own_random.pack(own_random.capture(self.tap.data()))
        _watches[:] = [Watch(self.tap.data())] if self.tap.carries else []

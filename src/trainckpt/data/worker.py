"""Send a DataLoader worker's randomness to the main process with each batch.

A worker runs some batches ahead of training, so its current generators are of no use. A resume
needs them as they were after the last *consumed* batch. So each batch carries the generators that
changed since that worker's last batch; the main process keeps the latest ones it unpacked.

    worker starts  `WorkerStart`: shield, the user's worker_init_fn, then the saved generators
    each batch     `RngCollate`: the user's collate_fn, then (batch, worker, changed generators)

A batch also carries the generators inside the worker's copies of dataset and collate_fn, as one
value (dataset_generators.py), and their states (carried_state.py).

Everything is at module level and picklable: spawn and forkserver send it to the worker. Exceptions
of the user's code pass through torch's ExceptionWrapper and are never wrapped here.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import get_worker_info

from trainckpt.data import carried_state, dataset_generators
from trainckpt.data.carried_state import Carried, Seen, Watch
from trainckpt.data.randomness import changed_since, packed_rng, set_main_rng
from trainckpt.data.worker_signals import shield_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OWN_GENERATORS = "own"  # generators inside the data
CARRIED_STATES = "carried"  # the data's own states
_sent_states: dict[str, bytes] = {}  # in a worker: its generators as last sent to the main process
_watches: list[Watch] = []  # in a worker: the watch over its data


class BatchWithRng(NamedTuple):
    """A batch on its way to the main process; None means "as at this worker's last batch".

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

    def changed_states(self) -> dict[str, Any]:
        """Return the generators changed by this batch, by name, and the data's states."""
        states = None if self.carried is None else self.carried.states
        named = {
            "python": self.python,
            "numpy": self.numpy,
            "torch": self.torch,
            OWN_GENERATORS: self.own,
            CARRIED_STATES: states,
        }
        return {key: value for key, value in named.items() if value is not None}

    def changing_attributes(self) -> Seen | None:
        """Return the attributes of the data that were seen to change and are not saved."""
        return None if self.changing is None else Seen(*json.loads(self.changing))


class RngCollate:
    """The user's collate_fn, with the worker's randomness added to its result.

    Attributes:
        carries: Send the data's states with each batch; False if batches are loaded again instead.
    """

    def __init__(self, collate: Callable[[Any], Any], *, carries: bool) -> None:
        self.collate = collate
        self.carries = carries

    def generator_roots(self) -> dict[str, Any]:
        """Return the worker's objects that may hold generators."""
        worker = get_worker_info()
        return {"dataset": None if worker is None else worker.dataset, "collate_fn": self.collate}

    def __call__(self, samples: Any) -> Any:
        """Collate the samples, and add the worker state that changed."""
        batch = self.collate(samples)
        worker = get_worker_info()
        if worker is None:
            return batch
        changed = changed_since(_sent_states)
        packed_generators = dataset_generators.pack(
            dataset_generators.capture(self.generator_roots())
        )
        if packed_generators != _sent_states.get(OWN_GENERATORS, b""):
            changed[OWN_GENERATORS] = packed_generators
        _sent_states.update(changed)
        states = carried_state.capture(self.generator_roots()) if self.carries else {}
        changing = _watches[0].poll_changes() if _watches else None
        return BatchWithRng(
            batch,
            worker.id,
            **changed,
            carried=Carried(states) if states else None,
            changing=None if changing is None else json.dumps(changing).encode(),
        )


class WorkerStart:
    """The user's worker_init_fn, after shielding and before the saved generators are restored."""

    def __init__(
        self,
        user: Callable[[int], None] | None,
        saved: Mapping[int, dict[str, Any]],
        tap: RngCollate,
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
            own = dataset_generators.unpack(self.saved[worker].get(OWN_GENERATORS, b""))
            lost = dataset_generators.restore(self.tap.generator_roots(), own, f"worker {worker}")
            if lost:
                warnings.warn(lost, stacklevel=2)
            carried_state.restore(
                self.tap.generator_roots(), self.saved[worker].get(CARRIED_STATES, {})
            )
        _sent_states.clear()
        _sent_states.update(packed_rng())
        _sent_states[OWN_GENERATORS] = dataset_generators.pack(
            dataset_generators.capture(self.tap.generator_roots())
        )
        _watches[:] = [Watch(self.tap.generator_roots())] if self.tap.carries else []

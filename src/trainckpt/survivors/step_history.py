"""Step history: each rank holds its state as the last two windows began, for survivors to save.

    boundary          `note`: all of this rank, as a `StepState`. Its own state goes to its partner
                      (see "Partner state"); its share of the large tensors, and its partners', is
                      copied beside training
    before a step     (at an epoch's end: before the next state) waits until every rank's own state
                      of this window is with its partner, and the copies are made. So all ranks hold
                      the newest state or the one before, whenever one dies: at most one step is
                      lost

Without partners nothing is copied nor waited for: the newest state is whole on each rank until it
steps. Threads: `note` and the hook on the training thread; `freeze` and `held` on the survivors'.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainckpt.attempt.log import logger
from trainckpt.errors import NoAgreement
from trainckpt.format.manifest import TensorEntry
from trainckpt.ranks import threads
from trainckpt.ranks.exchange import Exchange
from trainckpt.ranks.store import DAY_S, RANKS_TIMEOUT_S
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.state import staging, tensor_digests
from trainckpt.state.capture import capture
from trainckpt.state.device_copy import DeviceCopier
from trainckpt.state.overlapped_copy import only_stepped
from trainckpt.state.step_hooks import untraced
from trainckpt.state.step_state import (
    Gradients,
    HostCopies,
    ShareCopies,
    StepState,
    small_file,
    without_gradients,
)
from trainckpt.storage.direct_io import private_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.layout import Layout
    from trainckpt.format.shard_file import Region
    from trainckpt.ranks.store import RankStore
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry


# ---- partner state: a rank's own state, held by its partner
#
#     one thread, each step state in turn
#     1  computes the small shard file's head: digests, so that its reader can verify it
#     2  sends it to this rank's partner, and receives those of the ranks it is the partner of
#     3  counts itself in; once all ranks have come so far, the step state is safe
#
# Groups of their own, two ranks each, so training takes no part. A rank that dies ends its
# partners' exchange, and that is a sign that it died.


LENGTH_BYTES = 8
SAMPLE_BYTES = 16
MAX_BYTES = 1 << 34
END_WITHIN_S = 5.0  # of the thread; longer where a partner is gone, and then it stays where it is


class PartnerStateExchange:
    """Exchange of own states between this rank and its partners.

    Attributes:
        owners: Ranks with a small state held by this rank.
        failure: Why no more come, or "".
    """

    def __init__(self, channel: RankStore, partners: Sequence[int]) -> None:
        """`partners`: for every rank, the rank that holds its own state."""
        self._rank, self._size = channel.world.rank, channel.world.size
        self._partners = tuple(partners)
        self.owners = [owner for owner, p in enumerate(partners) if p == self._rank]
        self.failure = ""
        self._channel = channel.scoped("small").connection()
        self._groups: dict[int, Exchange] = {}
        self._queue: queue.SimpleQueue[StepState | None] = queue.SimpleQueue()
        self._number = 0
        self._closed = False
        self._thread = threads.thread(self._work, "trainckpt-small")
        self._thread.start()

    def send(self, moment: StepState) -> None:
        """Queue a state for its partner; all ranks the same ones, in one order. Training thread."""
        self._queue.put(moment)

    def close(self) -> None:
        """End the exchange: other ranks that leave are no sign of a failure any more.

        Joins the thread: to destroy a group while the interpreter ends would abort the process,
        whatever its exit code was to be.
        """
        self._closed = True
        self._queue.put(None)
        self._thread.join(END_WITHIN_S)

    def _work(self) -> None:
        # background thread: no collectives of training's groups
        while (moment := self._queue.get()) is not None:
            self._number += 1
            try:
                self._exchange(moment)
                self._count(moment)
            except (NoAgreement, RuntimeError) as error:
                if not self._closed:
                    self.failure = getattr(error, "message", str(error)) or repr(error)
                break
        self._groups = {}

    def _exchange(self, moment: StepState) -> None:
        _ = moment.small.head
        for owner, partner in enumerate(self._partners):  # in one order on all ranks
            if self._rank in (owner, partner) and owner not in self._groups:
                members = (owner, partner)
                self._groups[owner] = Exchange(self._channel, f"group/{owner}", members, DAY_S)
        mine = self._groups[self._rank]
        heads = {owner: bytearray(LENGTH_BYTES + SAMPLE_BYTES) for owner in self.owners}
        length = len(moment.small.memory).to_bytes(LENGTH_BYTES, "little")
        head = bytearray(length + bytes.fromhex(moment.sample))
        begun = [(mine, mine.begin([], [(1, 0, memoryview(head))]))]
        for owner, into in heads.items():
            group = self._groups[owner]
            begun.append((group, group.begin([(0, 0, memoryview(into))], [])))
        _wait_all(begun)
        begun = [(mine, mine.begin([], [(1, 1, moment.small.memory)]))]
        received: dict[int, memoryview] = {}
        for owner, encoded in heads.items():
            num_bytes = int.from_bytes(encoded[:LENGTH_BYTES], "little")
            if num_bytes > MAX_BYTES:
                why = f"rank {owner} reports an impossible size of its state, {num_bytes} bytes"
                raise NoAgreement(why)
            received[owner], group = private_memory(num_bytes), self._groups[owner]
            begun.append((group, group.begin([(0, 1, received[owner])], [])))
        _wait_all(begun)
        moment.samples_of = {o: bytes(e[LENGTH_BYTES:]).hex() for o, e in heads.items()}
        moment.kept = received

    def _count(self, moment: StepState) -> None:
        """Return once all ranks have come so far. Any of them may ask for a comparison."""
        key, ask = f"{self._number}/all", f"{self._number}/ask"
        if moment.asks or set(moment.samples_of.values()) - {moment.sample}:
            self._channel.put(ask, True)
        if self._channel.count(f"{self._number}/here") == self._size:
            moment.is_asked = self._channel.peek(ask) is not None
            self._channel.put(key, moment.is_asked)
            old = self._number - 2  # no rank waits for that: all have counted a later one
            stale = [f"{old}/here", f"{old}/all", f"{old}/ask"]
            self._channel.forget(stale if old > 0 else [])
        else:
            moment.is_asked = bool(self._channel.get(key, DAY_S))
        moment.safe.set()


def _wait_all(begun: list[tuple[Exchange, list[tuple[object, object]]]]) -> None:
    for group, works in begun:
        group.settle(works)


# ---- the step history


HOLD_S = 60.0  # a step waits so long for the others, and longer than it takes to miss a dead rank
PROVED_FIRST, PROVED_EVERY = 2, 64  # states whose copies are compared with live tensors
# States after which replicas are compared again, by samples; sooner among the first ones, and
# where a rank asks for it.
COMPARED_EVERY = 64


@dataclass(frozen=True)
class ReplicatedState:
    """Tensors with equal replicas on all ranks, as the ranks have agreed.

    Attributes:
        facts: Name -> type and shape, of all tensors that were compared.
        layouts: Tensor -> how its bytes are shared out.
        regions: Of this rank: all of each of those tensors.
        entries: Manifest entry of each.
        sampled: Those of which each state has samples, in one order on all ranks.
    """

    facts: dict[str, Any]
    layouts: Mapping[str, Layout]
    regions: tuple[Region, ...]
    entries: dict[str, TensorEntry]
    sampled: tuple[str, ...]

    def share(self, owner: int) -> tuple[Region, ...]:
        """Return the regions of these tensors that a rank stores."""
        return plan_save(self.regions, self.layouts, rank=owner)


class StepHistory:
    """Step history of one rank of an attempt.

    Attributes:
        replicated: Tensors of the newest state that other ranks have too; None before the first.
        progress: Counts boundaries and steps, to show that the training thread advances.
        why_off: Why nothing is recorded any more, or "".
    """

    def __init__(
        self,
        registry: Registry,
        channel: RankStore,
        small: PartnerStateExchange | None,
        num_threads: int = 1,
        *,
        device_copier: DeviceCopier | None = None,
        hold_s: float = HOLD_S,
    ) -> None:
        """Hook every optimizer's step.

        Args:
            registry: What is tracked.
            channel: Fresh keys.
            small: Passes each rank's own state to its partner; None: there are no partners.
            num_threads: That copy beside training.
            device_copier: Copies from a GPU; no other part of the attempt uses it.
            hold_s: Seconds a step waits for the others.
        """
        self.replicated: ReplicatedState | None = None
        self.progress, self.why_off = 0, ""
        self._failure = ""  # why the newest state was not recorded, or not compared
        self._hold_s = hold_s
        self._registry, self._channel, self._small = registry, channel, small
        self._num_threads = num_threads
        self._world, self._rank = channel.world.size, channel.world.rank
        self._states: list[StepState] = []  # the newest last, two at most
        self._device_copier = device_copier = device_copier or DeviceCopier()
        self._shares_copied, self._copies = ShareCopies(device_copier), HostCopies(device_copier)
        device_copier.look_for_recorded()
        self._shares: tuple[ReplicatedState | None, list[Region]] = None, []
        self._excluded: set[str] = set()
        self._number = self._compared = 0
        self._frozen = self._drops_gradients = False
        self._lock = threading.Lock()
        self._hook = register_optimizer_step_pre_hook(untraced(self._before_step))

    def record(self, cursor: Cursor) -> None:
        """Record the state at a window's beginning, on all ranks. Collective as `capture` is."""
        self.progress += 1  # also where nothing is recorded
        if self._failure and not self.why_off:  # another step was taken: no rank has died
            self._turn_off(self._failure)
        if self.why_off or not self._wait_until_safe():
            return None
        if self._device_copier.is_replayed:
            return self._turn_off("a CUDA graph takes the steps, and calls no hooks")
        while True:  # the newest is safe, and the older one's memory is reused
            self._block_while_frozen()
            with self._lock:
                if not self._frozen:
                    self._states = self._states[-1:]
                    break
        moment = None
        try:
            with self._registry.unchanged():
                moment = self._capture_state(cursor)
        except Exception as error:  # noqa: BLE001 - training goes on without
            self._failure = getattr(error, "message", repr(error))
        if moment is None:
            return None
        gradients, before = Gradients(self._registry), self._states[-1] if self._states else None
        if before is not None and before.gradients is not None and not before.is_carried:
            before.gradients = None  # the script drops them, noticed one window later
            self._drops_gradients = True
        moment.gradients = None if self._drops_gradients or gradients.are_none else gradients
        with self._lock:
            self._states = [*self._states[-1:], moment]
        if self._small is not None:
            self._small.send(moment)
        if moment.overlapped is not None:
            copies = (moment.overlapped.run(), 0)
            threading.Thread(
                target=deque, args=copies, name="trainckpt-moment", daemon=True
            ).start()
        return None

    def on_own_stream(self) -> AbstractContextManager[None]:
        """Read tensors on a GPU without waiting for work queued there by the training thread.

        That work may include a collective that never ends. Work queued before the newest state is
        done, as `capture` waits for it.
        """
        return self._device_copier.apart()

    @property
    def is_live(self) -> bool:
        """True if no step was taken since the newest state."""
        return bool(self._states) and self._states[-1].live

    def freeze(self) -> None:
        """Stop the training thread's steps and records. It may hang, or wait in here."""
        with self._lock:
            self._frozen = True

    def states(self) -> list[StepState]:
        """Return the recorded states, the oldest first. After `freeze`."""
        for moment in self._states:
            moment.settle()
        return list(self._states)

    def close(self) -> None:
        """Record nothing from now on."""
        self.why_off = self.why_off or "closed"
        self._hook.remove()
        self._states = []
        self._shares_copied.close()
        self._copies.close()

    def _capture_state(self, cursor: Cursor) -> StepState | None:
        captured = without_gradients(capture(self._registry))
        if captured.placed:
            self._turn_off("the state is sharded; the newest replicated snapshot will stand")
            return None
        self._number += 1
        by_steps = only_stepped(captured, self._registry, (self._device_copier.kind,))
        facts = self._facts(captured)
        replicated = self._find_replicated(captured, by_steps, facts)
        stepped = by_steps - self._excluded
        if any(facts.get(n) != replicated.facts[n] for n in replicated.layouts):
            # This rank lacks what others share out: nothing can be saved of this state.
            moment = StepState(cursor, {}, None, small_file(captured, (), self._rank, self._world))
            moment.live, moment.asks = False, True
            return moment
        moment = StepState(
            cursor,
            replicated.entries,
            replicated.share,
            small_file(captured, replicated.layouts, self._rank, self._world),
        )
        moment.asks = facts != replicated.facts
        moment.sample = tensor_digests.sample(
            [captured.tensors[name] for name in replicated.sampled],
            self._number,
            f"compared at {self._compared}",
        )
        whole = {name: captured.tensors[name] for name in replicated.layouts}
        live = {name: tensor for name, tensor in whole.items() if name in stepped}
        moment.versions = {name: tensor._version for name, tensor in live.items()}
        others = {name: tensor for name, tensor in whole.items() if name not in live}
        moment.whole = {**live, **self._copies.make(others)}
        if self._small is not None:
            regions = [
                r for r in self._own_shares(replicated) if r.tensor in stepped and r.num_bytes
            ]
            proves = self._number <= PROVED_FIRST or self._number % PROVED_EVERY == 0
            moment.copied, moment.overlapped = self._shares_copied.begin(
                captured, regions, proves=proves, num_threads=self._num_threads
            )
        return moment

    def _own_shares(self, alike: ReplicatedState) -> list[Region]:
        """Return the regions this rank copies: its own share, and those of its partners."""
        if self._shares[0] is not alike:
            assert self._small is not None
            owners = {self._rank, *self._small.owners}
            shares = {r.key: r for owner in owners for r in alike.share(owner)}
            self._shares = alike, list(shares.values())
        return self._shares[1]

    def _facts(self, captured: Captured) -> dict[str, Any]:
        """Return type and shape of each tensor whose replicas may be equal; drop other groups."""
        groups = {f"{model.name} parameters" for model in self._registry.models}
        groups |= {optimizer.name for optimizer in self._registry.optimizers}
        captured.groups = {n: g for n, g in captured.groups.items() if g in groups}
        tensors = captured.tensors
        return {n: (tensors[n].dtype, tensors[n].shape) for n in captured.groups}

    @property
    def _is_compared(self) -> bool:
        """True if this state is compared on all ranks: they decide alike, or wait for ever."""
        number = self._number
        is_early = number < COMPARED_EVERY and number & (number - 1) == 0
        is_asked = self._small is not None and any(moment.is_asked for moment in self._states)
        return is_early or is_asked or number % COMPARED_EVERY == 0

    def _find_replicated(
        self, captured: Captured, stepped: set[str], facts: dict[str, Any]
    ) -> ReplicatedState:
        """Compare on all ranks, if this state is to be; else return the last comparison."""
        if self._is_compared:
            before = self.replicated.layouts if self.replicated is not None else {}
            mine = tensor_digests.group_digests(
                captured,
                self._rank,
                self._world,
                sampled=stepped & before.keys(),  # others may have differed in any byte
                number=self._number,
            )
            key = f"moments/{self._number}"
            try:
                equal = self._channel.fold(key, mine, equal_groups, RANKS_TIMEOUT_S)
            except NoAgreement as error:
                if self.replicated is None:
                    raise
                # The store may have died with its rank. The others still hold this state as the
                # last comparison shares it out; a rank that knows a newer one has other samples.
                self._failure = error.message
                return self.replicated
            if self._compared:  # all have sent their part of this comparison, so read the last one
                last = f"moments/{self._compared}"
                others = self._channel.fold_keys(last) if self._rank == 0 else []
                self._channel.forget([f"{last}/{self._rank}", *others])
            self._compared = self._number
            layouts = tensor_digests.split_layouts(captured, set(equal), self._world)
            regions = tuple(r for r in staging.regions_of(captured, layouts) if r.tensor in layouts)
            entries = {r.tensor: TensorEntry(r.dtype, r.of, layouts[r.tensor]) for r in regions}
            flat = (n for n in sorted(layouts) if tensor_digests.is_flat(captured.tensors[n]))
            self.replicated = ReplicatedState(facts, layouts, regions, entries, tuple(flat))
        assert self.replicated is not None
        return self.replicated

    def _before_step(self, *_: object) -> None:
        """Run on the training thread, before any optimizer of this process steps."""
        if self._device_copier.is_recording():  # no step yet; the next `note` turns this off
            return
        self.progress += 1
        if self.why_off or not self.is_live or not self._wait_until_safe():
            return
        with self._lock:
            for moment in self._states:
                moment.live = moment.live and self._frozen
        self._block_while_frozen()

    def _wait_until_safe(self) -> bool:
        """Return when all ranks hold the newest state, so that the one before may go."""
        for moment in self._states[-1:]:
            if self._small is not None and not moment.safe.wait(self._hold_s):
                self._turn_off("another rank's state did not reach its partner")
                return False
            self._block_while_frozen()
            moment.settle()
            if moment.spoiled:
                self._excluded.update(moment.spoiled)
                logger.debug("copied at each step from now on: %s", ", ".join(moment.spoiled)[:500])
        return True

    def _block_while_frozen(self) -> None:
        """Block while survivors save; the process ends when they have."""
        while self._frozen:
            threading.Event().wait(1.0)

    def _turn_off(self, reason: str) -> None:
        self.why_off = reason
        self._states = []
        if self._rank == 0:
            logger.warning("if a rank dies, the others will not save: %s", reason)

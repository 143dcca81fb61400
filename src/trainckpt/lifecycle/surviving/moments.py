"""Moments: each rank keeps its state as the last two windows began, so that survivors can save one.

    boundary          `note`: all of this rank, as a `Moment`. What is its own goes to its partner
                      (`small_states`); its share of the large tensors, and its partners', is copied
                      beside training
    before a step     (at an epoch's end: before the next moment) waits until every rank's own state
                      of this moment is with its partner, and the copies are made. So the newest
                      moment or the one before is there on all ranks, whatever instant one dies at:
                      one step is lost at most

Without partners nothing is copied nor waited for: the newest moment is whole on each rank until it
steps. Threads: `note` and the hook on the training thread; `freeze` and `held` on the survivors'.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainckpt.errors import NoAgreement
from trainckpt.format.manifest import SPLIT, TensorEntry
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.run.log import logger
from trainckpt.snapshot.save_plan import equal_groups, plan_save
from trainckpt.state import replicas, stage
from trainckpt.state.capture import capture
from trainckpt.state.moment import (
    Gradients,
    HostCopies,
    Moment,
    ShareCopies,
    small_file,
    without_gradients,
)
from trainckpt.state.overlap import only_stepped
from trainckpt.state.side import Side
from trainckpt.state.untraced import untraced

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from trainckpt.format.cursor import Cursor
    from trainckpt.format.layout import Layout
    from trainckpt.format.shard_file import Region
    from trainckpt.lifecycle.surviving.small_states import SmallStates
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.captured import Captured
    from trainckpt.state.registry import Registry

HOLD_S = 60.0  # a step waits so long for the others
PROVED_FIRST, PROVED_EVERY = 2, 64  # moments whose copies are compared with live tensors
COMPARED_EVERY = 64  # moments after which replicas are compared again, by samples


@dataclass(frozen=True)
class Alike:
    """What all ranks hold alike, as they have found together.

    Attributes:
        facts: For which state this holds.
        layouts: Tensor -> how its bytes are shared out.
        regions: Of this rank: all of each of those tensors.
        entries: Of each, as a manifest has it.
    """

    facts: Any
    layouts: Mapping[str, Layout]
    regions: tuple[Region, ...]
    entries: dict[str, TensorEntry]

    def share(self, owner: int) -> tuple[Region, ...]:
        """What a rank stores of them."""
        return plan_save(self.regions, self.layouts, rank=owner)


class Moments:
    """Of one rank of an attempt.

    Attributes:
        alike: None before the first moment.
        progress: Counts boundaries and steps: whether main is getting on.
        off: Why nothing is kept any more, or "".
    """

    def __init__(
        self,
        registry: Registry,
        channel: Channel,
        small: SmallStates | None,
        num_threads: int = 1,
        *,
        side: Side | None = None,
    ) -> None:
        """Hook every optimizer's step.

        Args:
            registry: What is tracked.
            channel: Fresh keys.
            small: Passes each rank's own state to its partner; None: there are no partners.
            num_threads: That copy beside training.
            side: Copies from a GPU; no other part of the attempt uses it.
        """
        self.alike: Alike | None = None
        self.progress, self.off = 0, ""
        self._registry, self._channel, self._small = registry, channel, small
        self._num_threads = num_threads
        self._world, self._rank = channel.world.size, channel.world.rank
        self._held: list[Moment] = []  # the newest last, two at most
        self._side = side = side or Side()
        self._shares_copied, self._copies = ShareCopies(side), HostCopies(side)
        side.look_for_recorded()
        self._shares: tuple[Alike | None, list[Region]] = None, []
        self._never: set[str] = set()
        self._number = self._compared = 0
        self._frozen = self._drops = False
        self._lock = threading.Lock()
        self._hook = register_optimizer_step_pre_hook(untraced(self._before_step))

    def note(self, cursor: Cursor) -> None:
        """A window begins here, on all ranks. Collective as `capture` is."""
        if self.off or not self._make_safe():
            return None
        if self._side.is_replayed:
            return self._turn_off("a CUDA graph takes steps, of which nothing is heard")
        self._drop_oldest()
        try:
            with self._registry.unchanged():
                moment = self._take(cursor)
        except NoAgreement as error:
            return self._turn_off(error.message)
        except Exception as error:  # noqa: BLE001 - training goes on without
            return self._turn_off(repr(error))
        if moment is None:
            return None
        self._note_gradients(moment)
        with self._lock:
            self._held = [*self._held[-1:], moment]
            self.progress += 1
        if self._small is not None:
            self._small.bring(moment)
        if moment.overlapped is not None:
            copy = threading.Thread(
                target=_run, args=(moment.overlapped,), name="trainckpt-moment", daemon=True
            )
            copy.start()
        return None

    def apart(self) -> AbstractContextManager[None]:
        """Read tensors on a GPU without waiting for what the training thread has asked of it.

        A collective that never ends may be among that. What it asked for before the newest moment
        is done, as `capture` waits for it.
        """
        return self._side.apart()

    @property
    def is_live(self) -> bool:
        """Whether no step was taken since the newest moment."""
        return bool(self._held) and self._held[-1].live

    def freeze(self) -> None:
        """The training thread takes no step and no note any more. It may hang, or wait in here."""
        with self._lock:
            self._frozen = True

    def held(self) -> list[Moment]:
        """After `freeze`: what is kept, the oldest first."""
        for moment in self._held:
            moment.settle()
        return list(self._held)

    def close(self) -> None:
        """Nothing is kept from now on."""
        self.off = self.off or "closed"
        self._hook.remove()
        self._held = []
        self._shares_copied.close()
        self._copies.close()

    def _take(self, cursor: Cursor) -> Moment | None:
        captured = without_gradients(capture(self._registry))
        if captured.placed:
            self._turn_off("the state is sharded: the newest snapshot that others keep will stand")
            return None
        self._number += 1
        stepped = only_stepped(captured, self._registry, (self._side.kind,)) - self._never
        alike = self._find_alike(captured, stepped)
        moment = Moment(
            cursor, alike.entries, small_file(captured, alike.layouts, self._rank, self._world)
        )
        whole = {name: captured.tensors[name] for name in alike.layouts}
        live = {name: tensor for name, tensor in whole.items() if name in stepped}
        moment.versions = {name: tensor._version for name, tensor in live.items()}
        others = {name: tensor for name, tensor in whole.items() if name not in live}
        moment.whole = {**live, **self._copies.make(others)}
        if self._small is not None:
            regions = [r for r in self._own_shares(alike) if r.tensor in stepped and r.num_bytes]
            proves = self._number <= PROVED_FIRST or self._number % PROVED_EVERY == 0
            moment.copied, moment.overlapped = self._shares_copied.begin(
                captured, regions, proves=proves, num_threads=self._num_threads
            )
        return moment

    def _own_shares(self, alike: Alike) -> list[Region]:
        """What this rank copies: its own share, and those of whom it keeps the own state."""
        if self._shares[0] is not alike:
            assert self._small is not None
            owners = {self._rank, *self._small.owners}
            shares = {r.key: r for owner in owners for r in alike.share(owner)}
            self._shares = alike, list(shares.values())
        return self._shares[1]

    def _forget(self) -> None:
        """All ranks have brought what they compare now, so they have read what was compared before.

        The store keeps a key until it is deleted.
        """
        before = f"moments/{self._compared}"
        keys = [f"{before}/{self._rank}"]
        if self._rank == 0:
            keys += self._channel.fold_keys(before)
        self._channel.forget(keys if self._compared else [])

    def _find_alike(self, captured: Captured, stepped: set[str]) -> Alike:
        """Compared by all ranks, whenever there are other tensors, and once in a while."""
        groups = {f"{model.name} parameters" for model in self._registry.models}
        groups |= {optimizer.name for optimizer in self._registry.optimizers}
        captured.groups = {n: g for n, g in captured.groups.items() if g in groups}
        facts = [(n, captured.tensors[n].dtype, captured.tensors[n].shape) for n in captured.groups]
        known = self.alike is not None and self.alike.facts == facts
        if not known or self._number % COMPARED_EVERY == 0:
            sampled = stepped if known else ()
            mine = replicas.group_digests(
                captured, self._rank, self._world, sampled=sampled, number=self._number
            )
            key = f"moments/{self._number}"
            equal = self._channel.fold(key, mine, equal_groups, RANKS_TIMEOUT_S)
            self._forget()
            self._compared = self._number
            layouts = replicas.split_layouts(captured, set(equal), self._world)
            regions = tuple(r for r in stage.held(captured, layouts) if r.tensor in layouts)
            entries = {
                r.tensor: TensorEntry(r.dtype, r.of, SPLIT, layouts[r.tensor]) for r in regions
            }
            self.alike = Alike(facts, layouts, regions, entries)
        assert self.alike is not None
        return self.alike

    def _note_gradients(self, moment: Moment) -> None:
        """Whether the script drops a window's gradients is seen one window later."""
        gradients = Gradients(self._registry)
        before = self._held[-1] if self._held else None
        if before is not None and before.gradients is not None and not before.is_carried:
            before.gradients = None
            self._drops = True
        moment.gradients = None if self._drops or gradients.are_none else gradients

    def _before_step(self, *_: object) -> None:
        """The training thread, before any optimizer of this process steps."""
        if self._side.is_recording():  # no step yet; the next `note` turns this off
            return
        if self.off or not self.is_live or not self._make_safe():
            return
        with self._lock:
            for moment in self._held:
                moment.live = moment.live and self._frozen
            self.progress += 1
        self._stand_still()

    def _drop_oldest(self) -> None:
        """Let go of the moment before the newest, which is safe: its memory is written over."""
        while True:
            self._stand_still()
            with self._lock:
                if not self._frozen:
                    self._held = self._held[-1:]
                    return

    def _make_safe(self) -> bool:
        """Return when the newest moment is kept on all ranks, so that the one before may go."""
        for moment in self._held[-1:]:
            if self._small is not None and not moment.safe.wait(HOLD_S):
                self._turn_off("another rank's state did not come to its partner")
                return False
            self._stand_still()
            moment.settle()
            if moment.spoiled:
                self._never.update(moment.spoiled)
                logger.info("kept as copies from now on: %s", ", ".join(moment.spoiled)[:500])
        return True

    def _stand_still(self) -> None:
        """Survivors save what there is: the process ends when they have."""
        while self._frozen:
            threading.Event().wait(1.0)

    def _turn_off(self, why: str) -> None:
        self.off = why
        self._held = []
        if self._rank == 0:
            logger.warning("if a rank dies the others will save nothing: %s", why)


def _run(overlapped: Any) -> None:
    for _ in overlapped.run():
        pass

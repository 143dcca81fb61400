"""Report how exactly an attempt was resumed, from the start to its end.

    functions       list how each part was restored, as known from the snapshot and the script
    `ResumeReport`  adds what is seen once training has gone on, on any rank

`format.exactness.decide` derives the exactness from these parts.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainckpt.attempt import fingerprint
from trainckpt.attempt.log import logger
from trainckpt.data import state_differences as loader_states
from trainckpt.data.untracked import on_workers_started
from trainckpt.errors import NoAgreement
from trainckpt.format.exactness import BITWISE, INEXACT, Exactness, How, Restored, decide
from trainckpt.inspect.contents import models_in
from trainckpt.ranks.store import RANKS_TIMEOUT_S
from trainckpt.state import apply, attributes, imported, plain_tensors
from trainckpt.state.capture import LOADERS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.ranks.store import RankStore
    from trainckpt.resume.apply_phases import ResumeDrift
    from trainckpt.resume.resume import ResumePoint
    from trainckpt.state.adapters.optimizer import OptimizerState
    from trainckpt.state.adapters.stateful import GenericState
    from trainckpt.state.registry import Registry

KEPT_WORKERS = (
    "an untracked DataLoader with persistent_workers=True has started its workers. A resume starts "
    "them anew, with other randomness, and draws once more from the main generator. Track it with "
    "loader=[train, validation] and iterate ckpt.loader(validation), or set "
    "persistent_workers=False"
)
_SHOWN = 8  # tracked objects in the log
_FINDINGS, _NEWEST, _COMPARED = "findings", "newest findings", "compared"


def own_objects(registry: Registry) -> list[str]:
    """Return the names of tracked objects of the script's own types, which may count
    micro-batches."""
    kinds = {generic.name: type(generic.target) for generic in registry.generics}
    return [name for name, kind in kinds.items() if not f"{kind.__module__}.".startswith("torch.")]


def said_by_objects(registry: Registry, beginning: ResumePoint) -> list[Restored]:
    """Return the tracked objects' reports on saved state that is not exact and verified."""
    saved = beginning.saved
    if saved is None:
        return []
    parts = _not_kept("random generators", apply.rng_not_put_back(registry, saved))
    tracked: list[OptimizerState | GenericState] = [*registry.optimizers, *registry.generics]
    for item in tracked:
        parts += item.restored(saved)
    for name in saved.values.get(LOADERS, ()):  # including loaders not registered yet
        state = saved.decode(saved.values[name])
        parts += loader_states.restored(name, state, in_place=saved.exact)
    return parts


def said_after_loading(registry: Registry, beginning: ResumePoint) -> list[Restored]:
    """Return the objects whose own state_dict does not reproduce the state they loaded."""
    saved = beginning.saved
    if saved is None:
        return []
    return [part for item in registry.generics for part in item.compare(saved)]


def not_deterministic(facts: Mapping[str, Any]) -> list[Restored]:
    """Return the nondeterministic settings in a fingerprint."""
    return _not_kept("determinism", fingerprint.not_deterministic(facts))


def of_all_ranks(channel: RankStore, own: Sequence[Restored]) -> list[Restored]:
    """Return the parts of all ranks, each once, from the first rank with it.

    Every rank calls it. A part that rank 0 lacks names its rank.
    """
    first_rank: dict[Restored, int] = {}
    everyone = channel.gather("not exact", [part.to_json() for part in own], RANKS_TIMEOUT_S)
    for rank, parts in enumerate(everyone):
        for part in map(Restored.from_json, parts):
            first_rank.setdefault(part, rank)
    return [replace(part, rank=rank) if rank else part for part, rank in first_rank.items()]


def other_state(beginning: ResumePoint, own_objects: Sequence[str]) -> list[Restored]:
    """Return the reasons that the state differs from the saved one.

    Args:
        beginning: The attempt's starting point.
        own_objects: Names of tracked objects of types outside torch.
    """
    saved = beginning.saved
    if saved is None:
        return []
    left = saved.left
    excluded = [f"excluded, so left as the script made them: {_some(left)}"] if left else []
    parts = _not_kept("excluded tensors", excluded)
    if beginning.manifest is not None:
        parts += _not_kept("ranks that died", beginning.manifest.not_bitwise)
    parts += _not_kept("DDP", apply.not_kept_of_ddp(saved))
    if source := imported.source(saved.values):
        lacks = "which has no position in the data and no random generators"
        sentence = f"imported from {source}, {lacks}: the data begin at the start of an epoch"
        return [*parts, *_not_kept("import", [sentence])]
    then, now = saved.worlds
    if saved.exact or (then == now and beginning.manifest and beginning.manifest.lost):
        return parts
    parts += _not_kept("layout", ["the tensors lie over the ranks in another way"])
    if beginning.rewound:
        why = [f"the window of {beginning.rewound} micro-batches so far begins anew"]
        if own_objects:
            why.append(f"inside that window still, not at its start: {_some(own_objects)}")
        parts += _not_kept("window", why)
    if then != now:
        why = [f"{now} ranks instead of {then}: the global batch may change with them"]
        if apart := _of_each_rank(beginning):
            what = f"{now} of {then} go on" if now < then else "new ranks take another's"
            why.append(f"each rank had its own, {what}: {_some(apart)}")
        parts += _not_kept("ranks", why)
    return parts


def seen_since(otherwise: ResumeDrift) -> list[Restored]:
    """Return the differences seen once training has gone on."""
    parts = _not_kept("requires_grad", other_gradients(otherwise.gradients))
    if otherwise.wrappers:
        why = (
            "in another DDP than the resume could put back what the saved one kept to "
            f"itself: {_some(otherwise.wrappers)} (wrap it as it was when it was saved, "
            "before the first batch is asked for)"
        )
        parts += _not_kept("DDP", [why])
    if otherwise.attributes:
        why = (
            f"in no state_dict, so not as when it was saved: {_some(otherwise.attributes)} "
            f"({attributes.hint(otherwise.attributes)}, or let the script set them)"
        )
        parts += _not_kept("attributes", [why])
    if otherwise.of_callbacks:
        hint = attributes.hint(otherwise.of_callbacks, of_callbacks=True)
        why = (
            "of callbacks, in no state_dict, so not as when it was saved: "
            f"{_some(otherwise.of_callbacks)} ({hint})"
        )
        parts += _not_kept("attributes", [why])
    if otherwise.tensors:
        why = (
            "too large to be kept, or a named tuple of an unknown class, and not as when it was "
            f"saved: {_some(otherwise.tensors)} "
            f"({plain_tensors.HINT})"
        )
        parts += _not_kept("attributes", [why])
    if otherwise.loaders:
        why = (
            "DataLoaders were partly read, not through ckpt.loader: "
            f"{_some(otherwise.loaders)}; the script begins their passes again. Pass them as "
            "loader=[a, b], and iterate ckpt.loader(a)"
        )
        parts += _not_kept("untracked loaders", [why])
    if otherwise.variables:
        why = (
            "variables of the script are not restored, and these are not as when it was saved: "
            f"{_some(otherwise.variables)}. Pass a module, optimizer or scheduler to the "
            "Checkpointer by name; keep a tensor or number on an object, and track it with "
            "trainckpt.Attributes; count steps by ckpt.cursor.step; let a generator of data loop "
            "over ckpt.loader(...), or begin it at ckpt.cursor"
        )
        parts += _not_kept("variables", [why])
    if otherwise.generators:
        names = _some(otherwise.generators)
        why = f"these names do not hold the saved generators: {names}"
        parts += _not_kept("random generators", [why])
    return parts


def other_gradients(changed: Mapping[str, bool]) -> list[str]:
    """Return sentences on parameters whose requires_grad changed; `changed`: name -> True if it
    was frozen when saved."""
    trained = [name for name, was_frozen in changed.items() if was_frozen]
    frozen = changed.keys() - set(trained)
    set_by = "a resume sets no requires_grad, and the script set it otherwise before the stop"
    lines = [f"frozen now, trained when it was saved: {_some(frozen)} ({set_by})"] if frozen else []
    if trained:
        lines.append(f"trained now, frozen when it was saved: {_some(trained)} ({set_by})")
    return lines


def _not_kept(name: str, sentences: Sequence[str]) -> list[Restored]:
    return [Restored(name, How.NOT_KEPT, sentence) for sentence in sentences]


def _of_each_rank(beginning: ResumePoint) -> list[str]:
    if beginning.manifest is None or beginning.saved is None:
        return []
    models = models_in(beginning.saved.values)
    tensors = beginning.manifest.tensors.items()
    return [n for n, e in tensors if e.layout is None and n.partition("/")[0] in models]


def _some(names: Collection[str]) -> str:
    """Return the first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(sorted(names)[:3])}{more}"


class ResumeReport:
    """Report of how exactly one attempt was resumed, on one rank; on rank 0, on all ranks.

    Attributes:
        is_awaited: Rank 0 has still to log the exactness, once all ranks have compared their state.
    """

    def __init__(
        self,
        *,
        channel: RankStore,
        registry: Registry,
        is_resumed: bool,
        restored: Sequence[Restored] = (),
    ) -> None:
        """Start to watch for untracked loaders with persistent workers.

        Args:
            channel, registry: Of the attempt.
            is_resumed: The attempt began from a snapshot.
            restored: Results of restoring each part of this attempt's initial state.
        """
        self._channel, self._registry, self._is_resumed = channel, registry, is_resumed
        self._restored = tuple(restored)
        self._pid, self._is_closed, self._keeps_workers = os.getpid(), False, False
        self.is_awaited = False
        self._logged = ""  # the newest word in the log
        self._findings: list[Restored] = []  # of this rank, since the resume
        self._newest_findings: str | None = None  # on rank 0: the newest ones read
        on_workers_started(self._born_untracked)

    def close(self) -> None:
        """Ignore workers that are started after the attempt's end."""
        self._is_closed = True

    def reconnect(self, channel: RankStore) -> None:
        """Use this store from now on: the processes were restored from a dump."""
        self._channel = channel

    @property
    def exactness(self) -> Exactness:
        """Return the exactness of this attempt's resume, as far as known."""
        return decide(self._restored)

    def set_restored(self, parts: Sequence[Restored]) -> None:
        """Replace the restored parts, once all ranks have reported theirs."""
        self._restored = tuple(parts)
        self._logged = INEXACT if self.exactness.reasons else ""

    def compared(self) -> None:
        """Note that this rank has compared its state with the snapshot. Training thread."""
        rank = self._channel.world.rank
        self.is_awaited = not rank
        if rank:
            with contextlib.suppress(NoAgreement):
                self._channel.put(f"{_COMPARED}/{rank}", True)
        self.read_findings()

    def note(self, parts: Sequence[Restored]) -> None:
        """Log and record differences seen only after training has gone on. Training thread.

        If they lower the exactness reported so far, the new one is logged too. Rank 0 logs and
        records those of the other ranks at the next save, or at the end.
        """
        for part in parts:
            self._restored += (part,)
            if part.how is How.REPLAYED:
                logger.info("%s", part.reason)
            elif part.is_inexact:
                logger.warning("not exact: %s", part.reason)
        self._correct()
        self._publish([part for part in parts if part.is_inexact])

    def _publish(self, parts: Sequence[Restored]) -> None:
        """Put inexact parts of this rank where rank 0 finds them; nothing waits for it."""
        rank = self._channel.world.rank
        if not parts or rank == 0 or not self._is_resumed:
            return
        self._findings += parts
        own = [part.to_json() for part in self._findings]
        newest = f"{rank}/{len(own)}"
        with contextlib.suppress(NoAgreement):  # the store is gone: this rank has logged them
            self._channel.put_all({f"{_FINDINGS}/{rank}": own, _NEWEST: newest})

    def read_findings(self) -> None:
        """Log and record the inexact parts of other ranks that are new, on rank 0. Training thread.

        One message to the store, and more only if some rank has published since.
        """
        world = self._channel.world
        if world.rank or not self._is_resumed:
            return
        others = range(1, world.size)
        with contextlib.suppress(NoAgreement):
            all_compared = self.is_awaited and None not in self._peek(_COMPARED, others)
            newest = self._channel.peek(_NEWEST) if others else None
            if newest is not None and newest != self._newest_findings:
                everyone = self._peek(_FINDINGS, others)
                self._newest_findings = newest
                for rank, parts in zip(others, everyone, strict=True):
                    for part in map(Restored.from_json, parts or ()):
                        if part not in (replace(known, rank=None) for known in self._restored):
                            self._restored += (replace(part, rank=rank),)
                            logger.warning("not exact: %s", self._restored[-1].sentence)
                self._correct()
            if all_compared:
                self.is_awaited = False
                if not self._logged:
                    self._logged = self.exactness.word
                    logger.info("this resume is %s", self._scoped(self._logged))

    def _scoped(self, word: str) -> str:
        """Return the word; "bitwise" names the tracked objects, for it holds of no others."""
        names = [*self._registry.names(), "random numbers"]
        if word != BITWISE:
            return word
        more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        return f"{word} in all that is tracked: {', '.join([*names[:_SHOWN], *more])}"

    def _peek(self, key: str, ranks: Sequence[int]) -> list[Any]:
        return self._channel.peek_all([f"{key}/{rank}" for rank in ranks]) if ranks else []

    def _correct(self) -> None:
        """Log the resume's exactness if it is inexact, and the log says otherwise or nothing."""
        now = self.exactness
        if self._is_resumed and now.word == INEXACT != self._logged:
            before = f" (reported before: {self._logged})" if self._logged else ""
            self._logged = INEXACT
            logger.warning("this resume is %s%s", now.line, before)

    def _born_untracked(self, loader: Any) -> None:
        is_child = os.getpid() != self._pid  # forked by the script: no part of the attempt
        if is_child or self._is_closed or self._keeps_workers or not loader.persistent_workers:
            return
        self._keeps_workers = True
        if self._is_resumed:
            part = Restored("untracked loader", How.NOT_KEPT, KEPT_WORKERS)
            self._restored += (part,)
            self._publish([part])
        logger.warning("not exact: %s", KEPT_WORKERS)
        self._correct()

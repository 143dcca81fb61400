"""Reasons why the state of a resume is not the one that was saved, one sentence each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.reading.contents import models_in
from trainckpt.lifecycle.run.fingerprint import EXACT
from trainckpt.state import apply, attributes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.lifecycle.attempt import Crew
    from trainckpt.lifecycle.resuming.arrival import Otherwise
    from trainckpt.lifecycle.resuming.resume import Beginning
    from trainckpt.ranks.channel import Channel


def own_objects(crew: Crew) -> list[str]:
    """Names of tracked objects of the script's own kinds, which may count micro-batches."""
    kinds = {generic.name: type(generic.target) for generic in crew.registry.generics}
    return [name for name, kind in kinds.items() if not f"{kind.__module__}.".startswith("torch.")]


def said_by_objects(crew: Crew, beginning: Beginning) -> list[str]:
    """What an optimizer, a loader, a generator or an integration says its saved state lacks."""
    found: list[str] = []
    if beginning.saved is not None:
        found += apply.rng_not_put_back(crew.registry, beginning.saved)
        for optimizer in crew.registry.optimizers:
            found += optimizer.lost(beginning.saved)
        for loader in crew.registry.loaders:
            found += loader.not_kept(beginning.saved)
        for generic in crew.registry.generics:
            found += generic.lost(beginning.saved)
        watched = crew.registry.watched
        if names := attributes.not_restored(watched, beginning.saved, of_callbacks=False):
            found.append(f"in no state_dict, so not as when it was saved: {_some(names)} "
                         f"({attributes.HINT}, or let the script set them)")  # fmt: skip
    return found


def of_all_ranks(channel: Channel, own: Sequence[str]) -> list[str]:
    """Return this and all other ranks' reasons, each once, from the first rank that has it.

    Every rank calls it. Those that rank 0 has not are given with their rank.
    """
    found: dict[str, int] = {}
    for rank, reasons in enumerate(channel.gather("not exact", list(own), RANKS_TIMEOUT_S)):
        for reason in reasons:
            found.setdefault(reason, rank)
    return [f"rank {rank}: {reason}" if rank else reason for reason, rank in found.items()]


def assurance(crew: Crew, beginning: Beginning) -> str:
    """Return how exact a resume is that nothing speaks against; the weakest loader's word."""
    saved = beginning.saved
    said = [loader.assurance(saved) for loader in crew.registry.loaders] if saved else []
    own_state_first = sorted(filter(None, said), key=lambda word: not word.startswith("as exact"))
    return own_state_first[0] if own_state_first else EXACT


def other_state(beginning: Beginning, own_objects: Sequence[str]) -> list[str]:
    """Why the state is not the one that was saved, one reason each.

    Args:
        beginning: From where the attempt begins.
        own_objects: What the script tracks beside what torch defines.
    """
    saved = beginning.saved
    if saved is None:
        return []
    left = saved.left
    found = [f"excluded, so left as the script made them: {_some(left)}"] if left else []
    if beginning.manifest is not None:
        found += beginning.manifest.not_bitwise
    found += apply.not_kept_of_ddp(saved)
    then, now = saved.worlds
    if saved.exact or (then == now and beginning.manifest and beginning.manifest.lost):
        return found
    found += ["the tensors lie over the ranks in another way"]
    if beginning.rewound:
        found.append(f"the window of {beginning.rewound} micro-batches so far begins anew")
        if own_objects:
            found.append(f"inside that window still, not at its start: {_some(own_objects)}")
    if then != now:
        found.append(f"{now} ranks instead of {then}: the global batch may change with them")
        if apart := _of_each_rank(beginning):
            what = f"{now} of {then} go on" if now < then else "new ranks take another's"
            found.append(f"each rank had its own, {what}: {_some(apart)}")
    return found


def seen_since(otherwise: Otherwise) -> list[str]:
    """What was seen once training had gone on."""
    found = other_gradients(otherwise.gradients)
    if otherwise.wrappers:
        found.append("in another DDP than the resume could put back what the saved one kept to "
                     f"itself: {_some(otherwise.wrappers)} (wrap it as it was when it was saved, "
                     "before the first batch is asked for)")  # fmt: skip
    if otherwise.attributes:
        found.append(f"of callbacks, in no state_dict, so not as when it was saved: "
                     f"{_some(otherwise.attributes)} ({attributes.HINT_OF_CALLBACKS})")  # fmt: skip
    return found


def other_gradients(changed: Mapping[str, bool]) -> list[str]:
    """`changed`: parameter -> whether it was frozen when it was saved, which it is not now."""
    trained = [name for name, was_frozen in changed.items() if was_frozen]
    frozen = changed.keys() - set(trained)
    set_by = "a resume sets no requires_grad, and the script set it otherwise before the stop"
    found = [f"frozen now, trained when it was saved: {_some(frozen)} ({set_by})"] if frozen else []
    if trained:
        found.append(f"trained now, frozen when it was saved: {_some(trained)} ({set_by})")
    return found


def _of_each_rank(beginning: Beginning) -> list[str]:
    """Tensors of models that were not alike on all ranks."""
    if beginning.manifest is None or beginning.saved is None:
        return []
    models = models_in(beginning.saved.values)
    tensors = beginning.manifest.tensors.items()
    return [n for n, e in tensors if e.layout is None and n.partition("/")[0] in models]


def _some(names: Collection[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(sorted(names)[:3])}{more}"

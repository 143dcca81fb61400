"""How the parts of a resume were restored, as far as it is known from the snapshot and the script.

What a resume is called follows from these values, by `format.exactness.decide`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.data import compare as loader_states
from trainckpt.format.exactness import How, Restored
from trainckpt.lifecycle.places.attach import RANKS_TIMEOUT_S
from trainckpt.lifecycle.reading.contents import models_in
from trainckpt.lifecycle.run import gpu_settings
from trainckpt.state import apply, attributes, reloaded
from trainckpt.state.capture import LOADERS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from trainckpt.lifecycle.attempt import Crew
    from trainckpt.lifecycle.resuming.arrival import Otherwise
    from trainckpt.lifecycle.resuming.resume import Beginning
    from trainckpt.ranks.channel import Channel
    from trainckpt.state.kinds.generic import GenericState
    from trainckpt.state.kinds.optimizer import OptimizerState


def own_objects(crew: Crew) -> list[str]:
    """Names of tracked objects of the script's own kinds, which may count micro-batches."""
    kinds = {generic.name: type(generic.target) for generic in crew.registry.generics}
    return [name for name, kind in kinds.items() if not f"{kind.__module__}.".startswith("torch.")]


def said_by_objects(crew: Crew, beginning: Beginning) -> list[Restored]:
    """Return what tracked objects say of their saved state, where it is not exact and checked."""
    saved, registry = beginning.saved, crew.registry
    if saved is None:
        return []
    found = _not_kept("random generators", apply.rng_not_put_back(registry, saved))
    tracked: list[OptimizerState | GenericState] = [*registry.optimizers, *registry.generics]
    for each in tracked:
        found += each.restored(saved)
    for name in saved.values.get(LOADERS, ()):  # those too that the script has still to register
        state = saved.decode(saved.values[name])
        found += loader_states.restored(name, state, in_place=saved.exact)
    if names := attributes.not_restored(registry.watched, saved, of_callbacks=False):
        why = (f"in no state_dict, so not as when it was saved: {_some(names)} "
               f"({attributes.HINT}, or let the script set them)")  # fmt: skip
        found.append(Restored("attributes", How.NOT_KEPT, why))
    return found


def said_after_loading(crew: Crew, beginning: Beginning) -> list[Restored]:
    """Return which objects with a state_dict of their own do not give back what they loaded."""
    saved = beginning.saved
    if saved is None:
        return []
    return [part for each in crew.registry.generics for part in reloaded.compare(each, saved)]


def not_deterministic(here: Mapping[str, Any]) -> list[Restored]:
    """Return the settings with which no run repeats itself, of a fingerprint."""
    return _not_kept("determinism", gpu_settings.not_deterministic(here))


def of_all_ranks(channel: Channel, own: Sequence[Restored]) -> list[Restored]:
    """Return this and all other ranks' parts, each once, from the first rank that has it.

    Every rank calls it. The reasons of those that rank 0 has not name their rank.
    """
    found: dict[Restored, int] = {}
    everyone = channel.gather("not exact", [part.to_json() for part in own], RANKS_TIMEOUT_S)
    for rank, parts in enumerate(everyone):
        for part in map(Restored.from_json, parts):
            found.setdefault(part, rank)
    return [
        Restored(part.name, part.how, f"rank {rank}: {part.reason}")
        if rank and part.how in (How.INFERRED, How.NOT_KEPT)
        else part
        for part, rank in found.items()
    ]


def other_state(beginning: Beginning, own_objects: Sequence[str]) -> list[Restored]:
    """Return why the state is not the one that was saved.

    Args:
        beginning: From where the attempt begins.
        own_objects: What the script tracks beside what torch defines.
    """
    saved = beginning.saved
    if saved is None:
        return []
    left = saved.left
    excluded = [f"excluded, so left as the script made them: {_some(left)}"] if left else []
    found = _not_kept("excluded tensors", excluded)
    if beginning.manifest is not None:
        found += _not_kept("ranks that died", beginning.manifest.not_bitwise)
    found += _not_kept("DDP", apply.not_kept_of_ddp(saved))
    then, now = saved.worlds
    if saved.exact or (then == now and beginning.manifest and beginning.manifest.lost):
        return found
    found += _not_kept("layout", ["the tensors lie over the ranks in another way"])
    if beginning.rewound:
        why = [f"the window of {beginning.rewound} micro-batches so far begins anew"]
        if own_objects:
            why.append(f"inside that window still, not at its start: {_some(own_objects)}")
        found += _not_kept("window", why)
    if then != now:
        why = [f"{now} ranks instead of {then}: the global batch may change with them"]
        if apart := _of_each_rank(beginning):
            what = f"{now} of {then} go on" if now < then else "new ranks take another's"
            why.append(f"each rank had its own, {what}: {_some(apart)}")
        found += _not_kept("ranks", why)
    return found


def seen_since(otherwise: Otherwise) -> list[Restored]:
    """Return what was seen once training had gone on."""
    found = _not_kept("requires_grad", other_gradients(otherwise.gradients))
    if otherwise.wrappers:
        why = ("in another DDP than the resume could put back what the saved one kept to "
               f"itself: {_some(otherwise.wrappers)} (wrap it as it was when it was saved, "
               "before the first batch is asked for)")  # fmt: skip
        found += _not_kept("DDP", [why])
    if otherwise.attributes:
        why = ("of callbacks, in no state_dict, so not as when it was saved: "
               f"{_some(otherwise.attributes)} ({attributes.HINT_OF_CALLBACKS})")  # fmt: skip
        found += _not_kept("attributes", [why])
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


def _not_kept(name: str, sentences: Sequence[str]) -> list[Restored]:
    return [Restored(name, How.NOT_KEPT, sentence) for sentence in sentences]


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

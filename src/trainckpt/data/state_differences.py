"""Compare saved loader states: reasons against loading one, and the exactness of a resume.

Pure functions over the dicts returned by `TrackedLoader.state`; nothing is loaded or changed.
Used by: loader.py, to refuse a resume or to name its exactness.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainckpt.data.stream_trials import TRIAL_BATCHES
from trainckpt.format.exactness import How, Restored

if TYPE_CHECKING:
    from collections.abc import Collection


def differences(
    name: str,
    saved: dict[str, Any],
    kind: str,
    facts: dict[str, Any],
    accepted: Collection[str] = (),
) -> list[str]:
    """Return each mismatch of a saved state, such as "train: num_workers was 2, is 4".

    Mismatches of the `accepted` facts are left out.
    """
    if saved["kind"] != kind:
        return [f"{name}: the loader was of kind {saved['kind']}, is {kind}"]
    return [
        f"{name}: {key} was {then}, is {now}"
        for key, (then, now) in changed(saved, facts).items()
        if key not in accepted
    ]


def changed(saved: dict[str, Any], facts: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return fact -> saved value and present one, of those that differ."""
    return {
        key: (then, facts.get(key))
        for key, then in saved["facts"].items()
        if then != facts.get(key)
    }


def restored(name: str, saved: dict[str, Any], *, in_place: bool) -> list[Restored]:
    """Return the parts of a loader that a saved state does not restore exactly and checked.

    Another order, for example, shows only during the resume and is reported then.

    Args:
        name: The loader's name in messages.
        saved: The loader's state.
        in_place: The pass resumes at its batch, in the same data-parallel world.
    """
    parts, under = [], saved.get("under", saved)
    if paths := under.get("changing", []):
        reason = (
            f"{name}: {', '.join(paths)[:200]} changed as it was read, and was not kept; if a "
            "sample depends on it, give its object state_dict and load_state_dict, and a stream no "
            "workers that persist"
        )
        parts.append(Restored(name, How.NOT_KEPT, reason))
    if not in_place:
        return parts
    if saved["kind"] in ("stateful", "window"):  # an integration's "window" has one underneath
        if under["own"] is not None:
            whose = f"{saved['facts']['class']}'s own state"
            parts.append(Restored(name, How.OWN_STATE, whose))
        return parts
    is_stream = saved["kind"] == "iterable" or under.get("passed")
    if not is_stream or not under["position"] or under["before"] is None:
        return parts  # its order is compared; or it resumes between passes, checked by a trial
    if under["own"] is None:
        reason = f"{name}: {under['batches']} batches are loaded again"
        parts.append(Restored(name, How.REPLAYED, reason))
    elif not (under.get("trial") or under.get("ran_out") or under["position"] <= TRIAL_BATCHES):
        parts.append(Restored(name, How.OWN_STATE, "its dataset's own state"))
    return parts

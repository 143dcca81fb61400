"""Saved loader states as text: what keeps one from fitting a loader, and how a resume goes on.

Pure functions over the dicts that `TrackedLoader.state` returns; nothing is loaded or changed.
Used by: loader.py, and through it by whoever refuses a resume; whoever says how exact one is.
"""

from __future__ import annotations

from typing import Any

from trainckpt.format.exactness import How, Restored


def differences(name: str, saved: dict[str, Any], kind: str, facts: dict[str, Any]) -> list[str]:
    """Return why a saved state does not fit exactly, e.g. "train: num_workers was 2, is 4"."""
    if saved["kind"] != kind:
        return [f"{name}: the loader was of kind {saved['kind']}, is {kind}"]
    return [
        f"{name}: {key} was {was}, is {facts.get(key)}"
        for key, was in saved["facts"].items()
        if was != facts.get(key)
    ]


def restored(name: str, saved: dict[str, Any], *, in_place: bool) -> list[Restored]:
    """Return how a loader goes on from a saved state, where that is not exactly and checked.

    What turns out only as it goes on, such as another order, is reported then.

    Args:
        name: Of the loader.
        saved: Its state.
        in_place: The pass goes on where it was, not in another data-parallel world.
    """
    found = []
    if paths := saved.get("under", saved).get("changing", []):
        said = f"{name}: {', '.join(paths)[:200]} changed as it was read, and was not kept"
        found.append(Restored(name, How.NOT_KEPT, said))
    if not in_place:
        return found
    if saved["kind"] == "stateful":
        if saved["own"] is not None:
            whose = f"{saved['facts']['class']}'s own state"
            found.append(Restored(name, How.OWN_STATE, whose))
        return found
    under = saved.get("under", saved)
    is_stream = saved["kind"] == "iterable" or under.get("passed")
    if not is_stream or not under["position"] or under["before"] is None:
        return found  # its order is compared; or it goes on between passes, which is tried
    if under["own"] is None:
        how = f"{name}: {under['batches']} batches are loaded again"
        found.append(Restored(name, How.REPLAYED, how))
    elif under.get("trial") is None and not under.get("ran_out"):
        found.append(Restored(name, How.OWN_STATE, "its dataset's own state"))
    return found

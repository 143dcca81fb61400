"""Saved loader states as text: what keeps one from fitting a loader, and what a state consists of.

Pure functions over the dicts that `TrackedLoader.state` returns; nothing is loaded or changed.
Used by: loader.py, and through it by whoever compares two runs or refuses a resume.
"""

from __future__ import annotations

from typing import Any

import torch

from trainckpt.data.randomness import as_bytes

_GENERATORS = {"python": "Python", "numpy": "NumPy", "torch": "torch"}


def differences(name: str, saved: dict[str, Any], kind: str, facts: dict[str, Any]) -> list[str]:
    """Return why a saved state does not fit exactly, e.g. "train: num_workers was 2, is 4"."""
    if saved["kind"] != kind:
        return [f"{name}: the loader was of kind {saved['kind']}, is {kind}"]
    return [
        f"{name}: {key} was {was}, is {facts.get(key)}"
        for key, was in saved["facts"].items()
        if was != facts.get(key)
    ]


def describe(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as a flat dict: readable part name -> a value that can be compared by ==."""
    flat = {key: state[key] for key in ("batches", "samples", "in_pass", "exhausted")}
    flat["passes started"] = state["passes_started"]
    flat.update(state["facts"])
    flat["base seed"] = state.get("base_seed")
    flat["workers reused"] = state.get("reused")
    flat.update(_rng("RNG before the epoch's iterator ({})", state["rng_before"] or {}))
    for worker, rng in sorted(state.get("workers", {}).items()):
        flat.update(_rng(f"worker {worker} {{}} RNG", rng))
    flat.update(_order("", state.get("now")))
    flat.update(_order(" before the epoch's iterator", state.get("before")))
    if state["own"] is not None:
        flat["the loader's own state"] = _comparable(state["own"])
    return flat


def _rng(pattern: str, rng: dict[str, Any]) -> dict[str, Any]:
    return {
        pattern.format(word): _comparable(rng[key])
        for key, word in _GENERATORS.items()
        if key in rng
    }


def _order(when: str, order: dict[str, Any] | None) -> dict[str, Any]:
    if order is None:
        return {}
    flat = {f"{key.replace('.', ' ')}{when}": value for key, value in order["integers"].items()}
    for name, generator in order["generators"].items():
        flat[f"{name} generator{when}"] = _comparable(generator)
    for name, own in order["samplers"].items():
        flat[f"{name} state{when}"] = _comparable(own)
    return flat


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (str(value.dtype), tuple(value.shape), as_bytes(value))
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return value

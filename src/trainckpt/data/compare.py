"""Saved loader states as text: what keeps one from fitting a loader exactly.

A pure function over the dicts that `TrackedLoader.state` returns; nothing is loaded or changed.
Used by: loader.py, and through it by whoever refuses a resume.
"""

from __future__ import annotations

from typing import Any


def differences(name: str, saved: dict[str, Any], kind: str, facts: dict[str, Any]) -> list[str]:
    """Return why a saved state does not fit exactly, e.g. "train: num_workers was 2, is 4"."""
    if saved["kind"] != kind:
        return [f"{name}: the loader was of kind {saved['kind']}, is {kind}"]
    return [
        f"{name}: {key} was {was}, is {facts.get(key)}"
        for key, was in saved["facts"].items()
        if was != facts.get(key)
    ]

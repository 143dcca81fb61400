"""Findings of a stage: figures, each with its goal, written to a file after each one.

A stage that is killed at its time limit has its figures up to then. A figure is one object:

    name     "stall_overlap"
    value    a number, a text, a list or an object; null if it could not be measured
    unit     "s", "bytes/s", ...
    goal     "at most 0.05", or ""
    passed   true, false, or null where there is no goal, or this device cannot be judged by it
    why      the error, or what a reader should know
"""

from __future__ import annotations

import json
import os
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEEDS_CARD = "needs a card"
WHY_CHARACTERS = 1500


class Findings:
    """Figures of one stage, kept in `path`.

    Args:
        path: The JSON file; rewritten as a whole after each figure.
        on_card: Goals of speed and memory are judged; in a rehearsal they are not.
    """

    def __init__(self, path: Path, *, on_card: bool) -> None:
        self.figures: list[dict[str, Any]] = []
        self._path, self.on_card = path, on_card

    def add(
        self,
        name: str,
        value: Any,
        unit: str = "",
        *,
        goal: str = "",
        passed: bool | None = None,
        why: str = "",
    ) -> None:
        """Add a figure; with `passed` it is judged on any device."""
        self.figures.append(
            {
                "name": name,
                "value": rounded(value),
                "unit": unit,
                "goal": goal,
                "passed": passed,
                "why": why[-WHY_CHARACTERS:],
            }
        )
        write_json(self._path, self.figures)

    def at_most(self, name: str, value: float | None, unit: str, limit: float) -> None:
        """Add a figure of speed or memory that must not exceed `limit`."""
        passed = value is not None and value <= limit
        self._judge(name, value, unit, f"at most {rounded(limit)}", passed=passed)

    def at_least(self, name: str, value: float | None, unit: str, limit: float) -> None:
        """Add a figure of speed that must reach `limit`."""
        passed = value is not None and value >= limit
        self._judge(name, value, unit, f"at least {rounded(limit)}", passed=passed)

    def _judge(self, name: str, value: Any, unit: str, goal: str, *, passed: bool) -> None:
        if self.on_card:
            self.add(name, value, unit, goal=goal, passed=passed)
        else:
            self.add(name, value, unit, goal=goal, why="a rehearsal's speed is not judged")

    def needs_card(self, name: str, why: str = "") -> None:
        """Add a figure that only a GPU has; on one it has failed."""
        passed = False if self.on_card else None
        self.add(name, None, passed=passed, why=f"{NEEDS_CARD}{why and ': '}{why}")

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Add an error inside the block as a failed figure; the stage goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever fails, the rest is measured
            shown = "".join(traceback.format_exception(error)[-4:])
            self.add(name, None, passed=False, why=shown)


def rounded(value: Any) -> Any:
    """Return `value`, a float to five digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1) + "\n")
    part.replace(path)

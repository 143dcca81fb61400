"""What can be seen of a run from outside: its trace, its snapshots, its loader workers.

The driver aims by it and the checks judge by it; nothing here asks the run itself.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.campaign.launch import parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.campaign.launch import Forked, Torchrun

_SNAPSHOT = re.compile(r"s(\d+)(?:m(\d+))?~(\d+)\.(\d+)")


@dataclass(frozen=True, order=True)
class Snapshot:
    """A snapshot's folder, ordered as commits are."""

    attempt: int
    sequence: int
    step: int
    micro: int

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.micro


class Scene:
    """The folders of one run."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.run, self.trace = folder / "run", folder / "trace"
        self._ranks = ranks
        self._sizes = [0] * ranks
        self._counts = [0] * ranks

    def lines(self, rank: int) -> list[bytes]:
        """Whole lines of a rank's trace."""
        return whole_lines(self.trace / f"rank{rank}.jsonl")

    def line_counts(self) -> list[int]:
        """Whole lines of every rank; reads only files that have grown."""
        for rank in range(self._ranks):
            file = self.trace / f"rank{rank}.jsonl"
            size = file.stat().st_size if file.exists() else 0
            if size != self._sizes[rank]:
                self._sizes[rank], self._counts[rank] = size, len(whole_lines(file))
        return list(self._counts)

    def attempt_lines(self) -> list[dict]:
        """What rank 0 wrote at the start of each attempt that came so far."""
        return [json.loads(line) for line in whole_lines(self.trace / "attempts.jsonl")]

    def records(self) -> dict[int, dict]:
        """The library's own records of the attempts."""
        files = (self.run / "attempts").glob("[0-9]*.json")
        return {int(file.stem): json.loads(file.read_bytes()) for file in files}

    def finals(self) -> list[str | None]:
        """Each rank's digest of the finished run."""
        files = [self.trace / f"final{rank}.json" for rank in range(self._ranks)]
        return [json.loads(f.read_text())["digest"] if f.exists() else None for f in files]

    def snapshots(self, *, committed: bool) -> list[Snapshot]:
        """Snapshots with a manifest, or those without one (yet), oldest first."""
        folder = self.run / "snapshots"
        try:
            names = os.listdir(folder)  # noqa: PTH208 - called in a tight loop
        except OSError:
            return []
        matches = [_SNAPSHOT.fullmatch(name) for name in names]
        found = []
        for match in filter(None, matches):
            step, micro, attempt, sequence = (int(part or 0) for part in match.groups())
            if (folder / match[0] / "manifest.json").exists() == committed:
                found.append(Snapshot(attempt, sequence, step, micro))
        return sorted(found)

    def is_inexact(self, snapshot: Snapshot) -> bool:
        """Whether the survivors of dead ranks have saved it, without what died with those."""
        folders = (self.run / "snapshots").glob(f"*~{snapshot.attempt}.{snapshot.sequence}")
        for folder in folders:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            return bool(manifest.get("lost") or manifest.get("carried"))
        return False


def whole_lines(file: Path) -> list[bytes]:
    """The file's lines that end with a newline; none if it does not exist."""
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return []
    return text[: text.rfind(b"\n") + 1].splitlines(keepends=True)


def place_of(line: bytes) -> tuple[int, int]:
    """(step, micro) of a trace line."""
    record = json.loads(line)
    return record["step"], record["micro"]


def after(place: tuple[int, int], accumulate: int) -> tuple[int, int]:
    """The place that follows."""
    step, micro = place
    return (step, micro + 1) if micro + 1 < accumulate else (step + 1, 0)


def loader_workers(attempt: Forked | Torchrun, ranks: Sequence[int]) -> list[int]:
    """Loader workers that live: members whose parent is a rank."""
    return [pid for pid in attempt.members() if parent(pid) in ranks]

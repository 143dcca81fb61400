"""A campaign: a warm server, a folder, a cache of references, one case after another.

References are kept between campaigns, under a digest of everything they depend on: the library,
the examples, torch, Python and the processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaign import check_reshard, drive, families, launch, report, reshard
from tests.campaign.check import check
from tests.campaign.watch import Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.campaign.cases import Case, Settings
    from tests.campaign.drive import Ended
    from tests.campaign.launch import Server


@dataclass
class Campaign:
    """Runs cases by their seeds."""

    server: Server
    folder: Path
    references: Path

    def run(
        self, seed: int, *, keep: bool = False, family: str = families.RANDOM
    ) -> tuple[dict[str, Any], str]:
        """One case: its line, and the logs of its attempts. A failure keeps its folder."""
        case = families.draw(family, seed)
        folder = self.folder / f"{family}-seed{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        attempts, wrong = self._checked(case, folder)
        if wrong and reference_digest() != self.references.name:
            wrong.append("(the library was changed meanwhile: not a finding)")
        line = report.line_of(family, case, attempts, wrong, Scene(folder, case.settings.ranks))
        if not wrong and not keep:
            shutil.rmtree(folder)
        return line, "\n".join(ended.logs for ended in attempts)

    def _checked(self, case: Case | reshard.Chain, folder: Path) -> tuple[list[Ended], list[str]]:
        """The attempts of a case, and what is wrong."""
        if isinstance(case, reshard.Chain):
            attempts = reshard.run(case, self.server, folder)
            return attempts, check_reshard.check(case, attempts, folder)
        reference = self._reference(case.settings)
        attempts = drive.run_case(case, self.server, folder)
        return attempts, check(case, attempts, folder, reference)

    def _reference(self, settings: Settings) -> Path:
        whole = self.references / settings.key
        if not whole.exists():
            part = Path(tempfile.mkdtemp(dir=self.references, prefix="part-"))
            drive.run_reference(settings, self.server, part)
            shutil.rmtree(part / "run")
            if not whole.exists():  # another campaign may have been faster
                part.rename(whole)
        return whole


@contextmanager
def campaign(folder: Path | None = None, server: Server | None = None) -> Iterator[Campaign]:
    """A campaign in `folder`, or in a temporary one that is removed unless a case has failed.

    Its ranks are forked from this server, or from one of its own.
    """
    place = folder or Path(tempfile.mkdtemp(prefix="trainckpt-campaign-"))
    place.mkdir(parents=True, exist_ok=True)
    digest = reference_digest()
    references = Path(tempfile.gettempdir()) / f"trainckpt-references-{os.getuid()}" / digest
    references.mkdir(parents=True, exist_ok=True)
    try:
        with nullcontext(server) if server else launch.server() as warm:
            yield Campaign(warm, place, references)
    finally:
        if folder is None and not any(place.iterdir()):
            place.rmdir()


def reference_digest() -> str:
    sha = hashlib.sha256()
    library, examples = launch.ROOT / "src", launch.ROOT / "examples"
    for file in sorted([*library.rglob("*.py"), *examples.glob("*.py")]):
        sha.update(file.read_bytes())
    facts = sys.version, version("torch"), version("numpy"), platform.processor(), _processor()
    sha.update(repr(facts).encode())
    return sha.hexdigest()[:16]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

"""Last words: that a rank crashed in native code while it resumed, where no supervisor sees it.

    RUN/attempts/<n>.rank<r>.fault    empty from the claim to the first boundary, then removed;
                                      a segmentation fault, an abort and their like write into it

Only where the run lives in a directory. Python's faulthandler writes it, from the signal's own
handler. Where the script, or a test runner, uses faulthandler itself, it is left alone. Two such
deaths on one snapshot pass it over (`choice`); nothing else that ends a process without a word
leaves any.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
from typing import TYPE_CHECKING

from trainckpt.errors import TrainckptError
from trainckpt.format import names
from trainckpt.format.attempt import FAILED, STARTING
from trainckpt.lifecycle.run.told import SUPERVISOR_VARIABLE
from trainckpt.tiers.local import LocalTier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from trainckpt.format.attempt import AttemptRecord
    from trainckpt.tiers.places import Place

_FAULT = re.compile(r"(\d+)\.rank\d+\.fault")
MAX_BYTES = 1 << 20
CRASHED = "crashed in native code"


class LastWords:
    """One rank's; `listen` at the claim, `stop` at the first boundary or when the resume failed."""

    def __init__(self, tier: Place, rank: int) -> None:
        # A crash can only write into a file that is open.
        self._folder = tier.root / names.ATTEMPTS if isinstance(tier, LocalTier) else None
        self._rank = rank
        self._file: TextIO | None = None

    def listen(self, attempt: int) -> None:
        """From now on a crash leaves a word. A place that cannot be written stops nothing."""
        if os.environ.get(SUPERVISOR_VARIABLE) or faulthandler.is_enabled():
            return
        if self._folder is None:
            return
        path = self._folder / f"{attempt}.rank{self._rank}.fault"
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._file = path.open("x", encoding="utf-8")
            path.chmod(0o600)
            faulthandler.enable(self._file)

    def stop(self) -> None:
        """Whatever happens from now on has another cause."""
        if self._file is None:
            return
        faulthandler.disable()
        self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._file.name)  # noqa: PTH108 - of an open file's own name
        self._file = None


def heard(tier: Place, before: Mapping[int, AttemptRecord]) -> dict[int, AttemptRecord]:
    """The records, those of silent attempts that left last words with the outcome these tell.

    Empty files, of attempts that ended otherwise, are removed.
    """
    found = dict(before)
    for name in tier.list(names.ATTEMPTS):
        match = _FAULT.fullmatch(name)
        record = before.get(int(match[1])) if match else None
        if record is None:
            continue
        key = f"{names.ATTEMPTS}/{name}"
        with contextlib.suppress(TrainckptError):
            if not tier.size(key):
                tier.remove(key)
            elif record.outcome is None and record.state == STARTING:
                word = tier.read(key, max_bytes=MAX_BYTES).decode(errors="replace")
                first = word.splitlines()[0][:200] if word else ""
                outcome = {"outcome": FAILED, "reason": f"{CRASHED}: {first}"}
                found[record.attempt] = record.with_(outcome=outcome)
    return found

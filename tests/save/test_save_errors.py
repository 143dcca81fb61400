"""What is told of a failed save: the words of every rank, and one thing to do about it."""

from __future__ import annotations

import errno
import os

from trainckpt.errors import SaveFailed, TierUnavailable
from trainckpt.save import committer
from trainckpt.state.staging import TensorsChanged


def full(words, hint=""):
    """A place without space, as a tier says it."""
    found = TierUnavailable(words, hint=hint)
    found.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return found


def test_a_hint_of_one_rank_is_raised_on_all_and_all_errors_are_listed():
    reports = [
        committer.to_error_message(SaveFailed("too late"), 0, "runs/x"),
        committer.to_error_message(TierUnavailable("closed", hint="open it"), 1, "runs/x"),
        {"error": "rank 2: gone"},
    ]
    error = committer.error_from_message(committer.combine_errors(reports))
    assert (type(error), error.hint) == (SaveFailed, "open it")
    assert error.message == "rank 0: too late; rank 1: closed; rank 2: gone"


def test_tensors_that_changed_stay_what_they_are_on_every_rank():
    told = committer.to_error_message(TensorsChanged("changed"), 1, "runs/x")
    assert type(committer.error_from_message(committer.combine_errors([told]))) is TensorsChanged


def test_a_full_place_is_pruned_and_another_full_disk_is_not():
    prune = "`trainckpt prune runs/x --keep-last 1`"
    place = committer.to_error_message(full("no"), 0, "runs/x")["hint"]
    assert place == f"free space there, e.g. by {prune}, then start again; older snapshots stand"
    assert committer.to_error_message(full("no", "free some"), 0, "runs/x")["hint"].startswith(
        "free some, e.g."
    )
    other = committer.to_error_message(OSError(errno.EDQUOT, "Disk quota exceeded"), 0, "runs/x")
    assert other["hint"] == "free space there, then start again; older snapshots stand"
    assert "Disk quota exceeded" in other["error"]
    assert committer.to_error_message(OSError(errno.EIO, "broken"), 0, "runs/x")["hint"] == ""

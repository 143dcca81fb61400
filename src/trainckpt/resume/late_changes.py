"""Differences between the script and its snapshot that a start cannot know, found in training.

    windows    their length, where no option says it
    commit     the git commit, where git is slow

Each is put into the attempt's record, for the resumes from its snapshots. Rank 0, training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainckpt.format import changes as kinds
from trainckpt.format.changes import SCRIPT, Change
from trainckpt.resume.script_changes import FACT, as_text, commit_changes, log, restored

if TYPE_CHECKING:
    from trainckpt.attempt.git_commit import GitCommit
    from trainckpt.attempt.record_writer import RecordWriter
    from trainckpt.resume.exactness_report import ResumeReport
    from trainckpt.resume.script_changes import ScriptChanges

_WINDOWS = 3  # trained until those of a window are known


class ObservedWindows:
    """Micro-batches of a window, as trained, where no option says them.

    Taken from the second and the third window of an attempt: the first may be the rest of one, and
    one of two in a row may be cut short by the end of an epoch.

    Attributes:
        is_over: They are known, and compared with those of the snapshot's attempt.
    """

    def __init__(
        self, script: ScriptChanges, record_writer: RecordWriter, report: ResumeReport, step: int
    ) -> None:
        self.is_over = script.script.get(kinds.ACCUMULATION) is not None
        self._script, self._record_writer, self._report = script, record_writer, report
        self._begun = self._step = step
        self._longest = 0

    def reach(self, step: int, window: int | None) -> None:
        """Note the window that ended with this step."""
        if step == self._step or window is None:
            return
        self._step = step
        if step > self._begun + 1:
            self._longest = max(self._longest, window)
        if step < self._begun + _WINDOWS:
            return
        self.is_over = True
        self._record_writer.keep_fact(FACT, kinds.ACCUMULATION, self._longest)
        then = self._script.accumulation
        if then is not None and then != self._longest:
            texts = as_text(then), as_text(self._longest)
            change = Change(kinds.ACCUMULATION, "micro-batches of a window", *texts, SCRIPT)
            log([change])
            self._report.note(restored([change]))


class ObservedCommit:
    """The git commit, where git named it after the start.

    Attributes:
        is_over: It is known, and compared with that of the snapshot's attempt.
    """

    def __init__(
        self, script: ScriptChanges, record_writer: RecordWriter, commit: GitCommit
    ) -> None:
        self.is_over = kinds.GIT_COMMIT in script.script
        self._script, self._record_writer, self._commit = script, record_writer, commit

    def reach(self, *_: object) -> None:
        """Compare the commit once it is known. At the end of a window."""
        if not self._commit.is_known_within(0):
            return
        self.is_over = True
        then, now = self._script.commit, self._commit.value
        self._record_writer.keep_fact(FACT, kinds.GIT_COMMIT, now)
        log(commit_changes(then, now, SCRIPT))

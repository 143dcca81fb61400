"""The handle of a save: its state, and waiting for a later one.

    requested --> staged --> local --> durable     (without slower tiers the last two are one)
         \\__________\\________> failed

Made by the training thread, advanced by it (requested, staged), by the saving thread (local) and
by the uploader to the durable tier. An upload error is raised from `wait`, and the upload is tried
again: the save itself stands.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainckpt.errors import ConfigurationError, SaveFailed, TrainckptError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainckpt.format.manifest import FileEntry, Manifest
    from trainckpt.state.staging import Shard, StreamedShard

REQUESTED, STAGED, COMMITTED, DURABLE = 0, 1, 2, 3
MOMENTS = {"staged": STAGED, "local": COMMITTED, "durable": DURABLE}
PARTNER = "partner"
NO_PARTNER = "redundancy names no rank of another host"


class SaveHandle:
    """One requested save and its progress.

    Attributes:
        snapshot: Full name of the snapshot, once it is staged; None before.
        error: The reason of its failure, or None.
        not_durable: The failure of its last copy to the durable tier, or None.
        why_not_replicated: "" once other hosts hold it too, or the reason against it; None while
            that is open.
        deferred: The reason why it is taken at a later boundary, or "".
        is_requested: A caller may wait for it: it is deferred rather than skipped, and each slower
            tier gets it, whatever its interval.
    """

    def __init__(self, *, is_requested: bool = True) -> None:
        self.snapshot: str | None = None
        self.error: SaveFailed | None = None
        self.not_durable: SaveFailed | None = None
        self.why_not_replicated: str | None = None
        self.deferred = ""
        self.is_requested = is_requested
        self._before_wait: Callable[[], None] = lambda: None
        self._training_thread = threading.get_ident()
        self._reached = REQUESTED
        self._for_good = False
        self._aliases: list[SaveHandle] = []
        self._changed = threading.Condition()

    def wait(self, moment: str = "durable", timeout_s: float | None = None) -> SaveHandle:
        """Block until the save has reached a moment.

        Args:
            moment: "staged": training may change the tensors again. "partner": another host holds
                the snapshot too. "local": it is committed in the run directory. "durable": it is
                committed in the durable tier.
            timeout_s: Seconds to wait; None for ever, 0 to ask without waiting.

        Raises:
            SaveFailed: The save did not commit, and older snapshots stand. For "durable", the copy
                failed and may be tried again: wait again. On the training thread also if the save
                is deferred (`deferred`): train on, and wait again.
            ConfigurationError: The moment is unknown, or the save is taken at the next boundary
                and this thread has to train until then.
            TimeoutError: The moment was not reached in time.
        """
        if moment == PARTNER:
            return self._wait_replicated(timeout_s)
        if moment not in MOMENTS:
            hint = "wait for staged, partner, local or durable"
            raise ConfigurationError(
                f"no tier of this run reaches the moment {moment!r}", hint=hint
            )
        if self._reached < MOMENTS[moment] and self.error is None:
            self._call_before_wait(timeout_s)
        with self._changed:
            if self._reached == REQUESTED and self.error is None and self._is_training_thread():
                raise self._not_taken_yet()
            wanted = MOMENTS[moment]
            over = self._changed.wait_for(
                lambda: self._reached >= wanted or self._why_not(wanted) is not None, timeout_s
            )
            why_not = None if self._reached >= wanted else self._why_not(wanted)
            if wanted == DURABLE and not self._for_good:
                self.not_durable = None  # said once; a later wait is for the next try
        if not over:
            raise TimeoutError(f"the save has not reached {moment} after {timeout_s} s")
        if why_not is not None:
            raise why_not
        return self

    def _not_taken_yet(self) -> TrainckptError:
        if self.deferred:
            hint = "train on, and wait again: it is taken as soon as that one is through"
            return SaveFailed(f"not taken yet: {self.deferred}", hint=hint)
        return ConfigurationError(
            "this save is taken at the next boundary, which this thread would never reach",
            hint="keep the handle, and wait after the next batch was asked for",
        )

    def _why_not(self, wanted: int) -> SaveFailed | None:
        return self.error or (self.not_durable if wanted == DURABLE else None)

    def _wait_replicated(self, timeout_s: float | None) -> SaveHandle:
        self.wait("staged", timeout_s)
        if self.why_not_replicated is None and self.error is None:
            self._call_before_wait(timeout_s)
        with self._changed:
            known = self._changed.wait_for(
                lambda: self.error is not None or self.why_not_replicated is not None, timeout_s
            )
        if not known:
            raise TimeoutError(f"the save has not reached {PARTNER} after {timeout_s} s")
        if self.error is not None:
            raise self.error
        if self.why_not_replicated == NO_PARTNER:
            hint = 'redundancy="partner" on two hosts or more, or wait for another'
            raise ConfigurationError(
                f"no tier of this run reaches the moment {PARTNER!r}: {NO_PARTNER}", hint=hint
            )
        if self.why_not_replicated:
            raise SaveFailed(
                f"{self.snapshot} is not held by other hosts: {self.why_not_replicated}"
            )
        return self

    @property
    def ended(self) -> bool:
        """True once the save is committed or has failed."""
        return self.error is not None or self._reached >= COMMITTED

    def defer(self, reason: str) -> None:
        """Record that it is taken at a later boundary."""
        self.deferred = reason

    def stage(self, snapshot: str, before_wait: Callable[[], None]) -> None:
        """Advance the save to staged.

        Args:
            snapshot: Full name.
            before_wait: Called by the training thread before it waits: copies may be under way
                beside training, and other ranks may delay the save for a step to come.
        """
        self._before_wait = before_wait
        self.reach(STAGED, snapshot)

    def reach(self, state: int, snapshot: str | None = None) -> None:
        """Advance the save to `state`."""
        with self._changed:
            self._reached, self.deferred = max(self._reached, state), ""
            self.snapshot = snapshot or self.snapshot
            self._changed.notify_all()
            for other in self._aliases:
                other.reach(state, snapshot)

    def set_replicated(self, why_not: str = "") -> None:
        """Record that other hosts hold it too, or why they will not."""
        with self._changed:
            self.why_not_replicated = why_not
            self._changed.notify_all()

    def fail(self, error: SaveFailed) -> None:
        """Record that the save will not commit."""
        with self._changed:
            self.error, self.deferred = error, ""  # on any rank: no other rank tries it again
            self._changed.notify_all()

    def fail_durable(self, error: SaveFailed, *, for_good: bool = False) -> None:
        """Record that the copy of the committed save to the durable tier failed, for now or for
        good.
        """
        with self._changed:
            self.not_durable, self._for_good = error, for_good
            self._changed.notify_all()
            for other in self._aliases:
                other.fail_durable(error, for_good=for_good)

    def add_alias(self, other: SaveHandle) -> None:
        """Let `other` reach all that this committed save reaches: it is the same save."""
        with self._changed:
            self._aliases.append(other)
            other.why_not_replicated = self.why_not_replicated
            other.reach(self._reached, self.snapshot)
            if self.not_durable is not None:
                other.fail_durable(self.not_durable, for_good=self._for_good)

    def _call_before_wait(self, timeout_s: float | None) -> None:
        """Make other ranks and copies hurry if this wait blocks training; a poll does not."""
        if self._is_training_thread() and timeout_s != 0:
            self._before_wait()

    def _is_training_thread(self) -> bool:
        return threading.get_ident() == self._training_thread


class SaveStages(NamedTuple):
    """Seconds of one save's parts, which follow each other.

    Attributes:
        stage_s: Until the state was in memory; None: it was written from where it lay.
        persist_s: Until this rank's file was on stable storage.
        commit_s: Until the snapshot was committed.
    """

    stage_s: float | None = None
    persist_s: float = 0.0
    commit_s: float = 0.0


NOT_MEASURED = SaveStages()


@dataclass(frozen=True, kw_only=True)
class CommitEvent:
    """A snapshot that was just committed, as each rank's subscribers get it. Saving thread.

    Attributes:
        manifest: The manifest, as far as one rank knows it.
        whole: Rank 0: the manifest that was committed; None on other ranks.
        shard: This rank's part of the snapshot.
        file: Entry of this rank's file.
        num_bytes: Bytes of the whole state, not of this rank's part.
        seconds: Time from the save's beginning to the commit.
        is_final: The attempt ends with this save.
        stages: Its parts.
    """

    manifest: Manifest
    whole: Manifest | None
    shard: Shard | StreamedShard
    file: FileEntry
    handle: SaveHandle
    num_bytes: int
    seconds: float
    is_final: bool
    stages: SaveStages = NOT_MEASURED

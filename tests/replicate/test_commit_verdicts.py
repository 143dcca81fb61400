"""A listener that fails after a commit gives its verdict to callers that wait for the save."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainckpt.attempt.save_handle import COMMITTED, CommitEvent, SaveHandle
from trainckpt.errors import SaveFailed
from trainckpt.replicate.uploads import Uploads
from trainckpt.save.replication_control import ReplicationControl


class Uploader:
    """An uploader whose queue takes a snapshot, or fails."""

    def __init__(self, name, error=None):
        self.tier, self.error, self.offered = SimpleNamespace(name=name), error, []

    def offer(self, manifest, pending, own_bytes):
        if self.error is not None:
            raise self.error
        self.offered.append(manifest)


def committed():
    handle = SaveHandle()
    handle.reach(COMMITTED, "s1~1.1")
    return CommitEvent(
        manifest=SimpleNamespace(name="s1~1.1"),
        whole=None,
        shard=None,
        file=None,
        handle=handle,
        num_bytes=8,
        seconds=0.1,
        is_final=False,
    )


def test_a_copy_that_could_not_be_queued_is_never_waited_for():
    event = committed()
    uploads = Uploads([Uploader("near"), Uploader("far", OSError("no thread"))], "far")
    with pytest.raises(OSError, match="no thread"):
        uploads.on_commit(event)
    for _ in range(2):
        with pytest.raises(SaveFailed, match="not copied to far: no thread"):
            event.handle.wait("durable", timeout_s=5)


def test_a_tier_that_fails_leaves_the_copies_of_others_to_come():
    event, far = committed(), Uploader("far")
    with pytest.raises(OSError, match="full"):
        Uploads([Uploader("near", OSError("full")), far], "far").on_commit(event)
    assert far.offered == [event.manifest]
    with pytest.raises(TimeoutError):
        event.handle.wait("durable", timeout_s=0.01)


def test_a_replication_that_fails_tells_why_no_other_host_has_the_snapshot():
    event = committed()

    class Replicator:
        plan = SimpleNamespace(num_losses=1)

    control = ReplicationControl.__new__(ReplicationControl)
    control.replicator = Replicator()
    control._end_rereplication = lambda *_: True
    control._replicate = lambda *_: (_ for _ in ()).throw(RuntimeError("peer is gone"))
    with pytest.raises(RuntimeError):
        control.on_commit(event)
    assert event.handle.why_not_replicated == "peer is gone"

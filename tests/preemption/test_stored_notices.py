"""Notices in an object store, listed by a store of the test's own."""

from __future__ import annotations

from trainckpt.errors import TierUnavailable
from trainckpt.preemption.stored_notices import StoredNotices


class Store:
    """Objects of one folder; raises `error`, where one is set."""

    def __init__(self):
        self.objects = {}
        self.error = None

    def list(self, folder):
        if self.error is not None:
            raise self.error
        return [key.removeprefix(f"{folder}/") for key in self.objects]

    def read(self, key, *, max_bytes):
        return self.objects[key][:max_bytes]


def test_a_store_that_fails_is_reported_once_and_asked_again():
    store, said = Store(), []
    notices = StoredNotices(store, 2, said.append)
    store.objects["notices/2-a.json"] = b'{"reason": "test"}'
    store.error = TierUnavailable("no answer")
    notices.look()
    notices.look()
    assert notices.poll() == []
    assert len(said) == 1
    assert "no answer" in said[0]
    store.error = None
    notices.look()
    notices.look()
    assert [notice.reason for notice in notices.poll()] == ["test"]
    assert len(said) == 1

"""A store that is killed, stopped, slow, refusing or full while a run trains: nothing waits for it.

Each trouble lasts until training has gone on for a while and the store was asked in vain;
then it is over, and the next save has to get there. What was trained is what a run without any
trouble trains, to the bit.
"""

from __future__ import annotations

import functools
import tempfile
import time
from contextlib import ExitStack
from functools import partial

import pytest

from tests.end_to_end.training import Parts, attempt
from tests.faults.troubled_store import TroubledStore
from trainckpt.format.names import SnapshotName
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.verify import verify
from trainckpt.storage import retry, s3_client

pytest.importorskip("s3fs")
WIDTH = 4000  # its files are sent in several parts
LASTS = 8  # micro-batches
EPOCHS = 30


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Parts are small, pauses short, and who says nothing is asked again soon."""
    limits = partial(retry.Limits, part_bytes=64 << 10, longest_pause_s=1.0)
    monkeypatch.setattr(retry, "Limits", limits)
    monkeypatch.setattr(s3_client, "SILENT_S", 2.0)


@pytest.fixture
def server(tmp_path, at):
    with ExitStack() as stack:
        found = TroubledStore(tmp_path / "server", stack)
        at(found)
        yield found


def troubles(server):
    """How each begins, and how it ends."""
    return [
        (server.killed, server.begun_again),
        (server.stopped, server.continued),
        (server.between.hold, server.between.let_go),
        (partial(server.refusing, 500, 503), server.between.reset),
        (partial(server.refusing, 507), server.between.reset),
    ]


def train_through(server, run, **options):
    """One attempt through all troubles; what was saved after each, and where the run was then."""
    coming, saved, pending = troubles(server), [], []
    begins = 3

    def inside(ckpt, _):
        nonlocal begins
        number = ckpt.cursor.micro_batches
        if number == begins - 1 and coming:
            ckpt.save()  # is on its way when the trouble begins; nobody waits for it
        elif number == begins and coming:
            coming[0][0]()
        elif number == begins + LASTS and coming:
            while not server.between.requests and is_saving(ckpt):
                time.sleep(0.01)
            coming.pop(0)[1]()
            pending.append(ckpt.save())
        elif len(pending) > len(saved) and pending[-1].snapshot is None:
            while ckpt._attempt.saver.busy:  # what was begun in the trouble comes to its end
                time.sleep(0.01)
        elif len(pending) > len(saved):
            saved.append(pending[-1].wait("local").snapshot)
            for flusher in ckpt._attempt.saver.uploads.uploaders:
                while flusher.newest is None or newer(saved[-1], flusher.newest):
                    time.sleep(0.01)
            begins = number + 2

    parts = Parts(width=WIDTH)
    attempt(run, epochs=EPOCHS, inside=inside, parts=parts, **{"every": "never", **options})
    assert len(saved) == len(troubles(server))
    assert parts.state() == straight()
    return saved


@functools.cache
def straight():
    """The state that training ends with where nothing is saved, and no store is asked."""
    parts = Parts(width=WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        attempt(folder, epochs=EPOCHS, parts=parts, every="never")
    return parts.state()


def is_saving(ckpt):
    saver = ckpt._attempt.saver
    return saver.busy or bool(saver.uploads.busy)


def newer(one, other):
    return SnapshotName.parse(one) > SnapshotName.parse(other)


def nothing_is_wrong_with(url, server):
    """Whatever is listed is whole, and no parts are left of anything."""
    tier = run_url.open_run_tier(url)
    found = read_catalog(tier, attempt_history.run_id(tier), attempt_history.read_attempts(tier))
    whole = [c for c in found if c.usable]
    assert whole
    for candidate in whole:
        assert all(copy.ok for copy in verify(tier, candidate.manifest))
    assert tier.abort_stale_uploads(0.0) == 0
    return str(whole[0].name)


def test_a_run_in_a_store_trains_through_all_its_troubles(server):
    saved = train_through(server, "s3://bucket/run", keep_last=99)
    newest = nothing_is_wrong_with("s3://bucket/run", server)
    assert newest not in saved
    tier = run_url.open_run_tier("s3://bucket/run")
    assert attempt_history.read_attempts(tier)[1].outcome["outcome"] == "finished"


def test_a_run_beside_a_store_trains_through_all_its_troubles(server, tmp_path):
    train_through(server, tmp_path / "run", tiers="s3://bucket/slower")
    newest = nothing_is_wrong_with("s3://bucket/slower", server)
    told = attempt_history.read_attempts(run_url.open_run_tier(tmp_path / "run"))[1]
    assert told.outcome["tiers"] == ["local", "s3"]
    assert newest == told.newest_commit

"""A store that fails at each request in turn: nothing half-committed is listed, nothing is left."""

from __future__ import annotations

from itertools import cycle, pairwise

import pytest

from tests.faults.s3_proxy import CUT, DROP, LOSE, proxy
from tests.long_cases import long
from tests.snapshot.written import committed, written
from trainckpt.errors import TrainckptError, UnusableSnapshot
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.snapshot.commit import commit
from trainckpt.storage import s3_client
from trainckpt.storage.object_store import ObjectStoreTier
from trainckpt.storage.retry import Limits, RetryPolicy

s3fs = pytest.importorskip("s3fs")

AT_ONCE = {"first_pause_s": 0.0, "longest_pause_s": 0.0, "part_bytes": 64 << 10}
PATIENT, HASTY = Limits(**AT_ONCE), Limits(**AT_ONCE, give_up_s=0.0, give_up_first_s=0.0)
DATA = memoryview(bytes(range(256)) * 400)


@pytest.fixture(scope="module")
def client(rclone_server):
    """A client through a proxy, and the proxy."""
    patch = pytest.MonkeyPatch()
    with proxy(rclone_server.port) as between:
        for name, value in rclone_server.environment(between.port).items():
            patch.setenv(name, value)
        filesystem = s3fs.S3FileSystem(skip_instance_cache=True, **s3_client.options({}))
        yield s3_client.S3Client(filesystem), between
    patch.undo()


class Clock:
    """A little later each time it is looked at."""

    now_s = 0.0

    def __call__(self):
        self.go_on(0.001)
        return self.now_s

    def go_on(self, seconds):
        self.now_s += seconds


def tier_of(client, limits=PATIENT, root="run", **how):
    url = f"s3://bucket/{root}"
    return ObjectStoreTier("s3", url, client, f"bucket/{root}", RetryPolicy(url, limits, **how))


def save(tier, number):
    """A snapshot, and with it a large file, in parts."""
    manifest = written(tier, f"s{number}~1.{number}")
    tier.write_parts(f"{manifest.name.folder}/large", len(DATA), iter([(0, DATA)]))
    commit(tier, manifest)
    return str(manifest.name)


def usable(tier):
    return {str(c.name) for c in read_catalog(tier, "run", {}) if c.usable}


def unfinished(client, root):
    """How many uploads the server still has; they are gone then."""
    return client.abort_uploads(f"bucket/{root}")


def requests_of_a_save(client, between, root):
    """Of the second save of a run; the first makes its record too."""
    for number in (1, 2):
        between.reset()
        save(tier_of(client, root=root), number)
    return between.requests


def test_what_one_request_of_a_save_meets_is_made_good(client):
    client, between = client
    requests, number = requests_of_a_save(client, between, "one"), 2
    assert {method for method, _ in requests} == {"HEAD", "PUT", "POST"}
    tier, others = tier_of(client, root="one"), cycle([CUT, 500, 503])
    for at in range(1, len(requests) + 1):
        for fault in (DROP, LOSE, next(others)):
            number += 1
            between.reset({at: fault}.get)
            name = save(tier, number)
            between.reset()
            large = f"snapshots/{name}/large"
            assert tier.read(large, max_bytes=len(DATA)) == DATA, (fault, at)
    assert len(usable(tier)) == number
    assert unfinished(client, "one") == 0
    client.begin("bucket/one/k", 1)
    assert unfinished(client, "one") == 1


@pytest.mark.parametrize("faults", [[DROP], [LOSE], *long([503, 507])], ids=str)
def test_a_store_that_fails_from_a_request_on_keeps_what_there_was_and_takes_what_comes(
    client, faults
):
    client, between = client
    root, faults = f"from-{faults[0]}", cycle(faults)
    requests, number = requests_of_a_save(client, between, root), 2
    expected = {"s1~1.1", "s2~1.2"}
    for at, (method, path) in enumerate(requests, 1):
        number, fault = number + 2, next(faults)
        between.reset(lambda n, at=at, fault=fault: fault if n >= at else None)
        clock = Clock()
        tier = tier_of(client, HASTY, root=root, clock=clock)
        with pytest.raises(TrainckptError):
            save(tier, number - 1)
        between.reset()
        if fault == LOSE and at == len(requests):  # of the commit only its answer was lost
            expected.add(f"s{number - 1}~1.{number - 1}")
        clock.go_on(60.0)  # what the store could not be told, it is told with the next save
        expected.add(str(committed(tier, f"s{number}~1.{number}").name))
        assert unfinished(client, root) == 0, (fault, at, method, path)
    assert usable(tier) == expected


def test_a_created_name_is_ours_though_the_answer_was_lost(client):
    client, between = client
    tier = tier_of(client, root="created")
    between.reset()
    assert tier.create("k", b"1")
    requests = len(between.requests)
    for fault in (DROP, LOSE):
        for at in range(1, requests + 1):
            between.reset({at: fault}.get)
            tier.remove(f"k{at}")
            between.reset({at: fault}.get)
            assert tier.create(f"k{at}", b"1"), (fault, at)
            assert not tier.create(f"k{at}", b"2")
            assert tier.read(f"k{at}", max_bytes=1) == b"1"


def test_what_is_read_is_asked_for_once(client):
    """But for what is broken off: then only that is asked for again."""
    client, between = client
    tier = tier_of(client, root="read")
    tier.write_parts("k", len(DATA), [(0, DATA)])
    into = memoryview(bytearray(len(DATA)))
    cuts = [0, 10, 1000, 99_999, len(DATA)]
    parts = [(a, into[a:b]) for a, b in pairwise(cuts)]
    between.reset()
    tier.read_parts("k", parts)
    assert into == DATA
    assert between.sent_bytes == len(DATA)
    for fault in (DROP, LOSE, CUT, 503):
        for at in range(1, len(parts) + 1):
            into[:] = bytes(len(into))
            between.reset({at: fault}.get)
            tier.read_parts("k", parts)
            assert into == DATA, (fault, at)


def test_a_body_is_sent_at_once_for_a_store_may_refuse_what_it_has_not_read(client):
    """And wait for it all the same, with no word that it may come."""
    client, between = client
    tier = tier_of(client, root="unasked")
    between.reset({1: 503}.get)
    tier.replace("k", b"1")
    assert len(between.requests) == 2
    assert tier.read("k", max_bytes=1) == b"1"


def test_a_bucket_that_is_not_there_is_no_empty_place(client):
    client, between = client
    between.reset()
    nowhere = ObjectStoreTier("s3", "s3://no", client, "no/run", RetryPolicy("s3://no", PATIENT))
    for ask in (
        lambda: nowhere.size("run.json"),
        lambda: nowhere.list("snapshots"),
        lambda: nowhere.replace("k", b""),
    ):
        with pytest.raises(TrainckptError) as caught:
            ask()
        assert not isinstance(caught.value, UnusableSnapshot)
        assert "make the bucket" in caught.value.hint


def test_wrong_credentials_are_refused_at_once(rclone_server):
    filesystem = s3fs.S3FileSystem(
        key="somebody-else-entirely",
        secret="wrong-secret-key",
        skip_instance_cache=True,
        endpoint_url=f"http://127.0.0.1:{rclone_server.port}",
        **s3_client.options({}),
    )
    tier = tier_of(s3_client.S3Client(filesystem))
    with pytest.raises(TrainckptError) as caught:
        tier.size("run.json")
    assert "credentials" in caught.value.hint
    assert tier.health().state == "closed"

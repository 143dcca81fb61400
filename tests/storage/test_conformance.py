"""Every tier, against the contract: a directory, fsspec's memory, two real S3 servers."""

from __future__ import annotations

from itertools import count

import pytest

from tests.storage import conformance
from trainckpt.errors import TierUnavailable
from trainckpt.storage.local import LocalTier
from trainckpt.storage.object_store import open_object_store

NUMBERS = count()
FOUND_FAULTY = (AssertionError, TierUnavailable)
# rclone truncates an object and then writes it anew, which readers see.
NOT_BY_RCLONE = (conformance.readers_see_the_old_bytes_or_the_new,)


def by_name(checks):
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)


@by_name(conformance.CHECKS)
def test_a_directory(check, tmp_path):
    check(LocalTier(tmp_path / "run"))


@by_name(conformance.CHECKS)
def test_the_memory_of_fsspec(check):
    tier = open_object_store(f"memory://run{next(NUMBERS)}")
    check(tier)
    tier.remove_folder("")


def test_a_store_behind_another():
    tier = open_object_store("simplecache::memory://chained/run")
    tier.replace("k", b"1")
    assert open_object_store("memory://chained/run").read("k", max_bytes=1) == b"1"
    tier.remove_folder("")


def test_rclone(rclone_server, at):
    at(rclone_server)
    store = open_object_store("s3://bucket/run")
    for check in conformance.CHECKS:
        if check not in NOT_BY_RCLONE:
            check(store.at(check.__name__))


def test_moto(moto_server, at):
    at(moto_server)
    store = open_object_store("s3://bucket/run")
    for check in conformance.CHECKS:
        check(store.at(check.__name__))


def test_names_that_no_file_can_have_are_passed_over(moto_server, at):
    at(moto_server)
    store = open_object_store("s3://bucket/odd")
    store.replace("f/k", b"1")
    for name in ("", ".", ".."):
        store._client.put(f"bucket/odd/f/{name}", b"")
    assert store.list("f") == ["k"]
    store.remove_folder("f")
    assert store.list("f") == []


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("azurite_server", "az://bucket/run"),
        ("gcs_server", "gs://bucket/run"),
        ("gcs_server", "gs://lenient/run"),
    ],
)
def test_azure_and_google(server, url, request, at):
    at(request.getfixturevalue(server))
    store = open_object_store(url)
    for check in conformance.CHECKS:
        check(store.at(check.__name__))
    assert store.creates_only() is ("lenient" not in url)
    assert store.list("probe") == []


def test_whether_a_store_refuses_a_second_creation_is_found_out(rclone_server, moto_server, at):
    for server, refuses in ((rclone_server, False), (moto_server, True)):
        at(server)
        tier = open_object_store(f"s3://bucket/run{next(NUMBERS)}")
        assert tier.creates_only() is refuses
        assert tier.list("probe") == []


def test_a_tier_that_breaks_the_contract_is_found(tmp_path):
    class Forgetful(LocalTier):
        def list(self, folder):
            return super().list(folder)[:1]

    class Overwriting(LocalTier):
        def create(self, key, data):
            self.replace(key, data)
            return True

    def check_all(kind):
        for number, check in enumerate(conformance.CHECKS):
            check(kind(tmp_path / f"{kind.__name__}{number}"))

    for kind in (Forgetful, Overwriting):
        with pytest.raises(FOUND_FAULTY):
            check_all(kind)

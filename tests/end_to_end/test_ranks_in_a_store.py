"""Two ranks whose run lies in an object store, or flows there from a directory."""

from __future__ import annotations

import re
import shutil
import signal
from contextlib import nullcontext

import pytest

from tests.cloud_servers import ACCOUNT_KEY
from tests.end_to_end import in_a_store, ranks
from tests.faults.s3_proxy import proxy
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import ConfigurationError
from trainckpt.resume.host_cache import plan_passing
from trainckpt.run_directory import run_url
from trainckpt.run_directory.validate import must_be_the_same
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.storage.shared_memory import SharedMemoryDir

preload("tests.end_to_end.in_a_store")
NOWHERE = {"TRAINCKPT_MEMORY": "none"}


def newest(url):
    tier = run_url.open_run_tier(url)
    found = read_catalog(tier, attempt_history.run_id(tier), attempt_history.read_attempts(tier))
    return next(c.manifest for c in found if c.usable)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Losses of the run that was never stopped."""
    results = run_ranks(ranks.train, 2, str(tmp_path_factory.mktemp("straight") / "run"), 2, 5)
    return [losses for losses, _ in results]


def test_two_ranks_go_on_from_a_store_as_if_they_had_never_stopped(rclone_server, at, straight):
    at(rclone_server)
    url, environment = "s3://bucket/two", {**rclone_server.environment(), **NOWHERE}
    first = run_ranks(in_a_store.train, 2, environment, url, 2, 3)
    second = run_ranks(in_a_store.train, 2, environment, url, 2, 5)
    assert [step for _, step in second] == [3, 3]
    for rank in range(2):
        assert {**first[rank][0], **second[rank][0]} == straight[rank]
    assert newest(url).world == 2


@pytest.mark.parametrize(("refusal", "times"), [(401, 99), (503, 2)])
def test_a_store_that_refuses_one_rank_fails_the_save_by_name_or_is_asked_again(
    rclone_server, at, straight, refusal, times
):
    """marin#9213: rank 1 alone is refused, so rank 0 must neither commit nor wait in vain."""
    at(rclone_server)
    url, refused = f"s3://bucket/refuses-one-{refusal}", []
    with proxy(rclone_server.port) as between:

        def refuse(_):
            method, path = between.requests[-1]
            if method == "PUT" and "/s1~" in path and len(refused) < times:
                refused.append(path)
                return refusal
            return None

        between.reset(refuse)
        ports = (rclone_server.port, between.port)
        environments = [{**rclone_server.environment(port), **NOWHERE} for port in ports]
        results = run_ranks(in_a_store.train_and_log, 2, environments, url, 2, 5)
    assert refused
    assert [losses for losses, _ in results] == straight
    failed = f"save s1~1.1 failed, training goes on: rank 1: {url}: cannot write snapshots/s1~1.1/"
    for _, lines in results:
        assert any(line.startswith(failed) for line in lines) == (refusal == 401)
    assert newest(url).cursor.step == 5


def test_two_ranks_are_killed_and_go_on_from_azure_with_a_copy_at_google(
    azurite_server, gcs_server, monkeypatch, straight
):
    environment = {**azurite_server.environment(), **gcs_server.environment()}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url, options = "az://bucket/killed", {"tiers": "gs://bucket/killed"}
    killed = run_ranks(
        in_a_store.train_until_killed, 2, {**environment, **NOWHERE}, url, 2, 5, options
    )
    assert killed == [("exit", -signal.SIGKILL)] * 2
    results = run_ranks(in_a_store.train, 2, {**environment, **NOWHERE}, url, 2, 5, options)
    for rank, (losses, step) in enumerate(results):
        assert step in (1, 2)
        assert losses == {at: loss for at, loss in straight[rank].items() if at in losses}
        assert len(losses) == 2 * (5 - step)
    assert newest(url).name == newest("gs://bucket/killed").name
    record = attempt_history.read_attempts(run_url.open_run_tier(url))[2]
    assert record.outcome["tiers"] == ["local", "gs"]
    for name in ("az", "gs"):
        for key in run_url.open_run_tier(f"{name}://bucket/killed").list("attempts"):
            stored = run_url.open_run_tier(f"{name}://bucket/killed").read(
                f"attempts/{key}", max_bytes=1 << 20
            )
            assert ACCOUNT_KEY.encode() not in stored


def test_two_ranks_flow_to_a_store_and_go_on_from_it_when_their_place_is_lost(
    tmp_path, rclone_server, at, straight
):
    at(rclone_server)
    url, environment = "s3://bucket/two-slower", rclone_server.environment()
    run, options = str(tmp_path / "run"), {"tiers": url}
    first = run_ranks(in_a_store.train, 2, environment, run, 2, 3, options)
    assert attempt_history.read_attempts(run_url.open_run_tier(run))[1].outcome["tiers"] == [
        "local",
        "s3",
    ]
    shutil.rmtree(run)
    SharedMemoryDir.of(run).remove()
    second = run_ranks(in_a_store.train, 2, environment, run, 2, 5, options)
    assert [step for _, step in second] == [3, 3]
    for rank in range(2):
        assert {**first[rank][0], **second[rank][0]} == straight[rank]


@pytest.fixture(scope="module")
def large(rclone_server):
    """A snapshot of two ranks, of 17 MB: what beside it is read is little."""
    url, environment = "s3://bucket/large", {**rclone_server.environment(), **NOWHERE}
    run_ranks(in_a_store.train, 2, environment, url, 2, 2, {"every": "never"}, in_a_store.WIDE)
    return url, environment


def read_bytes(rclone_server, large, world, memory, host=None):
    """What a resume by so many ranks reads of the store, in multiples of the snapshot."""
    url, environment = large
    with proxy(rclone_server.port) as between:
        told = {**environment, **rclone_server.environment(between.port)}
        steps = run_ranks(in_a_store.arrive, world, told, url, world, memory, host)
        assert steps == [2] * world
        return between.sent_bytes / newest(url).num_bytes


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 4])
def test_ranks_of_one_host_read_each_byte_of_the_store_once(
    tmp_path, rclone_server, at, large, world
):
    at(rclone_server)
    assert abs(read_bytes(rclone_server, large, world, str(tmp_path / "memory")) - 1) < 0.02


def test_hosts_read_each_byte_of_the_store_once_and_a_new_host_gets_it_from_the_others(
    tmp_path, rclone_server, at, large
):
    at(rclone_server)
    memory, host = str(tmp_path / "memory{rank}"), "host{rank}"
    assert abs(read_bytes(rclone_server, large, 2, memory, host) - 1) < 0.02
    shutil.rmtree(tmp_path / "memory1")
    assert read_bytes(rclone_server, large, 2, memory, host) < 0.02


def test_ranks_that_were_given_different_places_are_refused_by_all_alike(
    tmp_path, rclone_server, at
):
    at(rclone_server)
    environment, run = rclone_server.environment(), str(tmp_path / "run")
    options = [{"tiers": f"s3://bucket/{name}"} for name in ("one", "other")]
    refusals = run_ranks(in_a_store.refused, 2, environment, [run] * 2, 2, options)
    assert refusals[0] == refusals[1]
    assert refusals[0][:2] == ("ConfigurationError", 78)
    assert "(tiers): rank 0 s3://bucket/one; rank 1 s3://bucket/other" in refusals[0][2]
    assert not (tmp_path / "run/attempts").exists()


HERE, THERE = "a 1", "b 2"


@pytest.mark.parametrize(
    ("views", "one", "other", "why"),
    [
        ([HERE, THERE], [["local", "/a"]], [["local", "/b"]], ""),  # tried out, with tokens
        ([HERE, HERE], [["local", "/a"]], [["local", "/b"]], "(run): rank 0 /a; rank 1 /b"),
        ([HERE, THERE], [["local", "/a"]], [["local", "s3://b/a"]], "(run)"),
        ([HERE, THERE], [["local", "/a"], ["s3", "s3://b/a"]], [["local", "/a"]], "rank 1 none"),
    ],
)
def test_what_places_must_be_the_same(views, one, other, why):
    with pytest.raises(ConfigurationError, match=re.escape(why)) if why else nullcontext():
        must_be_the_same(views, [one, other])


def test_a_file_is_read_by_one_rank_and_goes_to_one_of_each_host_that_lacks_it():
    hosts = ["a", "a", "b", "b", "c"]
    plan = plan_passing(4, hosts, {"a": [1, 2], "b": [2], "c": [2]})
    assert [tuple(each) for each in plan] == [(0, 0, (2, 4)), (1, 0, (2, 4)), (3, 1, (3, 4))]

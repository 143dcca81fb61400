"""A save of a long run costs as much as one of a short run; `benchmarks.growth` has the times."""

from __future__ import annotations

import pytest
from benchmarks.growth import KEEP_LAST, Attempt, Calls, Length, prepare

from trainckpt.run_directory.run_url import open_tier_at
from trainckpt.storage.shared_memory import SharedMemoryDir

SHORT = Length(5, 1)
LONG = Length(60, 30)  # snapshots, attempts
WARM_UP, SAVES = 2, 5


def costs(url, calls, keep_last=KEEP_LAST):
    """Calls of each save, and the keys in the store after it; the first ones left out."""
    attempt = Attempt(url, keep_last)
    found = []
    for _ in range(SAVES):
        calls.take()
        attempt.save().wait("durable")
        attempt.settle()
        keys = attempt.ckpt._context.channel.torch_store.num_keys()
        found.append((calls.take(), keys))
    attempt.leave()
    SharedMemoryDir.of(url).remove()
    return found[WARM_UP:]


def of_directory(tmp_path, length, keep_last=KEEP_LAST):
    folder, calls = tmp_path / str(length), Calls()
    prepare(folder, length)
    with calls.watched("local"):
        return costs(str(folder), calls, keep_last)


@pytest.fixture(autouse=True)
def records_no_digests(monkeypatch):
    """They are recorded beside training, at a time of their own."""
    monkeypatch.setattr("trainckpt.resume.weight_check.weight_digest", lambda _: "")


def test_a_save_to_a_directory_asks_as_much_of_it_in_a_long_run(tmp_path):
    short = of_directory(tmp_path, SHORT)
    assert len(set(short)) == 1
    assert of_directory(tmp_path, LONG) == short


def test_a_save_that_prunes_does_so_too(tmp_path):
    short, long = (of_directory(tmp_path, Length(kept, 1), kept) for kept in (6, 60))
    assert max(long) == max(short)  # the one to be deleted may have been read in its turn
    assert len(list((tmp_path / str(Length(60, 1)) / "snapshots").iterdir())) == 60


def test_a_save_to_a_store_makes_as_many_requests_in_a_long_run(tmp_path, rclone_server, at):
    found = []
    at(rclone_server)
    for length in (SHORT, LONG):
        folder, url = tmp_path / str(length), f"s3://bucket/growth/{length}"
        prepare(folder, length)
        tier, calls = open_tier_at(url), Calls()
        for path in folder.rglob("*"):
            if path.is_file():
                tier.replace(str(path.relative_to(folder)), path.read_bytes())
        with calls.watched("s3"):
            found.append(costs(url, calls))
    assert all(number > 0 for number, _ in found[0])
    assert len(set(found[0])) == 1
    assert found[0] == found[1]

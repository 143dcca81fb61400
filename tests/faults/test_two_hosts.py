"""Two hosts, real ones as far as the kernel goes: one place for both, or a refusal at once."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.end_to_end.training import record, usable
from tests.faults import hosts
from tests.limits import HANG_S

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "-")


@pytest.fixture
def both(server, tmp_path):
    with hosts.two_hosts(server, tmp_path / "own") as pair:
        yield pair


@pytest.fixture
def marks(tmp_path):
    folder = tmp_path / "marks"
    folder.mkdir()
    return folder


def content(host, path):
    """What a host sees in a folder, and below."""
    return host.run(["find", str(path), "-mindepth", "1"]).splitlines()


def refused(both, place, marks):
    """Both ranks end by 78 with the sentence, trained nothing; its text."""
    begun = time.monotonic()
    (code, output), (other, other_output) = hosts.ends(
        hosts.start_job(both, "ddp_script", place, 4, marks, 0)
    )
    assert (code, other) == (78, 78), output + other_output
    assert time.monotonic() - begun < HANG_S
    for text in (output, other_output):
        assert f"the hosts alpha and beta do not see one directory at {place}" in text
        assert 'name a directory that all hosts share: Checkpointer("/path/on/a/shared/' in text
    assert not list(marks.iterdir())
    return output


def test_node_local_directories_are_refused_by_both_hosts_with_the_line_to_add(both, marks):
    place = both[0].own / "runs" / "x"
    text = refused(both, place, marks)
    assert "beta does not see what alpha writes" in text
    assert [content(host, host.own) for host in both] == [[], []]  # and nothing was left there


@pytest.mark.parametrize("has_run", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_run_that_one_host_alone_sees_is_refused_and_not_begun_anew(both, marks, has_run):
    place = both[0].own / "x"
    script = f"from trainckpt import Checkpointer\nwith Checkpointer({str(place)!r}): pass"
    made = both[has_run].python(["-c", script])
    assert "begins at step 0" in made.communicate(HANG_S)[0]
    before = content(both[has_run], place)
    writer, reader = both[has_run].name, both[1 - has_run].name
    text = refused(both, place, marks)
    assert f"{reader} does not see what {writer} writes" in text
    assert content(both[1 - has_run], place.parent) == []
    assert content(both[has_run], place) == before


def test_over_one_directory_they_train_stop_at_a_signal_to_one_and_finish(both, marks, tmp_path):
    place = tmp_path / "shared" / "run"
    job = hosts.start_job(both, "ddp_script", place, 10_000, marks, 0.05)
    until = time.monotonic() + HANG_S
    while not (marks / "1-3").exists():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in job), hosts.ends(job)
        time.sleep(0.02)
    job[1].send_signal(signal.SIGTERM)
    assert [code for code, _ in hosts.ends(job)] == [75, 75]
    stopped = record(place, 1)
    assert stopped["hosts"] == ["alpha", "beta"]
    assert stopped["outcome"]["lost_micro_batches"] == 0
    at = int(stopped["outcome"]["snapshot"].partition("~")[0][1:])
    finished = hosts.ends(hosts.start_job(both, "ddp_script", place, at + 3, marks, 0))
    assert [code for code, _ in finished] == [0, 0], finished
    for rank, (_, output) in enumerate(finished):
        assert f"rank {rank} trained from {at} to {at + 3}" in output
    assert usable(place)[-1].startswith(f"s{at + 3}~2.")
    assert not (place / "probe").exists()


def test_tokens_that_a_dead_attempt_left_do_no_harm(both, marks, tmp_path):
    place = tmp_path / "run"
    (place / "probe" / "0123456789abcdef").mkdir(parents=True)
    (place / "probe" / "fedcba9876543210").touch()
    ended = hosts.ends(hosts.start_job(both, "ddp_script", place, 2, marks, 0))
    assert [code for code, _ in ended] == [0, 0], ended
    assert sorted(p.name for p in (place / "probe").iterdir()) == [
        "0123456789abcdef",
        "fedcba9876543210",
    ]
    assert json.loads((place / "attempts" / "1.json").read_text())["place"]["rename"]

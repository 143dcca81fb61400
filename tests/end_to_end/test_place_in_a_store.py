"""Runs that live in an object store, on a real S3 server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.training import attempt, crashed
from tests.faults.s3_proxy import proxy
from tests.limits import HANG_S
from trainckpt.attempt import heartbeat
from trainckpt.cli.main import main
from trainckpt.errors import ConfigurationError, TierUnavailable
from trainckpt.preemption.stored_notices import StoredNotices
from trainckpt.run_directory import run_url
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import read_catalog
from trainckpt.storage.object_store import open_object_store
from trainckpt.storage.retry import Limits
from trainckpt.storage.shared_memory import SharedMemoryDir

HERE = Path(__file__).parents[2]
EXAMPLE = [
    "examples/char_gpt.py",
    "--size",
    "small",
    "--steps",
    "9",
    "--accumulate",
    "3",
    "--workers",
    "1",
    "--save-every",
    "3",
    "--dropout",
    "0.1",
]
PAUSED = "from tests.cli.pausing import train; import sys; train(0, sys.argv[1])"


def usable(tier):
    found = read_catalog(tier, attempt_history.run_id(tier), attempt_history.read_attempts(tier))
    return [str(c.name) for c in reversed(found) if c.usable]


def lines_of(seen):
    """What each micro-batch saw, the last time it was trained."""
    return {number: lines[-1][1:] for number, lines in seen.items()}


def wait_until(is_so, process):
    while not is_so():
        assert process.poll() is None, "it ended before"
        time.sleep(0.05)


def test_a_run_goes_on_from_a_store_as_if_it_had_never_stopped(tmp_path, rclone_server, at):
    at(rclone_server)
    straight, stopped, url = {}, {}, "s3://bucket/exact"
    parts, _ = attempt(tmp_path / "run", seen=straight)
    crashed(url, 7, seen=stopped)
    resumed, ckpt = attempt(url, seen=stopped)
    assert ckpt.resumed_from.micro_batches in (4, 6)
    assert lines_of(stopped) == lines_of(straight)
    assert resumed.state() == parts.state()
    with pytest.raises(ConfigurationError, match="already"):
        ckpt.resume()


def test_a_run_whose_place_is_lost_goes_on_from_the_store_that_was_its_slower_tier(
    tmp_path, rclone_server, at
):
    at(rclone_server)
    straight, stopped, url = {}, {}, "s3://bucket/slower"
    parts, _ = attempt(tmp_path / "straight", seen=straight)

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches == 7:
            ckpt._attempt.saver.in_flight.wait("durable", 60.0)

    crashed(tmp_path / "run", 8, seen=stopped, inside=inside, tiers=url)
    shutil.rmtree(tmp_path / "run")
    SharedMemoryDir.of(str(tmp_path / "run")).remove()
    resumed, ckpt = attempt(tmp_path / "run", seen=stopped, tiers=url)
    assert ckpt.resumed_from.micro_batches in (4, 6)
    assert lines_of(stopped) == lines_of(straight)
    assert resumed.state() == parts.state()


def test_training_goes_on_while_the_store_does_not_answer(rclone_server, at, caplog):
    refused, healed = [], []

    def inside(ckpt, _):
        number = ckpt.cursor.micro_batches
        if number == 3:
            between.reset(lambda _: 503)
        elif number == 9:
            # A save was due twice since, and the store has taken nothing.
            while not between.requests:
                time.sleep(0.01)
            refused.extend(between.requests)
            healed.append(ckpt._tier.health().num_given_up)
            between.reset()

    with proxy(rclone_server.port) as between:
        at(rclone_server, between.port)
        attempt("s3://bucket/patient", inside=inside)
        tier = run_url.open_run_tier("s3://bucket/patient")
        assert refused
        assert healed == [0], "training waited until a call was given up"
        assert usable(tier)[-1].startswith("s5~")
        assert tier.read("run.json", max_bytes=1000)
        assert attempt_history.read_attempts(tier)[1].outcome["outcome"] == "finished"


def test_a_dead_store_is_69_and_a_wrong_name_is_no_empty_place(rclone_server, at, monkeypatch):
    at(rclone_server)
    with pytest.raises(TierUnavailable, match="bucket"):
        attempt("s3://no-such-bucket/run")
    with pytest.raises(ConfigurationError, match="names no bucket"):
        attempt("s3://")
    with pytest.raises(ConfigurationError, match="nothing://"):
        attempt("nothing://bucket/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    dead = open_object_store("s3://bucket/dead", Limits(give_up_first_s=0.0))
    with pytest.raises(TierUnavailable, match="tried"):
        attempt_history.run_id(dead)


STARVED = """
import resource, sys
from pathlib import Path
import s3fs
from trainckpt.storage import azure_client, gcs_client, s3_client
from trainckpt.errors import TrainckptError
from trainckpt.storage.object_store import open_object_store
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (4 << 20)  # less than the stack of one more thread
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    open_object_store("s3://bucket/run")
except TrainckptError as error:
    sys.exit(f"{error.exit_code}: {error}")
"""


def test_a_host_without_room_for_a_thread_is_69_and_no_wrong_url():
    done = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True)
    assert done.stderr.startswith("69: s3://bucket/run: cannot open this store: can't start new")


def test_a_live_run_is_found_paused_and_looked_at(server, rclone_server, at, capsys):
    at(rclone_server)
    url, tier = "s3://bucket/paused", run_url.open_run_tier("s3://bucket/paused")
    with warm.Told(server, ["-c", PAUSED, url], cwd=HERE) as process:
        wait_until(
            lambda: (
                (found := attempt_history.read_attempts(tier).get(1)) is not None
                and found.state == "running"
                and heartbeat.attempt_is_alive(tier, 1)
            ),
            process,
        )
        assert main(["pause", "--json", url]) == 0
        assert process.wait(HANG_S) == 75
    said = json.loads(capsys.readouterr().out)
    assert (said["outcome"], said["tiers"]) == ("stopped", ["local"])
    assert tier.list("notices") == []
    assert heartbeat.age_s(tier, 1) is None
    for verb in ("list", "verify", "show", "doctor", "prune"):
        assert main([verb, url]) == 0, verb
    assert said["snapshot"] in capsys.readouterr().out
    assert main(["pause", url]) == 66


def test_the_example_is_exact_in_a_store(server, tmp_path, rclone_server, at):
    at(rclone_server)
    traces, url = [tmp_path / "straight", tmp_path / "stopped"], "s3://bucket/example"
    environment = {**os.environ, "TRAINCKPT_MEMORY": "none"}  # each byte comes from the store

    def start(trace, run):
        command = [*EXAMPLE, "--trace", str(trace), "--run", str(run)]
        return warm.Told(server, command, cwd=HERE, env=environment)

    with start(traces[1], url) as process:
        lines = traces[1] / "rank0.jsonl"
        wait_until(lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 10, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 75
    assert len(usable(run_url.open_run_tier(url))) > 0
    with start(traces[1], url) as again, start(tmp_path / "straight", tmp_path / "run") as straight:
        assert (again.wait(HANG_S), straight.wait(HANG_S)) == (0, 0)
    said = [json.loads(line) for line in (traces[1] / "attempts.jsonl").read_text().splitlines()]
    assert [each["attempt"] for each in said] == [1, 2]
    assert said[1]["resumed_from"] is not None
    for name in ("rank0.jsonl", "final0.json"):
        assert (traces[0] / name).read_bytes() == (traces[1] / name).read_bytes(), name


def test_notices_in_a_store_are_found_once_and_what_is_none_stops_nobody(rclone_server, at):
    at(rclone_server)
    tier, said = run_url.open_run_tier("s3://bucket/notices"), []
    notices = StoredNotices(tier, 2, said.append)
    notices.look()
    assert (notices.poll(), said) == ([], [])
    tier.replace("notices/2-a.json", b'{"reason": "test", "seconds_left": 5}')
    tier.replace("notices/1-b.json", b'{"reason": "another attempt"}')
    tier.replace("notices/2-c.json", b"{")
    notices.look()
    notices.look()
    assert [(each.reason, each.seconds_left) for each in notices.poll()] == [("test", 5.0)]
    assert len(said) == 1
    assert "2-c.json" in said[0]
    tier.replace("notices/2-c.json", b'{"reason": "whole by now"}')
    notices.look()
    assert [each.reason for each in notices.poll()] == ["whole by now"]


def test_the_memory_of_a_run_in_a_store_is_the_same_from_every_folder(tmp_path, monkeypatch):
    url = "s3://bucket/memory-of-a-run"
    made = SharedMemoryDir.of(url)
    if made is None:
        pytest.skip("no shared memory here")
    monkeypatch.chdir(tmp_path)
    assert SharedMemoryDir.found(url).root == made.root
    made.remove()

"""Where the time of real runs went: buckets add up to the wall time, also after kills."""

from __future__ import annotations

import collections
import os
import random
import signal
import time

import pytest

from tests import warm
from tests.end_to_end.accounted import EVALUATION_S
from trainckpt.attempt import goodput
from trainckpt.attempt.goodput import (
    EVALUATION,
    GAP,
    LEAVING,
    PREPARATION,
    RESTORE,
    SAVE,
    TRAINING,
    WASTED,
    read_account,
)
from trainckpt.format.attempt_times import TIMES, AttemptTimes, TrainedCount
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE, SharedMemoryDir

KILLED = -signal.SIGKILL
KILLS = 20
CLOSE_S = 0.15  # from the request for a process to its start, and from the last record to its end


def start(server, folder, *words, **environment):
    """One attempt to its end; its exit code."""
    command = ["-m", "tests.end_to_end.accounted", folder / "run", folder / "trace", *words]
    return warm.run(server, command, env={**os.environ, **environment}).returncode


def steps_trained(folder):
    """Each step with the number of times it was trained."""
    lines = (folder / "trace").read_text().splitlines()
    return collections.Counter(int(line.split()[1]) for line in lines)


def repeated_in(folder):
    return sum(times - 1 for times in steps_trained(folder).values())


def ready(server):
    """When a process is forked at once, by the wall clock."""
    warm.run(server, ["-c", "pass"])
    return time.time()


def wall_since(begun, folder):
    """Until the script's last line."""
    return float((folder / "ended").read_text()) - begun


def account_of(folder):
    account = read_account(LocalTier(folder / "run"))
    assert sum(account.buckets.values()) == pytest.approx(account.wall_s, rel=1e-6)
    return account


def test_a_run_killed_twice_is_accounted_to_the_step(server, tmp_path):
    begun = ready(server)
    assert start(server, tmp_path, "--kill", "step", "--after", "53") == KILLED
    time.sleep(0.5)
    assert start(server, tmp_path, "--kill", "batch", "--after", "31") == KILLED
    assert start(server, tmp_path) == 0
    wall_s = wall_since(begun, tmp_path)
    account = account_of(tmp_path)
    assert account.wall_s == pytest.approx(wall_s, abs=CLOSE_S + 0.01 * wall_s)
    first, second, third = account.attempts
    assert (first.reached.steps, second.begun.steps, second.reached.steps) == (26, 20, 35)
    assert account.repeated.steps == repeated_in(tmp_path) == 6 + 5
    assert account.buckets[WASTED] > account.repeated.steps * 0.008
    assert second.buckets[GAP] >= 0.5
    assert 4 * EVALUATION_S <= third.buckets[EVALUATION] < 5 * EVALUATION_S
    assert all(third.buckets[name] > 0 for name in (TRAINING, PREPARATION, RESTORE, SAVE, LEAVING))
    assert account.restore_s.keys() == {"memory"}
    assert sum(account.restore_s.values()) == pytest.approx(account.buckets[RESTORE])
    assert third.buckets[TRAINING] + third.buckets[SAVE] > third.ended - third.began - 3.0


def test_the_supervisor_of_a_killed_attempt_records_what_it_trained(server, tmp_path):
    script = warm.ROOT / "tests" / "end_to_end" / "accounted.py"
    words = ["-m", "trainckpt", "run", "--", script, tmp_path / "run", tmp_path / "trace"]
    begun = time.time()
    killed = warm.run(server, [*words, "--kill", "step", "--after", "53"])
    assert killed.returncode == 128 + signal.SIGKILL, killed.stderr
    record = attempt_history.read_attempts(LocalTier(tmp_path / "run"))[1]
    times = AttemptTimes.parse(record.facts[TIMES])
    assert record.outcome["outcome"] == "killed"
    assert (times.reached, times.leaves_at) == (TrainedCount(52, 26), None)
    assert begun < times.began < record.facts["started"], "torchrun's start is a part of it"
    assert start(server, tmp_path) == 0
    second = attempt_history.read_attempts(LocalTier(tmp_path / "run"))[2]
    assert goodput.BEFORE not in second.facts
    assert account_of(tmp_path).repeated.steps == repeated_in(tmp_path) == 6


def test_an_attempt_killed_on_a_host_without_shared_memory_is_known_by_its_heartbeat(
    server, tmp_path
):
    nowhere = {ROOT_VARIABLE: NONE}
    assert start(server, tmp_path, "--kill", "step", "--after", "45", **nowhere) == KILLED
    before = account_of(tmp_path)
    assert start(server, tmp_path, **nowhere) == 0
    after = account_of(tmp_path)
    assert before.attempts[0].ended == pytest.approx(after.attempts[0].ended, abs=0.01)
    assert after.attempts[0].reached.steps <= 22
    assert after.restore_s.keys() == {"local"}


def test_the_counters_of_a_run_that_ended_are_given_back(server, tmp_path):
    def pages():
        return sorted(path.name for path in memory.root.glob("counters-*"))

    assert start(server, tmp_path, "--kill", "step", "--after", "9") == KILLED
    memory = SharedMemoryDir.found(str(tmp_path / "run"))
    assert pages() == ["counters-1"]
    assert start(server, tmp_path) == 0
    assert pages() == []


def test_what_a_later_attempt_repeats_is_written_by_it(server, tmp_path):
    assert start(server, tmp_path, "--kill", "batch", "--after", "46") == KILLED
    assert start(server, tmp_path) == 0
    tier = LocalTier(tmp_path / "run")
    records = attempt_history.read_attempts(tier)
    repeats, account = records[2].facts[goodput.REPEATS], account_of(tmp_path)
    assert repeats["steps"] == account.repeated.steps == 3
    assert repeats["micro_batches"] == account.repeated.micro_batches == 6
    assert repeats["seconds"] == pytest.approx(account.buckets[WASTED], abs=0.002)


def test_a_kill_in_an_evaluation_leaves_its_time_with_the_evaluation(server, tmp_path):
    assert start(server, tmp_path, "--kill", "evaluation", "--after", "40") == KILLED
    assert start(server, tmp_path) == 0
    account = account_of(tmp_path)
    assert account.repeated.steps == repeated_in(tmp_path)
    assert EVALUATION_S <= account.attempts[0].buckets[EVALUATION] < 2 * EVALUATION_S


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_kills_add_up_to_the_wall_time(server, tmp_path):
    """Wherever they hit: within a batch, after a step, in an evaluation."""
    rng = random.Random(36)
    begun = ready(server)
    for _ in range(KILLS):
        kill, after = rng.choice(["batch", "step", "step", "evaluation"]), rng.randrange(1, 60)
        words = ["--steps", "2000", "--every", f"{rng.randrange(3, 12)} steps"]
        assert start(server, tmp_path, *words, "--kill", kill, "--after", str(after)) == KILLED
        time.sleep(rng.random() / 4)
    done = steps_trained(tmp_path)
    assert start(server, tmp_path, "--steps", str((max(done) // 20 + 2) * 20)) == 0
    wall_s = wall_since(begun, tmp_path)
    account = account_of(tmp_path)
    assert len(account.attempts) == KILLS + 1
    assert account.wall_s == pytest.approx(wall_s, rel=0.01)
    assert account.repeated.steps == repeated_in(tmp_path) > 0

"""Real processes with a deadline: what fits is saved, what does not is not begun, nobody hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.training import catalog, usable
from tests.limits import HANG_S
from trainckpt.snapshot.attempt_history import read_attempts
from trainckpt.storage.local import LocalTier
from trainckpt.storage.shared_memory import NONE, ROOT_VARIABLE

LATE_S = 25.0  # interpreters that leave on a busy machine; a hang would be 60 s and more


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Script:
    """One process of the script; its lines are read as they come."""

    def __init__(self, server, run, rank=None, port=None, world=2, memory=True, **settings):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not memory:
            environment[ROOT_VARIABLE] = NONE
        if rank is not None:
            environment.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        words = ["-m", "tests.end_to_end.deadline_script", run, json.dumps(settings)]
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.process = warm.Process(server, words, to_out, to_err, env=environment)
        for descriptor in (to_out, to_err):
            os.close(descriptor)
        self.lines, self._news = [], threading.Condition()
        self.log = ""
        self._readers = [
            threading.Thread(target=self._read, args=(os.fdopen(out),)),
            threading.Thread(target=self._hear, args=(os.fdopen(err),)),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, out):
        with out:
            for line in out:
                with self._news:
                    self.lines.append(line.strip())
                    self._news.notify_all()

    def _hear(self, err):
        with err:
            for line in err:
                with self._news:
                    self.log += line
                    self._news.notify_all()

    def until(self, text):
        """Wait for a line, on stdout or in the log."""
        with self._news:
            found = self._news.wait_for(lambda: text in self.lines or text in self.log, HANG_S)
        assert found, f"{text!r} never came: {self.lines[-3:]} {self.log[-2000:]}"

    def until_begun(self, micro_batches):
        """Wait until so many have begun, wherever the run goes on."""
        with self._news:
            found = self._news.wait_for(
                lambda: sum(line.startswith("at ") for line in self.lines) >= micro_batches, HANG_S
            )
        assert found, f"{self.lines[-3:]} {self.log[-2000:]}"

    def signal(self):
        self.process.send_signal(signal.SIGTERM)
        return time.monotonic()

    def end(self):
        """Its exit code, once its output is read."""
        code = self.process.wait(HANG_S)
        for reader in self._readers:
            reader.join()
        return code


@pytest.fixture
def start(server, tmp_path):
    """Start scripts on one run; none outlives the test."""
    started = []

    def run(**settings):
        started.append(Script(server, tmp_path / "run", **settings))
        return started[-1]

    yield run
    for script in started:
        script.process.kill()
        script.end()


def outcome(tmp_path):
    """Of the newest attempt."""
    records = read_attempts(LocalTier(tmp_path / "run"))
    return records[max(records)].outcome


def uncommitted(tmp_path):
    folders = (tmp_path / "run" / "snapshots").iterdir()
    return [folder for folder in folders if not (folder / "manifest.json").exists()]


SAVED = {"every": "1 steps", "stop_at": "micro-batch"}


def test_a_save_that_would_miss_the_deadline_is_not_begun_and_the_older_one_stands(start, tmp_path):
    """The last saves took 2 s each, and 1.5 s are left; nor is there memory to keep it in."""
    script = start(
        slow_from=1,
        slow_s=2.0,
        micro_s=0.05,
        accumulate=60,
        memory=False,
        options={**SAVED, "grace": "1.5 s"},
    )
    script.until("saved s1~1.1")
    begun = script.signal()
    assert script.end() == 75
    assert time.monotonic() - begun < 1.5 + LATE_S
    found = outcome(tmp_path)
    assert (found["outcome"], found["snapshot"]) == ("stopped", "s1~1.1")
    assert found["lost_micro_batches"] > 0
    assert found["skipped"]["predicted_s"] > found["skipped"]["seconds_left"]
    assert "it would take about" in found["skipped"]["why"]
    assert "no snapshot at epoch 0" in script.log
    assert usable(tmp_path / "run") == ["s1~1.1"]


def test_a_save_that_turns_out_too_slow_is_given_up_at_the_deadline(start, tmp_path):
    """It was fast before. What it has written is no snapshot, and the next attempt removes it."""
    script = start(
        slow_from=2, slow_s=60.0, accumulate=10**6, options={"every": "never", "grace": "3 s"}
    )
    script.until("at 3")
    script.process.send_signal(signal.SIGTERM)
    assert script.end() == 75
    (first,) = usable(tmp_path / "run")
    second = start(
        slow_from=1, slow_s=60.0, accumulate=10**6, options={"every": "never", "grace": "3 s"}
    )
    second.until_begun(3)
    begun = second.signal()
    assert second.end() == 75
    assert time.monotonic() - begun < 3 + LATE_S
    found = outcome(tmp_path)
    assert (found["outcome"], found["snapshot"]) == ("stopped", first)
    assert found["skipped"]["why"] == "it was not committed before the deadline"
    assert usable(tmp_path / "run") == [first]
    third = start(accumulate=10**6, options={"every": "never"})
    third.until_begun(3)
    third.process.send_signal(signal.SIGTERM)
    assert third.end() == 75
    assert uncommitted(tmp_path) == []


def test_signals_until_the_very_end_of_a_stopped_process_do_not_change_its_code(start):
    """As when a launcher ends the ranks that are left once the first one has gone."""
    script = start(options={"every": "never"})
    script.until("at 3")
    while script.process.poll() is None:
        script.process.send_signal(signal.SIGTERM)
        time.sleep(0.001)
    assert script.end() == 75
    assert script.log.count("stopped by SIGTERM at") == 1


def test_with_nothing_to_fall_back_on_and_no_time_the_code_says_that_nothing_is_there(start):
    """65, not 75: starting again would begin at step 0."""
    script = start(slow_from=1, slow_s=60.0, options={"every": "never", "grace": "2 s"})
    script.until("at 3")
    script.signal()
    assert script.end() == 65


def test_a_micro_batch_longer_than_the_deadline_ends_with_71_and_the_older_snapshot(
    start, tmp_path
):
    """Main hangs; the watcher ends the process, and the record says so."""
    script = start(hang_at=9, options={**SAVED, "grace": "2 s"})
    script.until("saved s2~1.2")
    script.until("hanging")
    begun = script.signal()
    assert script.end() == 71
    assert time.monotonic() - begun < 2 + LATE_S
    found = outcome(tmp_path)
    assert (found["outcome"], found["snapshot"]) == ("killed", "s2~1.2")
    assert (found["exit_code"], found["lost_micro_batches"]) == (71, 1)
    assert "deadline" in found["reason"]


def test_a_deadline_that_comes_while_the_record_is_written_waits_for_that(start, tmp_path):
    """The snapshot is committed and the stop is good: 75, and the record says so."""
    script = start(slow_record_s=5.2, options={"every": "never", "grace": "5 s"})
    script.until("at 3")
    script.signal()
    assert script.end() == 75
    found = outcome(tmp_path)
    assert (found["outcome"], found["lost_micro_batches"]) == ("stopped", 0)


def test_a_checkpointer_that_never_begins_does_not_swallow_a_signal(start, tmp_path):
    """Nothing was trained: after half of the grace it is left, to be started again."""
    script = start(idle_s=600.0, options={"grace": "1 s"})
    script.until("made")
    script.signal()
    assert script.end() == 75
    assert "before the run has begun" in script.log
    assert not (tmp_path / "run").exists()


def test_ranks_that_wait_for_one_that_hangs_leave_at_the_deadline_too(start, tmp_path):
    """Rank 1 is inside its micro-batch, rank 0 has reached the boundary and waits for it."""
    port = free_port()
    settings = {"hang_at": 9, "hang_on": 1, "options": {**SAVED, "grace": "3 s"}}
    ranks = [start(rank=rank, port=port, **settings) for rank in range(2)]
    ranks[0].until("saved s2~1.2")
    ranks[1].until("hanging")
    begun = ranks[0].signal()
    codes = [script.end() for script in ranks]
    assert time.monotonic() - begun < 3 + LATE_S
    assert codes in ([71, 71], [75, 71])  # rank 0 may record the stop first
    assert outcome(tmp_path)["snapshot"] == "s2~1.2"


def test_a_stop_at_the_window_s_end_waits_for_it(start, tmp_path):
    """No gradients are kept: the snapshot lies between two windows."""
    script = start(accumulate=5, micro_s=0.02, options={"every": "never", "stop_at": "window"})
    script.until("at 12")
    script.signal()
    assert script.end() == 75
    (candidate,) = catalog(tmp_path / "run")
    assert (candidate.name.micro, candidate.manifest.cursor.micro) == (0, 0)
    assert candidate.name.step >= 2


def test_a_stop_that_waits_for_its_window_settles_for_a_micro_batch_when_time_runs_out(
    start, tmp_path
):
    """The window is 20 s long, 8 s are left."""
    script = start(
        accumulate=200,
        micro_s=0.1,
        options={"every": "never", "stop_at": "window", "grace": "8 s", "accumulate": 200},
    )
    script.until("at 9")
    script.signal()
    assert script.end() == 75
    (candidate,) = catalog(tmp_path / "run")
    assert candidate.name.step == 0
    assert candidate.name.micro > 9
    assert outcome(tmp_path)["lost_micro_batches"] == 0


def test_a_notice_while_a_snapshot_is_read_stops_at_the_first_boundary(start, tmp_path):
    """Nothing was trained, so what was read stands and nothing is lost."""
    first = start(until=40, options={"every": "2 steps"})
    first.until("saved s2~1.1")
    first.signal()
    first.end()
    before = usable(tmp_path / "run")
    second = start(until=40, slow_read_s=0.5, memory=False, options={"every": "2 steps"})
    second.until("reading")
    second.signal()
    assert second.end() == 75
    assert not any(line.startswith("at ") for line in second.lines)
    assert usable(tmp_path / "run") == before
    found = outcome(tmp_path)
    assert (found["outcome"], found["lost_micro_batches"]) == ("stopped", 0)


def test_a_notice_to_one_rank_is_kept_until_the_other_is_there_too(start, tmp_path):
    """It comes when rank 1 has not made its Checkpointer; then both stop at one place."""
    port = free_port()
    now = tmp_path / "now"
    ranks = [start(rank=rank, port=port, hang_on=1, late=str(now)) for rank in range(2)]
    ranks[0].until("made")
    assert "made" not in ranks[1].lines
    ranks[0].signal()
    now.touch()
    assert [script.end() for script in ranks] == [75, 75]
    walked = [[line for line in script.lines if line.startswith("at ")] for script in ranks]
    assert walked[0] == walked[1]
    assert outcome(tmp_path)["outcome"] == "stopped"


@pytest.mark.parametrize("sooner", [False, True])
def test_the_smaller_of_two_deadlines_counts(start, tmp_path, sooner):
    """SIGTERM to one rank grants 60 s; a notice file then grants 2 s, or comes first."""
    script = start(hang_at=5, options={"every": "1 steps", "grace": "60 s"})
    script.until("hanging")
    notice = Path(tmp_path / "run" / "notices" / "1-test.json")
    notice.parent.mkdir(exist_ok=True)
    if not sooner:
        script.signal()
        script.until("SIGTERM: stopping")
    begun = time.monotonic()
    notice.write_text(json.dumps({"reason": "test", "seconds_left": 2}))
    if sooner:
        script.until("test: stopping")
        script.signal()
    assert script.end() == 71
    assert time.monotonic() - begun < 2 + 1 + LATE_S

"""`trainckpt status` of real runs, alive and ended, and its page in narrow and wide terminals."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from tests.attempt.test_live_status import WHOLE
from tests.cli.test_pause import living, wait_for
from trainckpt import Checkpointer
from trainckpt.attempt import heartbeat
from trainckpt.attempt.goodput import BUCKETS, AttemptAccount, RunAccount
from trainckpt.attempt.live_status import LiveStatus, SavingNow, UploadNow
from trainckpt.attempt.options import read_options
from trainckpt.cli import status as verb
from trainckpt.cli.main import main
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.attempt_times import TrainedCount
from trainckpt.inspect.run_status import RunStatus, TierNow, read_status
from trainckpt.save.schedule import SaveSchedule
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("TRAINCKPT_PROVE", "TRAINCKPT_SUPERVISOR", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def document(run, capsys):
    capsys.readouterr()
    assert main(["status", "--json", str(run)]) == 0
    return json.loads(capsys.readouterr().out)


# ---- real runs


def test_a_live_run_tells_its_step_pace_and_next_save(tmp_path, capsys):
    run = tmp_path / "run"
    with living(run, every="20 steps"):
        wait_for(lambda: read_status(str(run)).tiers[-1].snapshot)
        wait_for(lambda: read_status(str(run)).steps_per_s)
        first = document(run, capsys)
        wait_for(lambda: read_status(str(run)).reached.steps > first["reached"]["steps"])
        assert main(["status", str(run)]) == 0
    shown = capsys.readouterr().out
    assert (first["state"], first["attempt"], first["world"]) == ("alive", 1, 1)
    assert first["beat_age_s"] < heartbeat.ALIVE_S
    assert first["live"]["phase"] == "training"
    assert first["live"]["next_saves"][0]["at_step"] % 20 == 0
    assert first["live"]["window"] == 3
    local = first["tiers"][-1]
    assert local["tier"] == "local"
    assert local["lag_steps"] <= 40
    assert 0 <= local["age_s"] < 60
    account = first["account"]
    assert sum(account["buckets"].values()) == pytest.approx(account["wall_s"], abs=0.01)
    assert "alive for" in shown
    assert "at step" in shown
    assert ESCAPE not in shown


def test_a_run_that_was_killed_and_one_that_stopped_tell_since_when(tmp_path, capsys):
    run = tmp_path / "run"
    with living(run, every="5 steps") as process:
        wait_for(lambda: read_status(str(run)).reached.steps > 10)
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
    beat = heartbeat.path_of(LocalTier(run), 1)
    os.utime(beat, (time.time() - 60, time.time() - 60))
    killed = document(run, capsys)
    assert killed["state"] == "dead"
    assert killed["reached"]["steps"] > 10
    assert killed["live"] is None
    assert abs(killed["when"] - killed["since"]) < 60
    assert main(["status", str(run)]) == 0
    assert "not alive: it ended" in capsys.readouterr().out
    with living(run, attempt=2) as process:
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
    stopped = document(run, capsys)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGTERM")
    assert stopped["exit_code"] == 75
    assert stopped["account"]["repeated_steps"] <= 6


def test_a_stop_under_way_tells_its_reason_and_deadline(tmp_path, capsys):
    run = tmp_path / "run"
    with living(run, stuck_at=5, grace="100 s") as process:
        wait_for(lambda: read_status(str(run)).reached.micro_batches >= 5)
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: read_status(str(run)).live.stop is not None)
        told = document(run, capsys)
        assert told["live"]["stop"]["reason"] == "SIGTERM"
        assert 60 < told["live"]["stop"]["seconds_left"] <= 100
        assert main(["status", str(run)]) == 0
        assert "stopping by SIGTERM" in capsys.readouterr().out


def test_a_save_that_fails_is_told_with_its_reason(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(tmp_path / "run", model=model, optimizer=optimizer, every="never") as ckpt:
        ckpt.boundary()
        (tmp_path / "run" / "snapshots").write_text("no folder")
        handle = ckpt.save()
        ckpt.boundary()
        wait_for(lambda: handle.ended)
        (tmp_path / "run" / "snapshots").unlink()
        live = ckpt._listener.live_status()
    assert (live.skipped, live.failed) == (0, 1)
    assert live.not_saved[0].how == "failed"
    assert "snapshots" in live.not_saved[0].reason


def test_copies_to_slower_tiers_are_told(tmp_path, capsys):
    run, far = tmp_path / "run", tmp_path / "far"
    with living(run, every="5 steps", tiers=str(far)):
        wait_for(lambda: any(t.tier != "local" and t.url and t.snapshot for t in tiers(run)))
        wait_for(lambda: read_status(str(run)).live.uploads[0].newest)
    told = document(run, capsys)
    assert {tier["url"] for tier in told["tiers"]} >= {str(run), str(far)}


def tiers(run):
    return read_status(str(run)).tiers


def test_where_the_supervisor_beats_the_page_says_why_nothing_is_known(tmp_path, capsys):
    """In place of the ranks of a command without a Checkpointer, and while processes are dumped."""
    tier = LocalTier(tmp_path)
    attempt_history.found_run(tier)
    attempt = attempt_history.claim(tier, lambda number: AttemptRecord(number, None)).attempt
    beating = heartbeat.Heartbeat(tier, attempt)
    beating.start()
    try:
        wait_for(lambda: read_status(str(tmp_path)).is_alive)
        assert main(["status", str(tmp_path)]) == 0
    finally:
        beating.stop()
    shown = " ".join(capsys.readouterr().out.split())
    assert "now unknown: it has no Checkpointer, is being dumped, or is of an older" in shown


def test_there_is_no_status_without_a_run(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 66
    assert "there is no run" in capsys.readouterr().err
    assert main(["status", "--watch", "--json", str(tmp_path)]) == 78


# ---- the schedule


def test_a_schedule_tells_its_next_saves():
    every = read_options({"every": "10 min", "memory_every": "5 steps"})
    schedule = SaveSchedule(every.every, 7, 100.0, memory_every=every.memory_every)
    by_time, to_memory = schedule.next_saves(160.0)
    assert (by_time.in_s, by_time.at_step, by_time.in_memory) == (540.0, None, False)
    assert (to_memory.at_step, to_memory.in_memory) == (10, True)


# ---- the page


T = 1_795_000_000.0
FULL = RunStatus(
    run="s3://bucket/runs/a-run-with-a-rather-long-name",
    when=T,
    state="alive",
    attempt=3,
    since=T - 8000,
    beat_age_s=2.0,
    hosts=tuple(f"node{number}" for number in range(16)),
    world=128,
    begun=TrainedCount(32000, 8000),
    reached=TrainedCount(49920, 12480),
    steps_per_s=0.4,
    live=replace(
        WHOLE,
        written=T - 2,
        saving=SavingNow(snapshot="s12480~3.31", num_bytes=4_000_000_000, seconds=3.0),
        uploads=(
            UploadNow(
                tier="s3",
                snapshot="s12400~3.30",
                num_bytes=4_000_000_000,
                copied_bytes=1_640_000_000,
                seconds_left=12.0,
                waiting=2,
                skipped=4,
                trouble="[slow] it did not answer within 60 s",
            ),
        ),
    ),
    written_bytes=1_200_000_000,
    tiers=(
        TierNow(tier="memory", snapshot="s12400~3.30", age_s=25.0, lag_steps=80),
        TierNow(tier="local", snapshot="s12400~3.30", age_s=25.0, lag_steps=80),
        TierNow(tier="s3", snapshot="s12000~3.26", age_s=140.0, lag_steps=480),
        TierNow(tier="cold", why_not="no route to host"),
    ),
    account=RunAccount(
        (
            AttemptAccount(
                1, T - 90000, T - 40000, dict.fromkeys(BUCKETS, 0.0) | {"training": 5e4}
            ),
            AttemptAccount(2, T - 40000, T, {name: 40000 / len(BUCKETS) for name in BUCKETS}),
        )
    ),
)


def drawn(status, width, **how):
    console = Console(file=io.StringIO(), width=width, highlight=False, **how)
    console.print(verb.render(status))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_the_page_fits_into_the_terminal(width):
    text = drawn(FULL, width)
    assert max(map(len, text.splitlines())) <= width
    for told in ("alive for 2 h 13 min", "12,480", "2.5 s a step", "1.2 GB of 4.0 GB", "node3 and"):
        assert told in text
    for told in ("1 skipped and 2 failed", "disk full", "no route", "12 s left", "480 steps"):
        assert told in text
    assert "[slow]" in text, "what others wrote is no markup"
    assert ESCAPE not in text


def test_a_terminal_gets_colors_and_a_bar():
    text = drawn(FULL, 100, force_terminal=True, color_system="standard")
    assert ESCAPE in text
    assert "█" in text
    assert "█" not in drawn(FULL, 100), "without colors it would say nothing"


@pytest.mark.parametrize("state", ["dead", "finished", "failed", "none", "alive"])
def test_a_run_of_which_little_is_known_has_a_page(state):
    bare = RunStatus(run="runs/x", when=T, state=state, attempt=0 if state == "none" else 1)
    assert "runs/x" in drawn(bare, 80)
    assert drawn(replace(bare, live=LiveStatus(written=T)), 80)


def test_a_watch_ends_with_the_keyboard(monkeypatch, capsys, tmp_path):
    run = tmp_path / "run"
    with Checkpointer(run, model=nn.Linear(2, 2), every="never") as ckpt:
        ckpt.boundary()
    looks = []

    def look_twice(seconds):
        looks.append(seconds)
        if len(looks) > 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(verb.time, "sleep", look_twice)
    assert main(["status", "--watch", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("finished") == 3
    assert ESCAPE not in shown

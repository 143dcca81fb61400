"""Values easily wrong: against `trainckpt status`, beside waits, after kills and outages."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.cli.test_pause import living, plain, wait_for  # noqa: F401 - `plain` is a fixture
from tests.metrics.scraping import Values, free_port, prom_file, scrape, step, tracked
from trainckpt import Checkpointer
from trainckpt.attempt.goodput import BUCKETS, GAP, PREPARATION, RESTORE, TRAINING, WASTED
from trainckpt.inspect.run_status import read_status

SETTLED = (PREPARATION, RESTORE, GAP, WASTED)  # once training has begun


def values(port):
    return Values(scrape(port))


def test_metrics_and_status_tell_the_same(tmp_path):
    run, far, port = tmp_path / "run", tmp_path / "far", free_port()
    how = {"every": "never", "tiers": str(far), "metrics": f"http:{port}"}
    for _ in (1, 2):
        parts = tracked()
        with Checkpointer(run, **how, **parts) as ckpt:
            for _ in range(3):
                step(ckpt, parts)
            handle = ckpt.save()
            for _ in range(2):
                step(ckpt, parts)
            handle.wait("durable")
            found, status = values(port), read_status(str(run))
    tiers = {tier.tier: tier for tier in status.tiers}
    assert status.attempt == int(found.run[1]) == 2
    assert found["steps_total"] == status.reached.steps
    assert found["replica_lag_steps", "far"] == tiers["far"].lag_steps
    assert found["last_durable_step", "far"] == found["steps_total"] - tiers["far"].lag_steps
    assert found["last_durable_age_seconds", "far"] == pytest.approx(tiers["far"].age_s, abs=5)
    buckets = status.account.buckets
    for name in SETTLED:
        assert found["badput_seconds_total", name] == pytest.approx(buckets[name], abs=0.01)
    assert {name for name in BUCKETS if found.get("badput_seconds_total", name) is None} == {
        TRAINING
    }


def test_no_counter_falls_as_a_wait_for_a_save_turns_out_to_be_one(tmp_path):
    """Prometheus takes a counter that falls for one that began anew, and adds all of it again."""
    port, parts, slow = free_port(), tracked(), Slow()
    with Checkpointer(
        tmp_path / "run", every="never", metrics=f"http:{port}", slow=slow, **parts
    ) as ckpt:
        step(ckpt, parts)
        step(ckpt, parts)
        wait_for(lambda: scrape(port))
        slow.waits = True
        during = []
        thread = threading.Thread(target=lambda: during.append(slow.scraped_late(port)))
        thread.start()
        ckpt.save()
        step(ckpt, parts)
        thread.join()
        after = values(port)
    assert after["badput_seconds_total", "unproductive_checkpoint_save_time"] > Slow.WAIT_S / 2
    assert after["goodput_seconds_total"] >= during[0]["goodput_seconds_total"]


class Slow:
    """An object whose state takes a while to be captured."""

    WAIT_S = 1.0

    def __init__(self):
        self.waits, self.captures = False, threading.Event()

    def state_dict(self):
        if self.waits:
            self.captures.set()
            time.sleep(self.WAIT_S)
        return {}

    def load_state_dict(self, state):
        pass

    def scraped_late(self, port):
        """The values shortly before the capture ends."""
        assert self.captures.wait(60)
        time.sleep(0.7 * self.WAIT_S)
        return values(port)


# ---- what a tier has, as far as it is known


@pytest.mark.usefixtures("without_memory")
def test_a_tier_that_is_gone_as_the_run_resumes_still_has_what_was_copied(tmp_path):
    run, far, port = tmp_path / "run", tmp_path / "far", free_port()
    how = {"every": "never", "tiers": str(far), "metrics": f"http:{port}"}
    parts = tracked()
    with Checkpointer(run, **how, **parts) as ckpt:
        for _ in range(4):
            step(ckpt, parts)
    far.rename(tmp_path / "aside")
    far.write_text("no folder")
    parts = tracked()
    with Checkpointer(run, **how, **parts) as ckpt:
        step(ckpt, parts)
        wait_for(lambda: ckpt._attempt.saver.uploads.uploaders[0].upload_now(0.0).trouble)
        found = values(port)
        far.unlink()
        (tmp_path / "aside").rename(far)
    assert (found["last_durable_step", "far"], found["replica_lag_steps", "far"]) == (4, 1)


@pytest.mark.usefixtures("without_memory")
def test_a_tier_that_lost_its_copies_has_none(tmp_path):
    run, far, port = tmp_path / "run", tmp_path / "far", free_port()
    parts = tracked()
    with Checkpointer(run, every="never", tiers=str(far), **parts) as ckpt:
        for _ in range(4):
            step(ckpt, parts)
    far.rename(tmp_path / "aside")
    parts = tracked()
    with Checkpointer(run, every="never", tiers=str(far), metrics=f"http:{port}", **parts) as ckpt:
        uploader = ckpt._attempt.saver.uploads.uploaders[0]
        wait_for(lambda: uploader.written_bytes)
        assert values(port)["bytes_total", "far"] > 0
        assert (far / "snapshots").is_dir()


@pytest.fixture
def without_memory(monkeypatch):
    monkeypatch.setenv("TRAINCKPT_MEMORY", "none")


# ---- ends


def test_a_stop_leaves_the_values_of_its_end(tmp_path):
    run = tmp_path / "run"
    with living(run, metrics=f"textfile:{tmp_path}") as process:
        wait_for(lambda: prom_file(tmp_path, run).exists())
        os.kill(process.pid, signal.SIGTERM)
        process.join(60)
        assert process.exitcode == 75
    last, status = Values(prom_file(tmp_path, run).read_text()), read_status(str(run))
    assert (last["running"], last["consecutive_failed_saves"]) == (0, 0)
    assert last["steps_total"] == last["last_durable_step", "local"] == status.reached.steps
    assert last["badput_seconds_total", "leaving"] > 0


def test_a_killed_attempts_file_says_when_it_was_written_until_the_next_one_replaces_it(tmp_path):
    run, where = tmp_path / "run", f"textfile:{tmp_path}"
    with living(run, metrics=where, every="2 steps"):
        wait_for(lambda: prom_file(tmp_path, run).exists())
        wait_for(lambda: list(run.glob("snapshots/*/manifest.json")))
    killed_at, left = time.time(), Values(prom_file(tmp_path, run).read_text())
    assert left.run == (str(run), "1")
    assert left["running"] == 1
    assert left["published_timestamp_seconds"] <= killed_at
    with living(run, attempt=2, metrics=where):
        wait_for(lambda: Values(prom_file(tmp_path, run).read_text()).run[1] == "2")
        again = Values(prom_file(tmp_path, run).read_text())
    assert again["published_timestamp_seconds"] > killed_at
    assert again["resumes_total", "unknown"] == 1

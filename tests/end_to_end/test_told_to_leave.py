"""A notice after training has ended: what is left to copy is given up in time."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest

from tests.end_to_end import ranks
from tests.end_to_end.training import attempt, record, usable
from tests.ranks.processes import preload, run_ranks
from trainckpt.snapshot import tier_copy
from trainckpt.storage.local import LocalTier

preload("tests.end_to_end.ranks")


@pytest.fixture
def copying(monkeypatch):
    """Every copy to a slower tier hangs until the test is over; set once one has begun."""
    begun, over, copy = threading.Event(), threading.Event(), tier_copy.copy_missing

    def hang(*arguments, **keywords):
        begun.set()
        assert over.wait(120)
        copy(*arguments, **keywords)

    monkeypatch.setattr(tier_copy, "copy_missing", hang)
    yield begun
    over.set()


def test_a_signal_while_the_last_copy_hangs_lets_the_script_go_on_within_its_grace(
    tmp_path, copying, monkeypatch, caplog
):
    seen = []

    def tell():
        assert copying.wait(60)
        while not seen[0]._listener._logged_signals.is_late:  # the copy may be quicker than main
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.INFO, logger="trainckpt")
    threading.Thread(target=tell, daemon=True).start()
    attempt(
        tmp_path / "run",
        tiers=[tmp_path / "slow"],
        every="never",
        grace="2 s",
        inside=lambda ckpt, _: seen.append(ckpt),
    )
    (name,) = usable(tmp_path / "run")
    outcome = record(tmp_path / "run", 1)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"]) == ("finished", 0)
    assert (outcome["snapshot"], outcome["tiers"]) == (name, ["local"])
    assert "SIGTERM: the run is finished" in caplog.text
    assert "stopping at the next boundary" not in caplog.text
    assert "`trainckpt flush` copies missing snapshots to slow" in caplog.text
    monkeypatch.undo()
    attempt(tmp_path / "run", tiers=[tmp_path / "slow"], every="never")
    assert usable(tmp_path / "slow") == [name]


def test_a_signal_while_the_last_save_is_written_holds_for_the_last_copy_too(
    tmp_path, copying, monkeypatch
):
    writing = LocalTier.write_parts

    def told(self, key, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        writing(self, key, *arguments)

    monkeypatch.setattr(LocalTier, "write_parts", told)
    attempt(tmp_path / "run", tiers=[tmp_path / "slow"], every="never", grace="2 s")
    assert record(tmp_path / "run", 1)["outcome"]["outcome"] == "finished"


def test_a_signal_to_any_rank_ends_the_last_copy_of_all(tmp_path):
    place, slow = tmp_path / "run", tmp_path / "slow"
    assert run_ranks(ranks.told_to_leave_late, 2, str(place), str(slow)) == ["left", "left"]
    assert record(place, 1)["outcome"]["tiers"] == ["local"]

"""Whether and where a stop saves: tables of decisions, and a run with a short notice."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.end_to_end.training import Crash, attempt, notice, record, usable
from trainckpt.encryption import keys
from trainckpt.save import arenas
from trainckpt.save.estimates import weigh
from trainckpt.stop.final_save import (
    TierOption,
    choose_tier,
    takes_machine,
    tier_options,
    why_not_save,
)
from trainckpt.storage import arena, shared_memory
from trainckpt.storage.shared_memory import SharedMemoryDir

DISK = TierOption("local", outlives_machine=False, predicted_s=8.0)
SHARED = TierOption("local", outlives_machine=True, predicted_s=8.0)
NEW = TierOption("local", outlives_machine=True, predicted_s=None)
MEMORY = TierOption("memory", outlives_machine=False, predicted_s=0.5)
PARTNER = TierOption("partner", outlives_machine=True, predicted_s=2.0)
STORE = TierOption("s3", outlives_machine=True, predicted_s=20.0)
UNKNOWN = TierOption("s3", outlives_machine=True, predicted_s=None)
ALL = [SHARED, MEMORY, PARTNER, STORE]
GONE = "the machine is taken away"


@pytest.mark.parametrize(
    ("machine_goes", "left_s", "ways", "tier", "why"),
    [
        # the processes go: the place if there is time for it, else memory
        ("", None, ALL, "local", "there is no deadline"),
        ("", 30.0, ALL, "local", "it fits into the 30.0 s left"),
        ("", 10.0, ALL, "local", "it fits into the 10.0 s left"),
        ("", 9.9, ALL, "memory", "local would take about 8.0 s, and 9.9 s are left"),
        ("", 9.9, [DISK, MEMORY], "memory", "local would take about 8.0 s, and 9.9 s are left"),
        ("", 9.9, [SHARED, PARTNER], "partner", "local would take about 8.0 s, and 9.9 s are left"),
        ("", 0.5, ALL, "local", "nothing else outlives that and fits into the 0.5 s left"),
        ("", 9.9, [SHARED], "local", "nothing else outlives that and fits into the 9.9 s left"),
        ("", 9.9, [NEW, MEMORY], "local", "no save was measured yet"),
        # the machine goes: what lies on it alone does not count
        (GONE, 30.0, ALL, "local", "it fits into the 30.0 s left"),
        (GONE, 9.9, ALL, "partner", "local would take about 8.0 s, and 9.9 s are left"),
        (
            GONE,
            9.9,
            [SHARED, MEMORY],
            "local",
            (
                "the machine is taken away, and nothing else outlives that and fits into the "
                "9.9 s left"
            ),
        ),
        (
            GONE,
            30.0,
            [DISK, MEMORY, STORE],
            "s3",
            "the machine is taken away: local may be lost with it",
        ),
        (
            GONE,
            30.0,
            [DISK, PARTNER, STORE],
            "partner",
            "the machine is taken away: local may be lost with it",
        ),
        (
            GONE,
            None,
            [DISK, MEMORY, STORE],
            "s3",
            "the machine is taken away: local may be lost with it",
        ),
        (
            GONE,
            20.0,
            [DISK, MEMORY, STORE],
            "local",
            (
                "the machine is taken away, and nothing else outlives that and fits into the "
                "20.0 s left"
            ),
        ),
        (
            GONE,
            None,
            [DISK, UNKNOWN],
            "local",
            "the machine is taken away, and nothing else outlives that",
        ),
    ],
)
def test_the_run_s_place_if_it_fits_else_the_fastest_that_outlives_the_cause(
    machine_goes, left_s, ways, tier, why
):
    choice, reason = choose_tier(machine_goes, left_s, ways)
    assert (choice.tier, reason) == (tier, why)
    assert choice in ways


def facts(left_s, save_s, fallback):
    return {"left_s": left_s, "save_s": save_s, "fallback": fallback}


@pytest.mark.parametrize(
    ("offers", "starts"),
    [
        ([facts(None, 100.0, True)], True),  # nobody said how long there is
        ([facts(5.0, 4.0, True)], True),
        ([facts(5.0, 6.0, True)], False),
        ([facts(5.0, 4.0, True), facts(None, 6.0, True)], False),  # the slowest, the earliest
        ([facts(5.0, 4.0, True), facts(3.0, 1.0, True)], False),
        ([facts(5.0, 6.0, False)], True),  # nothing to lose
        ([facts(-1.0, 1.0, True)], False),
    ],
)
def test_a_save_is_begun_if_the_slowest_rank_makes_it_by_the_earliest_deadline(offers, starts):
    assert (why_not_save(offers) == "") is starts
    assert (why_not_save(offers[::-1]) == "") is starts


def test_what_is_left_unsaved_is_said_in_seconds():
    assert why_not_save([facts(-1.0, 6.04, True)]) == (
        "it would take about 6.0 s, and 0.0 s were left"
    )


@pytest.mark.parametrize(
    ("reason", "environment", "expected"),
    [
        ("SIGTERM", {}, ""),
        ("trainckpt pause", {}, ""),
        ("AWS spot interruption", {}, "the machine is taken away"),
        ("GPU 0 is not well", {}, "the machine is taken away"),
        ("SIGTERM", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "the pod takes its memory with it"),
        ("SIGUSR1", {"SLURM_JOB_ID": "7"}, "the job may continue on other nodes"),
    ],
)
def test_what_goes_with_a_stop_follows_from_its_reason_and_from_where_it_runs(
    reason, environment, expected
):
    assert takes_machine(reason, environment) == expected


def told(
    save_s=1.0, memory_s=None, partner_s=None, place_goes=False, slower=(), goes="", leaving=""
):
    return {
        "save_s": save_s,
        "memory_s": memory_s,
        "partner_s": partner_s,
        "machine_goes": goes,
        "place_goes": place_goes,
        "slower": slower,
        "leaving": leaving,
        "num_losses": 1,
    }


def test_the_slowest_rank_counts_and_a_tier_that_one_rank_lacks_is_none():
    both = [told(memory_s=0.1, partner_s=0.5), told(save_s=3.0, memory_s=0.2, partner_s=0.4)]
    assert [(w.tier, w.predicted_s) for w in tier_options(both)] == [
        ("local", 3.0),
        ("memory", 0.2),
        ("partner", 0.5),
    ]
    lacks = [told(memory_s=0.1, place_goes=True, slower=[["s3", 2.0], ["far", None]]), told()]
    assert tier_options(lacks) == [
        TierOption("local", outlives_machine=False, predicted_s=1.0),
        TierOption("s3", outlives_machine=True, predicted_s=3.0),
        TierOption("far", outlives_machine=True, predicted_s=None),
    ]
    assert tier_options([told(save_s=0.0)])[0].predicted_s is None


@pytest.mark.parametrize(
    ("reason", "environment", "stays"),
    [
        ("SIGTERM", {}, True),
        ("AWS spot interruption", {}, True),
        ("SIGTERM", {"SLURM_JOB_ID": "7"}, False),
    ],
)
def test_memory_of_other_hosts_is_lost_where_the_whole_job_goes(reason, environment, stays):
    goes = takes_machine(reason, environment)
    ways = tier_options([told(memory_s=0.1, partner_s=0.5, goes=goes)])
    assert [way.outlives_machine for way in ways if way.tier == "partner"] == [stays]


def test_memory_of_other_hosts_is_lost_where_more_of_them_were_told_to_go_than_may_be_lost():
    def outlives(*leaving):
        ranks = [told(memory_s=0.1, partner_s=0.5, goes=GONE, leaving=host) for host in leaving]
        return [way.outlives_machine for way in tier_options(ranks) if way.tier == "partner"]

    assert outlives("one", "one", "", "") == [True]
    assert outlives("one", "", "", "two") == [False]


@pytest.fixture
def sealed(tmp_path):
    """Options of an encrypted run."""
    identity = keys.generate()
    keys.write_identity(tmp_path / "id", identity)
    return {"encrypt_to": identity.recipient, "identity": str(tmp_path / "id")}


def stop_on_a_slow_disk(run, **options):
    """An attempt that is told to stop within two minutes, and whose saves have taken ten."""

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches == 8:
            ckpt._attempt.saver.wait()  # the one before: it would be measured, too
            for _ in range(3):
                ckpt._timings.record_save(weigh(ckpt._registry, gradients=False).state, 600.0)
            notice(run, 1, reason="maintenance", seconds_left=120)
            until = time.monotonic() + 60
            while not ckpt._gate.has_open_round():
                assert time.monotonic() < until
                time.sleep(0.01)

    attempt(run, epochs=3, inside=inside, on_stop="return", stop_at="micro-batch", **options)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_with_a_short_notice_the_save_stays_in_memory_and_the_next_attempt_goes_on_from_it(
    tmp_path, caplog, sealed, is_encrypted
):
    how = sealed if is_encrypted else {}
    straight, _ = attempt(tmp_path / "straight", epochs=3)
    with caplog.at_level(logging.INFO, "trainckpt"):
        stop_on_a_slow_disk(tmp_path / "run", **how)
    outcome = record(tmp_path / "run", 1)["outcome"]
    newest = outcome["snapshot"]
    assert newest.startswith("s4m")
    assert (outcome["outcome"], outcome["tiers"], outcome["lost_micro_batches"]) == (
        "stopped",
        ["memory"],
        0,
    )
    chosen = outcome["chosen"]
    assert chosen["tier"] == "memory"
    assert "local would take about" in chosen["why"]
    assert chosen["predicted_s"] < chosen["seconds_left"] < 120
    assert "final save goes to memory, in about" in caplog.text
    assert newest not in usable(tmp_path / "run")

    parts, ckpt = attempt(tmp_path / "run", epochs=3, **how)
    assert str(ckpt._attempt.beginning.manifest.name) == newest
    assert (ckpt._attempt.beginning.manifest.encryption is not None) == is_encrypted
    assert parts.state() == straight.state()
    assert SharedMemoryDir.found(str(tmp_path / "run")) is None


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="gives a folder away: root")
def test_a_save_in_another_users_memory_is_named_by_the_next_attempt(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(shared_memory.ROOT_VARIABLE, str(tmp_path))
    stop_on_a_slow_disk(tmp_path / "run")
    newest = record(tmp_path / "run", 1)["outcome"]["snapshot"]
    theirs = (tmp_path / f"trainckpt-{os.getuid()}").rename(tmp_path / "trainckpt-65533")
    os.chown(theirs, 65533, 65533)
    with caplog.at_level(logging.INFO, "trainckpt"):
        _, ckpt = attempt(tmp_path / "run", epochs=3)
    assert str(ckpt._attempt.beginning.manifest.name) != newest
    (said,) = [line for line in caplog.messages if line.startswith(f"skipped snapshot {newest}")]
    assert "attempt 1 kept it in the memory of" in said
    assert said.endswith(f"; {theirs} belongs to another user")


@pytest.mark.skipif(not arena.has_memfd(), reason="the system has no memfd")
def test_memory_of_a_rank_s_own_is_no_place_for_a_last_save(tmp_path, monkeypatch):
    """It ends with the rank."""
    monkeypatch.setattr(shared_memory, "_ROOM_BYTES", 1 << 60)
    run = tmp_path / "run"
    stop_on_a_slow_disk(run)
    outcome = record(run, 1)["outcome"]
    assert outcome["chosen"]["tier"] == "local"
    assert "nothing else outlives that" in outcome["chosen"]["why"]
    assert outcome["lost_micro_batches"] > 0
    assert outcome["snapshot"] == usable(run)[-1]


@pytest.mark.parametrize("others_keep", [False, True])
def test_a_last_save_that_is_cut_off_leaves_what_was_in_memory_before_it(
    tmp_path, sealed, others_keep
):
    how = {"every": "never", "memory_every": "1 step", "epochs": 3, **sealed}

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches == 2:  # the first of two arenas holds the newest
            ckpt._attempt.saver.wait()
            protecting = ckpt._attempt.saver.replication
            plan = protecting.replicator.plan
            protecting.replicator.plan = replace(plan, num_losses=int(others_keep))
            protecting.prepare_final(others=False)
            arena = protecting.reserve(100_000, in_memory=True)
            arena.memory[:] = b"x" * 100_000
            opened = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
            assert opened.count(str(arena.path)) <= 2  # its own and its mapping's: none is left
            raise Crash

    with pytest.raises(Crash):
        attempt(tmp_path / "run", inside=inside, **how)
    _, ckpt = attempt(tmp_path / "run", **how)
    assert ckpt._attempt.beginning.manifest.cursor.step == 1


def test_after_a_stop_that_was_undone_the_same_hosts_keep_what_is_saved_next(tmp_path):
    seen = []

    def inside(ckpt, _):
        saver = ckpt._attempt.saver
        protecting = saver.replication
        if ckpt.cursor.micro_batches == 4:
            saver.wait()
            before = protecting.replicator
            before.plan = replace(before.plan, num_losses=1)
            protecting.pause()
            protecting.prepare_final(others=False)
            seen.append(protecting.replicator is before)
            protecting.unpause()
            seen.append(protecting.replicator is before)
        if ckpt.cursor.micro_batches == 8:
            saver.wait()
            newest = protecting.replicator.newest
            seen.append(
                (saver.in_flight.why_not_replicated, newest.endswith(saver.in_flight.snapshot))
            )
            raise Crash

    with pytest.raises(Crash):
        attempt(tmp_path / "run", inside=inside, every="never", memory_every="1 step", epochs=3)
    assert seen == [False, True, ("", True)]
    _, ckpt = attempt(tmp_path / "run", every="never", memory_every="1 step", epochs=3)
    assert ckpt._attempt.beginning.manifest.cursor.step == 4


def test_an_encrypted_last_save_takes_no_memory_that_is_not_left(tmp_path, sealed, monkeypatch):
    asked = []

    def inside(ckpt, _):
        protecting = ckpt._attempt.saver.replication
        if ckpt.cursor.micro_batches == 6:
            asked.append(protecting.reserve(1 << 20, in_memory=True))
            with monkeypatch.context() as full:
                full.setattr(arenas, "available_bytes", lambda: 0)
                asked.append(protecting.reserve(2 << 20, in_memory=True))
                asked.append(protecting.reserve(1 << 20, in_memory=True))  # which it has already
            raise Crash

    with pytest.raises(Crash):
        attempt(tmp_path / "every", inside=inside, memory_every="50 steps", **sealed)
    assert [arena is not None for arena in asked] == [True, False, True]

    stop_on_a_slow_disk(tmp_path / "run", memory_budget="4 MB", **sealed)  # two files, not a third
    outcome = record(tmp_path / "run", 1)["outcome"]
    assert outcome["chosen"]["tier"] != "memory"
    assert outcome["snapshot"] in usable(tmp_path / "run")
    folder = SharedMemoryDir.found(str(tmp_path / "run")).root / "arenas"
    assert sorted(p.name for p in folder.iterdir()) == ["rank00000.0", "rank00000.1"]


def test_what_was_given_up_is_one_save_and_later_ones_are_committed(tmp_path):
    """A stop whose save came too late was undone, and training went on."""

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches == 5:
            ckpt._attempt.saver.wait()
            ckpt._attempt.saver.abandon()

    attempt(tmp_path / "run", inside=inside)
    assert any(not name.startswith("s2~") for name in usable(tmp_path / "run"))

"""The choice between a snapshot and a dump, row by row."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.process_dump.test_restore import RECORD
from trainckpt.attempt import heartbeat
from trainckpt.attempt.record_writer import AttemptId
from trainckpt.attempt.status_files import (
    RESTORED_FILE,
    RankProgress,
    RankStatus,
    RankStatusWriter,
    read_paces,
    restore_files,
)
from trainckpt.cli import pause
from trainckpt.dumping import handshake
from trainckpt.dumping.dump_choice import BOTH, DUMP, NOTHING, SNAPSHOT, DumpFacts, choose
from trainckpt.dumping.handshake import DumpRequest, RankQuiesced
from trainckpt.encryption import keys
from trainckpt.errors import NothingToResume, TierUnavailable
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.cursor import Cursor
from trainckpt.format.dump import DumpName
from trainckpt.format.manifest import Wrapped
from trainckpt.launcher import dumper
from trainckpt.launcher.dumper import Dumper, DumpReason, DumpTarget, _Waiting
from trainckpt.process_dump import process_tree
from trainckpt.process_dump.criu import Ability
from trainckpt.process_dump.cuda_driver import CudaDriver
from trainckpt.save.estimates import Timings
from trainckpt.snapshot import attempt_history
from trainckpt.snapshot.catalog import ancestry
from trainckpt.stop.notice_sources import ProgressReporter
from trainckpt.storage.local import LocalTier

LATE = {"instrumented": True, "seconds_left": 8.0, "boundary_s": 20.0, "dump_s": 2.0}
EARLY = {**LATE, "boundary_s": 3.0}
BARE = {"instrumented": False, "seconds_left": 8.0, "dump_s": 2.0}


@contextlib.contextmanager
def asleep():
    """A process that does nothing while the block runs."""
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("facts", "what", "why"),
    [
        (EARLY, SNAPSHOT, "in about 3.0 s, 8.0 s are left"),
        ({**LATE, "seconds_left": None}, SNAPSHOT, "a boundary can be reached"),
        ({**LATE, "boundary_s": None}, SNAPSHOT, "8.0 s are left"),
        ({**EARLY, "asked": True}, BOTH, "then a dump on top"),
        ({**EARLY, "asked": True, "why_no_dump": "there is no CRIU"}, SNAPSHOT, "no CRIU"),
        ({**EARLY, "asked": True, "dump_s": 9.0}, SNAPSHOT, "would take about 9.0 s"),
        ({**EARLY, "asked": True, "why_not_now": "NCCL is alive"}, BOTH, "then a dump on top"),
        (LATE, DUMP, "the next boundary is saved in about 20.0 s"),
        ({**LATE, "hosts": 2}, NOTHING, "2 hosts: what was flushed stands"),
        ({**LATE, "host_returns": False}, NOTHING, "will come back"),
        ({**LATE, "why_no_dump": "it holds a GPU"}, NOTHING, "it holds a GPU"),
        ({**LATE, "why_not_now": "NCCL is alive"}, NOTHING, "NCCL is alive: what was flushed"),
        ({**BARE, "why_not_now": "NCCL is alive"}, NOTHING, "no Checkpointer, and NCCL is alive"),
        ({**LATE, "dump_s": 9.0}, NOTHING, "would take about 9.0 s of the 8.0 s left"),
        (BARE, DUMP, "no Checkpointer"),
        ({**BARE, "seconds_left": None, "dump_s": 1e9}, DUMP, "no Checkpointer"),
        ({**BARE, "dump_s": 9.0}, NOTHING, "9.0 s of the 8.0 s left"),
        ({**BARE, "why_no_dump": "there is no CRIU"}, NOTHING, "there is no CRIU"),
        ({**BARE, "hosts": 2}, NOTHING, "2 hosts"),
    ],
)
def test_the_first_row_that_matches_decides_and_says_why(facts, what, why):
    found = choose(DumpFacts(**facts))
    assert found.what == what
    assert why in found.why


@pytest.mark.parametrize(
    ("since_s", "micro_batch_s", "save_s", "boundary_s"),
    [
        (1.0, None, 2.0, None),  # nothing was measured
        (1.0, 4.0, 2.0, 5.0),
        (4.0, 4.0, 2.0, 2.0),
        (10.0, 4.0, 2.0, 12.0),  # longer than the others: as long again
        (1.0, 4.0, None, 4.0),  # a first save takes a second, for all that is known
    ],
)
def test_when_a_boundary_will_be_saved_is_foreseen_from_the_pace(
    since_s, micro_batch_s, save_s, boundary_s
):
    assert RankProgress(since_s, micro_batch_s, save_s).boundary_s() == boundary_s


def test_a_rank_tells_its_pace_and_the_supervisor_counts_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(tmp_path))
    timings = Timings()
    status_writer = ProgressReporter(timings, 1)
    assert status_writer.poll() == []
    assert read_paces(tmp_path) == []  # no boundary yet
    now = time.monotonic()
    timings.on_boundary(now - 5.0)
    timings.after_save(Cursor(), now - 3.0)
    timings.on_boundary(now - 1.0)
    status_writer.poll()
    (told,) = read_paces(tmp_path)
    assert told.since_s >= 1.0
    assert (told.micro_batch_s, told.save_s) == (2.0, None)
    path = tmp_path / "pace1.json"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100.0))
    assert read_paces(tmp_path)[0].since_s >= 101.0
    path.write_text('{"since_s": "long", "micro_batch_s": null, "save_s": null}')
    assert read_paces(tmp_path) == []


def test_images_are_encrypted_to_whom_the_ranks_say_or_else_the_options(tmp_path, monkeypatch):
    ours, theirs = keys.generate().recipient, keys.generate().recipient
    tier, record = LocalTier(tmp_path), AttemptRecord(1)

    def recipients():
        return dumper.recipients(tmp_path, tier, record)

    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", theirs)
    assert recipients() == (theirs,), "a command without a Checkpointer"
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(tmp_path))
    status_writer = RankStatusWriter(tmp_path)
    status_writer.update(attempt=1)
    assert recipients() == ()
    status_writer.update(encrypt_to=(ours,))
    assert recipients() == (ours,)
    dumping = Dumper(DumpTarget(None, tmp_path, (), None), Ability(), print)
    dumping._tier = tier
    assert dumping._why_not(record) == ""
    status_writer.update(encrypt_to=("nobody",))
    assert "nobody" in dumping._why_not(record)


def test_what_was_encrypted_stays_so_whoever_brings_it_back(tmp_path, monkeypatch):
    """A command without a Checkpointer: `resume` may be typed elsewhere, with other options."""
    monkeypatch.delenv("TRAINCKPT_ENCRYPT_TO", raising=False)
    first, second, other = (keys.generate().recipient for _ in range(3))
    tier, cwd = LocalTier(tmp_path / "run"), tmp_path / "cwd"
    cwd.mkdir()

    def recipients(**more):
        return dumper.recipients(tmp_path, tier, AttemptRecord(2, **more))

    facts = {"cwd": str(cwd), "env": {"TRAINCKPT_ENCRYPT_TO": "team"}}
    (cwd / "team").write_text(f"{first}\n{second}\n")
    assert recipients(facts=facts) == (first, second), "as it was launched, and where"
    (cwd / "trainckpt.toml").write_text(f'encrypt_to = "{other}"')
    assert recipients(facts={"cwd": str(cwd)}) == (other,)

    name = DumpName(1, 1)
    run = attempt_history.found_run(tier)
    wrapped = (Wrapped(first, b"key"), Wrapped(second, b"key"))
    dumped = replace(RECORD, name=name, run=run, keys=wrapped)
    tier.replace(name.record, dumped.dump())
    assert recipients(parent=str(name)) == (first, second), "nothing else says so"
    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", "none")
    assert recipients(parent=str(name), facts=facts) == (first, second)
    monkeypatch.setenv("TRAINCKPT_ENCRYPT_TO", other)
    assert recipients(parent=str(name), facts=facts) == (other, first, second)

    monkeypatch.delenv("TRAINCKPT_ENCRYPT_TO")
    tier.replace(name.record, b"{}")
    dumping = Dumper(DumpTarget(None, tmp_path, (), None), Ability(), print)
    dumping._tier = tier
    assert "dump.json" in dumping._why_not(AttemptRecord(2, str(name))), "never in the clear"


def test_ranks_that_rest_are_told_whatever_keeps_them_from_being_dumped(tmp_path, monkeypatch):
    """The supervisor outlives it: there is room for no file more, or no more room to ask for."""
    run = LocalTier(tmp_path / "run")
    attempt_history.found_run(run)
    record = attempt_history.claim(
        run, lambda number: AttemptRecord(number, None, facts={"world": 1})
    )
    said = []

    def refused(where, function):
        with monkeypatch.context() as broken, asleep() as process:
            ability = Ability(Path("/bin/false"), "4.2")
            dumping = Dumper(DumpTarget(process, tmp_path, (), None), ability, said.append)
            request = DumpRequest(function, os.getpid())
            handshake.write_request(tmp_path, request)
            handshake.report_quiesced(tmp_path, 0, RankQuiesced(request.id))
            dumping._tier, dumping._attempt = run, record.attempt
            reason = DumpReason("a test", asked=True)
            dumping._waiting = _Waiting(request, reason, record, time.monotonic())

            def breaks(*_):
                raise OSError(errno.EMFILE, "too many open files")

            broken.setattr(where, function, breaks)
            assert not dumping.look([])
            assert process.poll() is None
        return handshake.read_request(tmp_path).refused

    for where, function in (
        (process_tree, "processes"),
        (process_tree, "memory_bytes"),
        (shutil, "disk_usage"),
    ):
        assert "it could not be looked at: " in refused(where, function)


def test_images_are_not_written_to_a_place_beyond_this_host(tmp_path, monkeypatch):
    assert dumper.why_exposed(LocalTier(tmp_path)) == ""
    monkeypatch.setattr(dumper, "file_system", lambda _: "nfs4")
    assert "on nfs4, and images" in dumper.why_exposed(LocalTier(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(dumper, "file_system", lambda path: _kind(path.resolve(), elsewhere))
    assert dumper.why_exposed(LocalTier(tmp_path)) == ""
    (tmp_path / "dumps").symlink_to(elsewhere)  # images lie where the link leads
    assert "on nfs4, and images" in dumper.why_exposed(LocalTier(tmp_path))


def _kind(path, remote):
    return "nfs4" if path.is_relative_to(remote) else "ext4"


def test_a_notice_that_cannot_lead_to_a_dump_delays_nobody_and_raises_nothing(
    tmp_path, monkeypatch
):
    said = []
    dumping = Dumper(DumpTarget(None, tmp_path, (), None), Ability(), said.append)
    assert not dumping.notice(DumpReason("SIGTERM"), [])  # no attempt yet
    told = RankStatus(0, 1, "here", str(tmp_path), attempt=1)
    assert not dumping.notice(DumpReason("SIGTERM"), [told])  # nobody says that there is a deadline
    assert not dumping.notice(DumpReason("SIGTERM", 8.0), [told])  # its record is not there

    def refuses(*_):
        raise TierUnavailable("it does not answer")

    monkeypatch.setattr(attempt_history, "read_attempt", refuses)
    assert not dumping.notice(DumpReason("SIGTERM", 8.0), [told])
    assert said == ["SIGTERM: no dump: it does not answer"]


def test_processes_that_were_restored_have_the_number_that_was_claimed_for_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRAINCKPT_SUPERVISOR", str(tmp_path))
    number = AttemptId(4)
    assert number.value == 4
    name, text = RESTORED_FILE, restore_files(5, 0.0, None)[RESTORED_FILE]
    (tmp_path / name).write_text(text)
    assert number.value == 5
    for bad in ("", '{"attempt": "6"}', '{"attempt": 3}', "[]"):
        (tmp_path / name).write_text(bad)
        assert number.value == 4


def test_snapshots_before_a_dump_are_on_the_ancestry_of_what_was_restored_from_it():
    records = {
        1: AttemptRecord(1, None),
        2: AttemptRecord(2, "s4~1.2"),
        3: AttemptRecord(3, "dump~2.5"),
    }
    assert ancestry(records, []) == {3: float("inf"), 2: 5, 1: 2}


def test_pause_waits_for_a_supervisor_that_is_looking_and_not_for_one_that_is_not_there(
    tmp_path, monkeypatch
):
    """GPUs may take longer to look at than it takes to see that nobody answers."""
    monkeypatch.setattr(pause, "ANSWERS_WITHIN_S", 0.2)
    tier, request = LocalTier(tmp_path), dumper.DumpCall("notices/1-a.ask", "x")
    live = AttemptRecord(1, facts={"hosts": ["elsewhere"]})
    assert pause.wait_for_answer(tier, request.key, live).why == pause.NO_ANSWER
    dumper.answer(tier, request, dumper.DumpAnswer(dumper.LOOKING, ""))
    chosen = dumper.DumpAnswer(DUMP, "it fits")
    later = threading.Timer(0.6, lambda: dumper.answer(tier, request, chosen))
    later.start()
    assert pause.wait_for_answer(tier, request.key, live) == chosen
    later.join()


def test_pause_waits_for_no_dump_of_a_supervisor_without_a_sign_of_life(tmp_path, monkeypatch):
    """It beats while it dumps, and pause waits as long as it does."""
    monkeypatch.setattr(pause, "DUMP_SILENT_FOR_S", 0.5)
    monkeypatch.setattr(pause, "LISTEN_EVERY_S", 0.05)
    tier = LocalTier(tmp_path)
    attempt_history.found_run(tier)
    live = attempt_history.claim(tier, lambda number: AttemptRecord(number, None))
    beating, ended = heartbeat.Heartbeat(tier, live.attempt), list[float]()
    beating.start()
    stops = threading.Timer(1.0, lambda: (ended.append(time.monotonic()), beating.stop()))
    stops.start()
    with pytest.raises(NothingToResume, match="its supervisor was killed meanwhile, or hangs"):
        pause.wait_for_dump(tier, "notices/1-a.ask", live, None)
    assert ended
    assert time.monotonic() - ended[0] >= 0.4
    stops.join()


def test_looking_at_gpus_leaves_most_of_the_time_that_is_left(tmp_path, monkeypatch):
    """A driver that does not answer: a quarter of the time is spent on it at most."""
    asked = []
    dumping = Dumper(DumpTarget(None, tmp_path, (), None), Ability(), print)

    def of_tree(pids, driver, **more):
        asked.append(driver.look_within_s)

    monkeypatch.setattr(dumper.gpu_state, "of_tree", of_tree)
    assert dumping._why_not_gpus([1], 8.0, CudaDriver()) == ""
    assert dumping._why_not_gpus([1], None, CudaDriver()) == ""
    assert asked == [2.0, 60.0]

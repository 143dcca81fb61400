"""The Checkpointer, attempt after attempt in one process."""

from __future__ import annotations

import errno
import os
import time

import pytest
import torch
from torch import nn

from tests.end_to_end.training import (
    Crash,
    Parts,
    attempt,
    catalog,
    crashed,
    notice,
    record,
    usable,
)
from trainckpt import Checkpointer, ConfigurationError
from trainckpt.attempt.status_files import RETURNED, SUPERVISOR_VARIABLE, read_rank_statuses
from trainckpt.errors import NothingToResume, SaveFailed
from trainckpt.save.arenas import Arenas
from trainckpt.storage.local import Disk


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that never stopped: its lines, its end."""
    seen = {}
    parts, _ = attempt(tmp_path_factory.mktemp("straight") / "run", epochs=3, seen=seen)
    return seen, parts.state()


# Before any save, at one, behind one inside a window, over an epoch's end, and in the last epoch.
CRASHES = (1, 4, 6, 9, 13)


@pytest.mark.parametrize(
    "crash_at",
    [
        crash if crash in CRASHES else pytest.param(crash, marks=pytest.mark.long)
        for crash in range(1, 15)
    ],
)
def test_a_run_that_crashed_anywhere_ends_as_the_one_that_did_not(tmp_path, straight, crash_at):
    seen = {}
    crashed(tmp_path, crash_at, epochs=3, seen=seen)
    parts, _ = attempt(tmp_path, epochs=3, seen=seen)
    lines, end = straight
    assert seen.keys() == lines.keys()
    assert all(set(map(repr, seen[at])) == set(map(repr, lines[at])) for at in lines)
    assert parts.state() == end


def test_a_notice_file_that_is_none_is_said_and_training_goes_on(tmp_path, caplog):
    def held(ckpt, _):
        if ckpt.cursor.micro_batches == 1:
            folder = tmp_path / "notices"
            folder.mkdir()
            (folder / f"{ckpt.attempt}-x.json").write_text("{")
            until = time.monotonic() + 60
            while "1-x.json is not a notice" not in caplog.text:
                assert time.monotonic() < until, "nobody said it"
                time.sleep(0.01)

    with caplog.at_level("WARNING", "trainckpt"):
        _, ckpt = attempt(tmp_path, epochs=1, inside=held)
    assert ckpt._attempt.shutdown.left
    assert not ckpt._attempt.shutdown.stopped


def test_a_stop_inside_a_window_is_exact_and_continues_at_that_micro_batch(tmp_path, straight):
    """By a notice, at whatever micro-batch the watcher hears of it."""
    seen = {}

    def slowly(ckpt, _):
        if ckpt.cursor.micro_batches == 3:
            notice(tmp_path, ckpt.attempt)
        time.sleep(0.12 if ckpt.cursor.micro_batches >= 3 else 0)

    _, stopped = attempt(tmp_path, epochs=3, seen=seen, inside=slowly, on_stop="return")
    parts, ckpt = attempt(tmp_path, epochs=3, seen=seen)
    assert ckpt.resumed_from == stopped.cursor
    assert stopped.cursor.micro_batches < 15
    lines, end = straight
    assert {at: list(map(repr, v)) for at, v in seen.items()} == {
        at: list(map(repr, v)) for at, v in lines.items()
    }
    assert parts.state() == end
    outcome = record(tmp_path, 1)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"], outcome["lost_micro_batches"]) == (
        "stopped",
        75,
        0,
    )
    assert outcome["snapshot"] == str(ckpt._attempt.beginning.manifest.name)


def test_with_on_stop_return_the_loops_end_instead(tmp_path, monkeypatch):
    """And whoever launched it hears that what comes now is the script's own."""
    told = tmp_path / "told"
    told.mkdir()
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(told))

    def slowly(ckpt, _):
        if ckpt.cursor.micro_batches == 1:
            notice(tmp_path, ckpt.attempt)
        time.sleep(0.02)

    _, ckpt = attempt(tmp_path, epochs=1000, inside=slowly, on_stop="return")
    assert 1 < ckpt.cursor.micro_batches < 2000
    assert record(tmp_path, 1)["outcome"]["outcome"] == "stopped"
    assert (read_rank_statuses(told)[0].state, read_rank_statuses(told)[0].how) == (
        RETURNED,
        "stopped",
    )
    assert list(ckpt.batches()) == []
    assert list(ckpt.epochs(9999)) == []
    _, again = attempt(tmp_path, epochs=0)
    assert again.resumed_from == ckpt.cursor


def test_a_finished_run_started_again_trains_nothing_and_saves_nothing(tmp_path, straight):
    attempt(tmp_path, epochs=3)
    before, seen = usable(tmp_path), {}
    parts, _ = attempt(tmp_path, epochs=3, seen=seen)
    assert (seen, usable(tmp_path)) == ({}, before)
    assert parts.state()[0] == straight[1][0]
    assert record(tmp_path, 2)["outcome"]["snapshot"] == before[-1]
    assert record(tmp_path, 2)["outcome"]["outcome"] == "finished"


def test_more_epochs_go_on_where_a_finished_run_ended(tmp_path, straight):
    seen = {}
    attempt(tmp_path, epochs=2, seen=seen)
    _, ckpt = attempt(tmp_path, epochs=3, seen=seen)
    assert ckpt.resumed_from.epoch == 2
    assert {at: list(map(repr, v)) for at, v in seen.items()} == {
        at: list(map(repr, v)) for at, v in straight[0].items()
    }


def test_a_run_saved_again_before_its_first_batch_of_an_epoch_keeps_the_epoch(tmp_path, straight):
    """Both snapshots lie between two epochs; the loader still shows the one that is over."""
    seen = {}
    attempt(tmp_path, epochs=2, seen=seen)

    def save_and_crash():
        with Checkpointer(tmp_path, **Parts().tracked()) as ckpt:
            pending = ckpt.save()
            while not ckpt._gate.has_open_round():
                time.sleep(0.01)
            for _ in ckpt.epochs(3):
                next(ckpt.batches())
                pending.wait("durable", 9)
                raise Crash

    with pytest.raises(Crash):
        save_and_crash()
    attempt(tmp_path, epochs=3, seen=seen)
    assert {at: list(map(repr, v)) for at, v in seen.items()} == {
        at: list(map(repr, v)) for at, v in straight[0].items()
    }


def test_a_script_s_own_failure_is_recorded_and_nothing_is_saved_for_it(tmp_path):
    crashed(tmp_path, 5)
    outcome = record(tmp_path, 1)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"]) == ("failed", 1)
    assert "Crash" in outcome["reason"]
    assert usable(tmp_path) == [outcome["snapshot"]] == ["s2~1.1"]
    assert outcome["lost_micro_batches"] == 1


def test_saves_fall_on_multiples_and_only_the_last_are_kept(tmp_path):
    attempt(tmp_path, epochs=3, every="2 steps", keep_last=2)
    assert usable(tmp_path) == ["s6~1.3", "s7m1~1.4"]


def test_the_multiple_a_run_resumed_from_is_not_saved_again(tmp_path):
    crashed(tmp_path, 7, every="2 steps")
    attempt(tmp_path, epochs=2, every="2 steps", keep_last=9)
    assert usable(tmp_path) == ["s2~1.1", "s4~2.1", "s5~2.2"]


def test_a_save_that_is_asked_for_is_taken_at_the_next_boundary_under_its_tag(tmp_path):
    handles = []

    def ask(ckpt, _):
        if ckpt.cursor.micro_batches == 3:
            handles.append(ckpt.save(tag="best"))
            with pytest.raises(ConfigurationError, match="never reach"):
                handles[0].wait("staged")
            with pytest.raises(ConfigurationError, match="never reach"):
                ckpt.save(wait="durable")
            time.sleep(0.3)  # until the ranks (here: one) have agreed

    attempt(tmp_path, inside=ask, every="never", keep_last=1)
    assert handles[0].wait("durable", timeout_s=9).snapshot == "s2~1.1"
    (tagged,) = [c for c in catalog(tmp_path) if c.manifest.tags]
    assert (str(tagged.name), tagged.manifest.tags) == ("s2~1.1", ("best",))
    with pytest.raises(ConfigurationError, match="no tier of this run reaches"):
        handles[0].wait("partner")


def test_a_step_after_a_commit_that_fails_leaves_the_save_committed(tmp_path, monkeypatch, caplog):
    handles = []

    def fails(*_):
        raise OSError("no memory for that")

    def ask(ckpt, _):
        if ckpt.cursor.micro_batches == 3:
            handles.append(ckpt.save())  # one rank agrees with itself at once

    monkeypatch.setattr(Arenas, "on_commit", fails)
    attempt(tmp_path, inside=ask, every="never")
    assert handles[0].wait("durable", timeout_s=9).snapshot == "s2~1.1"
    assert "after the commit of s2~1.1 failed: no memory for that" in caplog.text


@pytest.mark.parametrize("tag", ["latest", "a/b", "s3"])
def test_a_tag_that_cannot_be_one_is_refused_where_it_is_given(tmp_path, tag):
    parts = Parts()
    with Checkpointer(tmp_path, **parts.tracked()) as ckpt, pytest.raises(ConfigurationError):
        ckpt.save(tag=tag)


def test_a_loop_without_a_loader_has_boundaries_of_its_own(tmp_path):
    def run(crash_at=None):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = {}
        with Checkpointer(tmp_path, model=model, optimizer=optimizer, every="2 steps") as ckpt:
            while ckpt.cursor.step < 7 and ckpt.boundary():
                step = ckpt.cursor.step
                if step == crash_at:
                    raise Crash
                loss = model(torch.randn(3, 2)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[step] = loss.item().hex()
        return losses

    whole = run()
    for path in list((tmp_path / "snapshots").iterdir()):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    (tmp_path / "run.json").unlink()
    for file in (tmp_path / "attempts").iterdir():
        file.unlink()
    with pytest.raises(Crash):
        run(crash_at=5)
    assert run() == {step: loss for step, loss in whole.items() if step >= 4}


def test_a_loop_that_clips_one_flat_buffer_of_gradients_goes_on_bitwise(tmp_path):
    def run(place, crash_at=None):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        flat = torch.zeros(20)
        model.weight.grad, model.bias.grad = flat[:16].view(4, 4), flat[16:]
        losses = {}
        with Checkpointer(place, model=model, optimizer=optimizer, every="2 steps") as ckpt:
            while ckpt.cursor.step < 7 and ckpt.boundary():
                step = ckpt.cursor.step
                if step == crash_at:
                    raise Crash
                flat.zero_()
                loss = model(torch.ones(3, 4)).square().mean()
                loss.backward()
                flat.mul_(min(1.0, 0.1 / (flat.norm().item() + 1e-6)))
                optimizer.step()
                losses[step] = loss.item().hex()
        return losses

    whole = run(tmp_path / "straight")
    with pytest.raises(Crash):
        run(tmp_path / "run", crash_at=5)
    assert run(tmp_path / "run") == {step: loss for step, loss in whole.items() if step >= 4}


def test_required_without_a_run_is_nothing_to_resume(tmp_path):
    with pytest.raises(NothingToResume) as caught:
        attempt(tmp_path / "run", resume="required")
    assert caught.value.exit_code == 66
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_committed_starts_at_step_0_and_says_so(tmp_path, caplog):
    crashed(tmp_path, 1)
    with caplog.at_level("INFO", "trainckpt"):
        _, ckpt = attempt(tmp_path, resume="required", inside=None)
    assert ckpt.resumed_from is None
    assert "attempt 2: begins at step 0 (nothing was ever committed)" in caplog.text


def test_never_begins_anew_and_leaves_what_was_as_an_abandoned_branch(tmp_path):
    crashed(tmp_path, 7)
    _, ckpt = attempt(tmp_path, resume="never", every="never")
    assert ckpt.resumed_from is None
    assert [str(c.name) for c in catalog(tmp_path) if c.usable] == ["s5~2.1"]


def test_a_log_line_says_from_where_it_resumed_and_nothing_of_what_was_pruned(tmp_path, caplog):
    crashed(tmp_path, 5)
    crashed(tmp_path, 9, keep_last=1)
    with caplog.at_level("INFO", "trainckpt"):
        attempt(tmp_path)
    known = "restored, compared after the first batch"
    assert f"resumed from s4~2.1, epoch 1 step 4 micro-batch 0: {known}" in caplog.text
    assert "this resume is bitwise in all that is tracked: model, " in caplog.text
    assert "it is gone" not in caplog.text


def test_an_object_that_cannot_be_stored_is_refused_before_anything_is_claimed(tmp_path):
    class Own:
        def state_dict(self):
            return {"metrics": [1, object()]}

        def load_state_dict(self, state):
            pass

    with pytest.raises(ConfigurationError, match=r"own\.metrics\.1 is a builtins\.object"):
        Checkpointer(tmp_path / "run", own=Own()).resume()
    assert not (tmp_path / "run").exists()


def test_a_keyword_that_is_neither_option_nor_object_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="keep_lats is a int"):
        Checkpointer(tmp_path, keep_lats=3)


@pytest.mark.parametrize("name", ["rng", "gradients", "loaders", "files", "ddp", "fsdp"])
def test_a_reserved_keyword_is_refused_with_all_of_them(tmp_path, name):
    with pytest.raises(ConfigurationError, match=f"the name '{name}' is reserved") as refused:
        Checkpointer(tmp_path, **{name: nn.Linear(1, 1)})
    every = "reserved are ddp, files, fsdp, gradients, imported, loaders, rng"
    assert refused.value.hint == f"choose another keyword; {every}"


def test_what_needs_a_resume_says_so(tmp_path):
    ckpt = Checkpointer(tmp_path, **Parts().tracked())
    for ask in (ckpt.boundary, ckpt.save, ckpt.batches, lambda: next(ckpt.epochs(1))):
        with pytest.raises(ConfigurationError, match="not resumed yet"):
            ask()
    with ckpt, pytest.raises(ConfigurationError, match="resumed already"):
        ckpt.resume()


def test_files_are_0600_and_folders_0700(tmp_path):
    attempt(tmp_path / "run")
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_failed_final_save_is_raised_after_the_record_says_so(tmp_path):
    def vanish(ckpt, _):
        if ckpt.cursor.micro_batches == 9:
            ckpt._attempt.saver.wait()
            (tmp_path / "run.json").rename(tmp_path / "gone")

    with pytest.raises(SaveFailed, match="is gone"):
        attempt(tmp_path, every="4 steps", inside=vanish)
    assert record(tmp_path, 1)["outcome"]["exit_code"] == 74
    assert record(tmp_path, 1)["outcome"]["outcome"] == "failed"


FULL = {
    "disk": (errno.ENOSPC, "free space on the file system of"),
    "quota": (errno.EDQUOT, "free space within the quota that holds"),
}


@pytest.mark.parametrize("step", ["write", "create"], ids=["the file", "the commit"])
@pytest.mark.parametrize("full", FULL)
def test_a_final_save_for_which_there_is_no_space_says_how_to_make_some(
    tmp_path, monkeypatch, full, step
):
    """The file of a rank has no room, or the manifest."""
    number, cure = FULL[full]
    done = getattr(Disk, step)

    def refuses(self, path, *more):
        ours = path.name.startswith("rank" if step == "write" else ".tmp")
        if begun and ours:
            raise OSError(number, os.strerror(number))
        return done(self, path, *more)

    def fills(ckpt, _):
        if ckpt.cursor.micro_batches == 9:
            ckpt._attempt.saver.wait()
            begun.append(ckpt)

    begun = []
    monkeypatch.setattr(Disk, step, refuses)
    with pytest.raises(SaveFailed, match=os.strerror(number)) as caught:
        attempt(tmp_path / "run", every="4 steps", inside=fills)
    assert caught.value.hint.startswith(cure)
    assert f"`trainckpt prune {tmp_path}/run --keep-last 1`, then start" in caught.value.hint
    assert str(caught.value).endswith("older snapshots stand")


def test_what_something_writes_to_during_the_last_save_is_saved_again_from_a_copy(
    tmp_path, monkeypatch, caplog
):
    """Such as a worker that counts in shared memory. What is committed can be read."""
    parts, write, changed = Parts(), Disk.write, []

    def written_meanwhile(self, path, descriptor, block, first_byte):
        if path.suffix == ".safetensors" and not changed:
            changed.append(path)
            parts.model[1].running_mean += 1.0
        write(self, path, descriptor, block, first_byte)

    monkeypatch.setattr(Disk, "write", written_meanwhile)
    monkeypatch.setattr(Arenas, "prepare", lambda *_: None)  # no memory for a copy is at hand
    with caplog.at_level("WARNING", logger="trainckpt"):
        attempt(tmp_path / "run", epochs=1, parts=parts, every="never")
    assert changed
    assert "final save failed, retrying from a copy" in caplog.text
    (name,) = usable(tmp_path / "run")
    again = Parts()
    attempt(tmp_path / "run", epochs=1, parts=again, every="never")
    assert torch.equal(again.model[1].running_mean, parts.model[1].running_mean)
    assert usable(tmp_path / "run") == [name]

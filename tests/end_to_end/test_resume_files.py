"""Files that a script appends to go back with it; and the script is told of its resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import warm
from tests.end_to_end.training import Crash, record
from trainckpt import Checkpointer
from trainckpt.attempt.tracked_files import TrackedFiles
from trainckpt.errors import ConfigurationError, StateMismatch
from trainckpt.state.captured import Saved
from trainckpt.state.registry import Registry

ROOT = Path(__file__).parents[2]


def train(run, out, until, crash_at=None, when="before", as_stream=False, act=None):
    """Steps up to `until`, one line each, saved at every other; the Checkpointer."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ckpt = Checkpointer(run, model=model, optimizer=optimizer, every="2 steps", keep_last=9)
    if act is not None:
        act(ckpt)
    with open(out, "a") as stream:  # noqa: PTH123
        if when == "before":
            ckpt.track_file(stream if as_stream else out)
        with ckpt:
            if when == "after":
                ckpt.track_file(stream if as_stream else out)
            while ckpt.cursor.step < until and ckpt.boundary():
                step = ckpt.cursor.step
                stream.write(f"step {step}\n")
                if not as_stream:
                    stream.flush()
                if step == crash_at:
                    ckpt._attempt.saver.wait()
                    raise Crash
                model(torch.randn(3, 2)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return ckpt


def crashed(*arguments, **how):
    with pytest.raises(Crash):
        train(*arguments, **how)


def lines(*steps):
    return "".join(f"step {step}\n" for step in steps)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.txt"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("as_stream", [False, True])
def test_what_is_trained_again_is_not_written_twice_and_the_tail_is_kept(
    run, out, when, as_stream, caplog
):
    out.write_text("from before\n")
    crashed(run, out, 9, crash_at=5, when=when, as_stream=as_stream)
    assert out.read_text() == "from before\n" + lines(*range(6))
    with caplog.at_level("INFO", "trainckpt"):
        train(run, out, 7, when=when, as_stream=as_stream)
    assert out.read_text() == "from before\n" + lines(*range(7))
    aside = out.with_name("out.txt.after-2")
    assert aside.read_text() == lines(4, 5)
    assert f"14 bytes after them are in {aside}" in caplog.text
    assert "no more" not in caplog.text


def test_a_file_that_came_after_the_snapshot_is_left_as_it_is(run, out, tmp_path):
    other = tmp_path / "other.txt"
    crashed(run, out, 9, crash_at=5)
    other.write_text("new\n")
    train(run, out, 7, act=lambda ckpt: ckpt.track_file(other))
    assert other.read_text() == "new\n"
    assert not other.with_name("other.txt.after-2").exists()


def test_a_file_that_was_not_there_yet_is_emptied_and_kept_aside(run, out, tmp_path):
    late = tmp_path / "late.txt"
    crashed(run, out, 9, crash_at=5, act=lambda ckpt: ckpt.track_file(late))
    late.write_text("written after the snapshot\n")
    train(run, out, 7, act=lambda ckpt: ckpt.track_file(late))
    assert late.read_text() == ""
    assert late.with_name("late.txt.after-2").read_text() == "written after the snapshot\n"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("missing", [False, True])
def test_a_file_that_lost_what_it_held_is_refused_by_name_with_the_cure(run, out, when, missing):
    crashed(run, out, 9, crash_at=5, when=when)
    os.truncate(out, 20)
    if missing:
        out.unlink()
    with pytest.raises(StateMismatch) as caught:
        train(run, out, 7, when=when)
    what = "has 0 bytes" if missing else "has 20 bytes"  # the script's own open() makes it anew
    assert f"{out} {what}, and had 28" in caught.value.message
    assert f"truncate -s 28 {out}" in caught.value.message
    os.truncate(out, 28)  # the cure
    assert train(run, out, 7, when=when).resumed_from.step == 4


def test_an_older_copy_is_never_replaced(run, out):
    crashed(run, out, 9, crash_at=5)
    aside = out.with_name("out.txt.after-2")
    aside.write_text("precious\n")
    train(run, out, 7)
    assert aside.read_text() == "precious\n"
    assert out.with_name("out.txt.after-2.2").read_text() == lines(4, 5)


def test_a_file_that_is_tracked_no_more_is_named(run, out, tmp_path, caplog):
    other = tmp_path / "other.txt"
    other.write_text("1234")
    crashed(run, out, 9, crash_at=5, act=lambda ckpt: ckpt.track_file(other))
    with caplog.at_level("WARNING", "trainckpt"):
        train(run, out, 7)
    assert f"{other} is tracked no more, and not cut back to 4 bytes" in caplog.text


@pytest.mark.parametrize("is_own", [True, False])
def test_a_file_that_another_rank_tracked_is_not_missed(tmp_path, caplog, is_own):
    """A rank that came to the run later is given another's values."""
    files, tree = TrackedFiles(Registry()), {"$": "dict", "of": [["other.txt", 4]]}
    files.resumed(Saved({}, {"files": tree}, is_own=is_own), 2)
    with caplog.at_level("WARNING", "trainckpt"):
        files.warn_uncut(2)
    assert ("other.txt is tracked no more" in caplog.text) == is_own


def test_a_file_that_attempts_without_a_snapshot_wrote_to_is_named(run, out, caplog):
    with caplog.at_level("WARNING", "trainckpt"):
        crashed(run, out, 9, crash_at=1)
        assert "is not cut off" not in caplog.text
        train(run, out, 3)
    assert caplog.text.count(f"{out} is tracked and holds 14 bytes: no attempt before") == 1
    assert out.read_text() == lines(0, 1, 0, 1, 2)


def test_snapshots_of_a_script_without_tracked_files_can_be_resumed_with_some(run, out):
    crashed(run, out, 9, crash_at=5, when="never")
    train(run, out, 7)
    assert out.read_text() == lines(*range(6), *range(4, 7))


def test_a_file_is_cut_back_once_where_state_is_applied_twice(run, out):
    """A snapshot taken at the entry of an evaluation is applied again at that entry."""

    def evaluate(crash):
        model = nn.Linear(2, 1)
        with Checkpointer(run, model=model, every="never") as ckpt:
            ckpt.track_file(out)
            with out.open("a") as stream:
                stream.write("begun\n")
            if not crash:
                assert ckpt.resumed_from.evaluations == 1
            pending = None if ckpt.resumed_from else ckpt.save()
            while pending and not ckpt._gate.has_open_round():
                pass
            with ckpt.evaluation():
                with out.open("a") as stream:
                    stream.write("evaluated\n")
                ckpt._attempt.saver.wait()
                if crash:
                    raise Crash

    with pytest.raises(Crash):
        evaluate(crash=True)
    assert out.read_text() == "begun\nevaluated\n"
    evaluate(crash=False)
    assert out.read_text() == "begun\nbegun\nevaluated\n"


def test_what_is_no_file_is_refused(run):
    with pytest.raises(ConfigurationError, match="has no path"):
        Checkpointer(run, model=nn.Linear(1, 1)).track_file(3)


# ---- hooks


def told(hooks):
    """Registers a hook before the run has resumed."""
    return lambda ckpt: ckpt.on_resume(lambda cursor, lost: hooks.append((cursor.step, lost)))


def test_hooks_are_told_the_cursor_and_what_was_lost_and_nothing_of_a_first_start(run, out):
    first, second, third = [], [], []
    crashed(run, out, 9, crash_at=5, act=told(first))
    ckpt = train(run, out, 7, act=told(second))
    assert (first, second) == ([], [(4, 1)])
    assert ckpt.on_resume(lambda *what: third.append(what))
    assert third == [(ckpt.resumed_from, 1)]  # registered late: told at once


KILLED = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/src"]
from tests.end_to_end.test_resume_files import train
def act(ckpt):
    wait = ckpt.boundary
    def boundary():
        if ckpt.cursor.step == 5:
            ckpt._attempt.saver.wait()
            os.kill(os.getpid(), 9)
        return wait()
    ckpt.boundary = boundary
train({run!r}, {out!r}, 9, act=act)
"""


def test_after_a_kill_what_was_lost_is_unknown_and_files_go_back_all_the_same(server, run, out):
    code = KILLED.format(root=str(ROOT), run=str(run), out=str(out))
    done = warm.run(server, ["-c", code])
    assert done.returncode == -9, done.stderr
    hooks = []
    train(run, out, 7, act=told(hooks))
    assert hooks == [(4, None)]
    assert out.read_text() == lines(*range(7))
    assert out.with_name("out.txt.after-2").read_text() == lines(4)


def test_two_files_of_one_name_are_refused(tmp_path, monkeypatch):
    """The length of one would be taken for that of the other."""
    ckpt = Checkpointer(tmp_path / "run")
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        Path("log.txt").touch()
        if folder == "a":
            ckpt.track_file("log.txt")
    with pytest.raises(ConfigurationError, match=r"two files are tracked as log\.txt"):
        ckpt.track_file("log.txt")
    with ckpt:  # so that nothing of it is left: it listens to signals from the beginning
        pass


def test_a_hook_that_fails_ends_the_attempt_in_its_record_too(run, tmp_path):
    """And signals are the script's own again."""
    out, before = tmp_path / "out", signal.getsignal(signal.SIGTERM)
    crashed(run, out, 6, crash_at=3)

    def act(ckpt):
        @ckpt.on_resume
        def fail(cursor, lost):
            raise Crash

    crashed(run, out, 6, act=act)
    outcome = record(run, 2)["outcome"]
    assert (outcome["outcome"], outcome["snapshot"]) == ("failed", "s2~1.1")
    assert signal.getsignal(signal.SIGTERM) is before
    assert not list((run / "attempts").glob("*.heartbeat"))

"""A stop saves for those who had asked for a save before it: their tags are on what it leaves."""

from __future__ import annotations

import re
import threading

import pytest

from tests.end_to_end import ranks
from tests.end_to_end.training import attempt, catalog
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import SaveFailed
from trainckpt.notice import Notice
from trainckpt.save import coordinator
from trainckpt.stop import final_save
from trainckpt.storage.local import LocalTier

preload("tests.end_to_end.ranks")

HOW = {"epochs": 3, "on_stop": "return", "keep_last": 1}


def stop(ckpt, **more):
    ckpt._listener.watcher.request(Notice("test", **more))


def stopped(place, inside, **options):
    """Train, and stop where `inside` says; manifests by their tags, handles that it returned."""
    handles = []

    def inside_and_keep(ckpt, _):
        handles.extend(inside(ckpt, ckpt.cursor.micro_batches) or ())

    attempt(place, inside=inside_and_keep, **{**HOW, "every": "never", **options})
    return {c.manifest.tags: c.manifest for c in catalog(place) if c.usable}, handles


def test_a_tag_that_is_asked_for_after_the_notice_is_on_the_snapshot_of_the_stop(tmp_path):
    def inside(ckpt, number):
        if number != 5:
            return None
        stop(ckpt)
        return ckpt.save(tag="best"), ckpt.save(), ckpt.save(tag="better")

    found, handles = stopped(tmp_path, inside)
    (of_stop,) = found.values()
    assert (of_stop.tags, of_stop.reason, of_stop.cursor.micro_batches) == (
        ("best", "better"),
        "test",
        6,
    )
    assert [each.wait("durable", 60).snapshot for each in handles] == [str(of_stop.name)] * 3
    attempt(tmp_path, epochs=4, keep_last=1)
    assert ("best", "better") in {c.manifest.tags for c in catalog(tmp_path)}  # it is not pruned


def test_a_tag_that_is_asked_for_while_a_stop_waits_for_its_window_is_on_its_snapshot(tmp_path):
    def inside(ckpt, number):
        if number == 3:
            ckpt.save()  # the second micro-batch of a window: how long one is is known
        if number == 4:
            stop(ckpt, mode="window")
            return [ckpt.save(tag="best")]
        return None

    found, (handle,) = stopped(tmp_path, inside)
    assert found["best",].cursor.micro_batches == 6
    assert handle.wait("local", 60).snapshot == str(found["best",].name)


def test_a_tag_for_the_very_place_that_was_just_saved_is_on_a_snapshot_of_its_own(tmp_path):
    def inside(ckpt, number):
        if number == 3:
            stop(ckpt)
            return [ckpt.save(tag="best")]
        return None

    found, (handle,) = stopped(tmp_path, inside, every="1 step", keep_last=9)
    assert found["best",].cursor.micro_batches == 4
    assert [c.manifest.cursor.micro_batches for c in catalog(tmp_path)] == [4, 4, 2]
    assert handle.wait("local", 60).snapshot == str(found["best",].name)


def test_a_save_that_was_put_off_is_the_stop_s_own(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    released, writing = threading.Event(), LocalTier.write_parts

    def slow(self, key, *arguments):
        if "~1.1/" in key:
            assert released.wait(60)
        writing(self, key, *arguments)

    monkeypatch.setattr(LocalTier, "write_parts", slow)
    put_off = []

    def inside(ckpt, number):
        if number in (2, 4):
            return [ckpt.save(tag=f"t{number}")]
        if number == 6:
            put_off.extend(ckpt._requests.deferred)
            stop(ckpt)
            released.set()
        return None

    found, handles = stopped(tmp_path, inside)
    assert [due.notice.tag for due in put_off] == ["t4"]
    assert {tags: m.cursor.micro_batches for tags, m in found.items()} == {("t2",): 3, ("t4",): 7}
    assert [each.wait("local", 60).error for each in handles] == [None, None]


@pytest.mark.parametrize("stands", [False, True])
def test_a_tag_for_which_no_time_is_left_is_named_and_its_handle_says_why(
    tmp_path, monkeypatch, caplog, stands
):
    monkeypatch.setattr(final_save, "why_not_save", lambda _: "no time is left")

    def inside(ckpt, number):
        if number == 3:
            stop(ckpt)
            return [ckpt.save(tag="best")]
        return None

    found, (handle,) = stopped(tmp_path, inside, every="1 step" if stands else "never")
    assert [tags for tags in found if tags] == []
    assert (
        len(re.findall(r"no snapshot was saved with tag 'best': .*no time is left", caplog.text))
        == 1
    )
    with pytest.raises(SaveFailed, match="no time is left"):
        handle.wait("local", 60)
    assert ("no snapshot at" in caplog.text) is not stands


def test_a_tag_that_is_not_reached_before_the_script_fails_is_named(tmp_path, caplog):
    def inside(ckpt, number):
        if number == 3:
            ckpt.save(tag="best")
            raise KeyError

    with pytest.raises(KeyError):
        stopped(tmp_path, inside)
    assert (
        "no snapshot was saved with tag 'best': the attempt failed before this save was taken"
        in caplog.text
    )


@pytest.mark.parametrize("mode", ["micro-batch", "window"])
def test_a_tag_that_one_rank_alone_asks_for_is_on_the_snapshot_of_the_stop_of_all(tmp_path, mode):
    results = run_ranks(ranks.asks_alone_at_a_stop, 2, str(tmp_path / "run"), mode)
    (of_stop,) = [c.manifest for c in catalog(tmp_path / "run") if c.manifest.tags]
    assert of_stop.tags == ("best-of-1",)
    assert results == [None, str(of_stop.name)]

"""A place that hangs: training goes on, what is due is skipped, what was asked for is put off."""

from __future__ import annotations

import threading

import pytest

from tests.end_to_end.training import attempt, catalog, usable
from trainckpt.errors import SaveFailed
from trainckpt.save import coordinator
from trainckpt.storage.local import LocalTier

HANGS_S = 60.0


@pytest.fixture
def released(monkeypatch):
    """The first save hangs until this is set, and is not waited for."""
    monkeypatch.setattr(coordinator, "PATIENCE_S", 0.0)
    found, writing = threading.Event(), LocalTier.write_parts

    def slow(self, key, *arguments):
        if "~1.1/" in key:
            assert found.wait(HANGS_S)
        writing(self, key, *arguments)

    monkeypatch.setattr(LocalTier, "write_parts", slow)
    return found


def test_training_goes_on_while_a_save_is_written_and_what_is_due_meanwhile_is_skipped(
    tmp_path, released, caplog
):
    """The first save cannot end before the sixth step; the second, third and so on are due."""
    seen, asked = {}, []

    def inside(ckpt, _):
        if ckpt.cursor.step == 6 and not released.is_set():
            seen.update(
                skipped=ckpt._attempt.saver.skipped, committed=ckpt._attempt.saver.committed
            )
            released.set()
            asked.append(ckpt.save(tag="asked"))

    _, ckpt = attempt(tmp_path, epochs=3, inside=inside, every="1 steps", keep_last=99)
    assert seen == {"skipped": 5, "committed": None}
    assert caplog.text.count("is still being written (1 so far)") == 1
    assert asked[0].error is None
    assert ckpt._attempt.saver.committed is not None


def test_a_save_that_was_asked_for_is_put_off_while_the_one_before_hangs_and_taken_after_it(
    tmp_path, released
):
    asked, put_off = [], []

    def inside(ckpt, _):
        number = ckpt.cursor.micro_batches
        if number in (2, 4):
            asked.append(ckpt.save(tag=f"asked-at-{number}"))
        elif number == 8:
            with pytest.raises(SaveFailed, match=r"not taken yet: .* still being written"):
                asked[1].wait("staged")
            put_off.append(asked[1].deferred)
            released.set()
            asked[0].wait("local")
        elif number > 8 and asked[1].snapshot and len(put_off) == 1:
            put_off.append(asked[1].deferred)
            asked[1].wait("local")

    attempt(tmp_path, epochs=8, inside=inside, every="never", keep_last=99)
    assert put_off == ["the previous save is still being written", ""]
    tagged = {c.manifest.tags[0]: c.manifest.cursor for c in catalog(tmp_path) if c.manifest.tags}
    assert tagged["asked-at-2"].micro_batches == 3
    assert 8 < tagged["asked-at-4"].micro_batches < 40


def test_a_save_that_is_put_off_to_the_end_is_taken_there(tmp_path, released):
    asked = []

    def inside(ckpt, _):
        if ckpt.cursor.micro_batches in (2, 4):
            asked.append(ckpt.save(tag=f"t{ckpt.cursor.micro_batches}"))
        elif ckpt.cursor.micro_batches == 9:
            threading.Timer(0.5, released.set).start()

    attempt(tmp_path, epochs=2, inside=inside, every="never", keep_last=1)
    assert [each.wait("local").error for each in asked] == [None, None]
    (last,) = [c for c in catalog(tmp_path) if "t4" in c.manifest.tags]
    assert last.manifest.cursor.micro_batches == 10


def test_neither_training_nor_a_save_waits_for_old_ones_to_be_pruned(tmp_path, monkeypatch):
    pruning, may_prune, removing = threading.Event(), threading.Event(), LocalTier.remove_folder

    def slow(self, *arguments, **keywords):
        pruning.set()
        assert may_prune.wait(HANGS_S)
        removing(self, *arguments, **keywords)

    monkeypatch.setattr(LocalTier, "remove_folder", slow)
    saves = []

    def inside(ckpt, _):
        number = ckpt.cursor.micro_batches
        if number in (2, 5, 8):
            saves.append(ckpt.save())
        elif number in (4, 7, 10):
            saves[-1].wait("local")
        elif number == 11:
            assert pruning.wait(HANGS_S)
            may_prune.set()

    attempt(tmp_path, epochs=4, inside=inside, every="never", keep_last=1)
    assert len({each.snapshot for each in saves}) == 3
    assert len(usable(tmp_path)) == 1

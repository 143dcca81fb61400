"""What an attempt's record tells of its saves, and that real saves are told."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from tests.cli.test_pause import wait_for
from trainckpt import Checkpointer
from trainckpt.attempt.save_recorder import REMEMBERED, SaveRecorder
from trainckpt.format.save_history import MOST_NOT_SAVED, SAVES, SaveRow, parse_history
from trainckpt.snapshot.attempt_history import read_attempt
from trainckpt.storage.local import LocalTier


def committed(recorder, number, **facts):
    row = SaveRow(snapshot=f"s{number}~1.{number}", at=1e9 + number, num_bytes=10, **facts)
    recorder.note_commit(row, time.monotonic() - 5.0)


def test_an_arrival_is_noted_in_the_row_that_has_the_snapshot():
    recorder = SaveRecorder()
    assert recorder.to_json() == {}
    for number in range(1, 150):
        committed(recorder, number)
    recorder.note_arrival("s149~1.149", "s3")
    recorder.note_arrival("s140~1.140", "s3")
    recorder.note_arrival("s1~1.1", "s3")  # forgotten by now
    recorder.note_arrival("s9~7.1", "s3")  # of another attempt
    history = parse_history(recorder.to_json())
    assert history.committed == sum(row.count for row in history.rows) == 149
    assert history.num_bytes == 1490
    arrived = {row.snapshot: row.copies for row in history.rows if row.copies}
    assert arrived.keys() == {"s149~1.149", "s140~1.140"}
    assert all(5.0 <= copies["s3"] < 60 for copies in arrived.values())
    assert REMEMBERED > 9


def test_a_copy_that_fails_again_and_again_is_one_entry_and_every_try_counts():
    recorder = SaveRecorder()
    for _ in range(7):
        recorder.note_not_kept("s1~1.1", "not copied", "token=abc123 was refused", "s3")
    recorder.note_not_kept("s2~1.2", "skipped", "too soon")
    history = parse_history(recorder.to_json())
    assert (history.not_copied, history.skipped, len(history.not_kept)) == (7, 1, 2)
    assert "abc123" not in history.not_kept[0].reason
    for number in range(100):
        recorder.note_not_kept(f"s{number}~1.{number + 1}", "failed", "x" * 9999)
    history = parse_history(recorder.to_json())
    assert (history.failed, len(history.not_kept)) == (100, MOST_NOT_SAVED)
    recorder.begin_anew()
    assert recorder.to_json() == {}


def test_copies_to_two_tiers_that_fail_in_turns_are_two_entries():
    recorder = SaveRecorder()
    recorder.note_not_kept("s1~1.1", "skipped", "too soon")
    for _ in range(30):
        recorder.note_not_kept("s2~1.2", "not copied", "down", "s3")
        recorder.note_not_kept("s2~1.2", "not copied", "down\nas well", "gcs")
    history = parse_history(recorder.to_json())
    assert (history.skipped, history.not_copied) == (1, 60)
    assert [each.tier for each in history.not_kept] == ["", "s3", "gcs"]
    assert history.not_kept[-1].reason == "down as well"


def test_after_a_restore_from_a_dump_copies_of_the_attempt_before_are_left_out():
    recorder = SaveRecorder()
    committed(recorder, 1)
    recorder.begin_anew()
    recorder.note_commit(SaveRow(snapshot="s3~2.1", at=1e9), time.monotonic())
    recorder.note_arrival("s1~1.1", "s3")
    (row,) = parse_history(recorder.to_json()).rows
    assert (row.snapshot, row.copies) == ("s3~2.1", {})


def test_real_saves_are_in_the_record_with_their_stages_sizes_and_failures(tmp_path):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    run, far = tmp_path / "run", tmp_path / "far"
    with Checkpointer(
        run, model=model, optimizer=optimizer, every="never", tiers=str(far), keep_last=2
    ) as ckpt:
        ckpt.boundary()
        for number in range(4):
            handle = ckpt.save()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            ckpt.boundary()
            handle.wait("durable")
            if number == 2:
                (run / "snapshots").rename(run / "aside")
                (run / "snapshots").write_text("no folder")
                lost = ckpt.save()
                ckpt.boundary()
                wait_for(lambda lost=lost: lost.ended)
                (run / "snapshots").unlink()
                (run / "aside").rename(run / "snapshots")
    history = parse_history(read_attempt(LocalTier(run), 1).facts[SAVES])
    assert (history.committed, history.failed, history.skipped) == (5, 1, 0), "4 and the final one"
    assert [row.count for row in history.rows] == [1] * 5
    tier = ckpt._listener.live_status().uploads[0].tier
    for row in history.rows[:-1]:
        assert 0 < row.stall_s <= row.local_s
        assert row.copies[tier] >= row.local_s
        assert row.num_bytes > 64 * 64 * 4
    assert history.rows[-1].stall_s is None, "the final save delays no training"
    assert history.num_bytes == pytest.approx(sum(row.num_bytes for row in history.rows))
    assert history.not_kept[0].how == "failed"
    assert "snapshots" in history.not_kept[0].reason

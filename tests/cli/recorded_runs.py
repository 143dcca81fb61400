"""Runs made of records alone: as many attempts and saves as a test needs, without training them."""

from __future__ import annotations

import time
from dataclasses import replace

from trainckpt.attempt.save_recorder import SaveRecorder
from trainckpt.format.attempt_record import ENDED, AttemptRecord
from trainckpt.format.attempt_times import TIMES, AttemptTimes, CommitMark, TrainedCount
from trainckpt.format.save_history import SAVES, SaveRow
from trainckpt.snapshot import attempt_history
from trainckpt.storage.local import LocalTier

T = 1_795_000_000.0
STEP_S, SAVE_EVERY = 0.5, 20


def record_run(folder, *, attempts=3, saves=10, last="finished", reason="out of memory", **facts):
    """Record a run whose attempts are killed, but for the last one; returns its folder.

    Args:
        folder: Where.
        attempts, saves: How many, and how many saves in each.
        last: Outcome of the last one.
        reason: Why the others were killed.
        facts: Of each record.
    """
    tier = LocalTier(folder)
    attempt_history.found_run(tier)
    began, step, parent = T, 0, None
    for number in range(1, attempts + 1):
        outcome = "killed" if number < attempts else last
        record, began, step = _attempt(
            number, outcome, began=began, step=step, saves=saves, reason=reason
        )
        record = replace(record, parent=parent, facts={**record.facts, **facts})
        assert tier.create(attempt_history.record_key(number), record.dump())
        parent = record.newest_commit
    return folder


def _attempt(number, outcome, *, began, step, saves, reason):
    recorder, rows = SaveRecorder(), []
    for index in range(1, saves + 1):
        rows.append(
            SaveRow(
                snapshot=f"s{step + index * SAVE_EVERY}~{number}.{index}",
                at=began + 8 + index * SAVE_EVERY * STEP_S,
                stall_s=0.012 + 0.002 * (index % 5),
                memory_s=0.3,
                local_s=1.5 + 0.1 * (index % 7),
                copies={"s3": 4.0 + 0.5 * (index % 3)} if index % 4 == 0 else {},
                num_bytes=250_000_000 + 1_000_000 * (index % 9),
                reached_bytes=1_000_000_000,
            )
        )
        recorder.note_commit(rows[-1], time.monotonic())
    committed = step + saves * SAVE_EVERY
    reached = committed + SAVE_EVERY // 2
    trained_s = (reached - step) * STEP_S
    times = AttemptTimes(
        began=began,
        seconds=8 + trained_s + 2,
        trains_at=8.0,
        leaves_at=8 + trained_s if outcome != "killed" else None,
        restore_s=3.0 if number > 1 else 0.0,
        save_s=0.016 * saves,
        saves=saves,
        begun=TrainedCount(step, step),
        reached=TrainedCount(reached, reached),
        committed=CommitMark(TrainedCount(committed, committed), trained_s - 5.0),
    )
    body = {
        "outcome": outcome,
        "reason": reason if outcome == "killed" else "final",
        "snapshot": rows[-1].snapshot if rows else None,
        "seconds": times.seconds,
        "exit_code": 137 if outcome == "killed" else 0,
    }
    record = AttemptRecord(
        number,
        state=ENDED,
        outcome=body,
        newest_commit=rows[-1].snapshot if rows else None,
        facts={
            "started": began,
            "world": 8,
            "hosts": ["node1", "node2"],
            TIMES: times.to_json(),
            SAVES: recorder.to_json(),
        },
    )
    return record, began + times.seconds + 30, committed

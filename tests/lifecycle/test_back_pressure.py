"""A save that would wait for the one before it is skipped; one that was asked for is not."""

from __future__ import annotations

import threading

from tests.lifecycle.training import attempt
from trainckpt.lifecycle import saver
from trainckpt.tiers.local import LocalTier


def test_training_goes_on_while_a_save_is_written_and_what_is_due_meanwhile_is_skipped(
    tmp_path, monkeypatch, caplog
):
    """The first save cannot end before the sixth step; the second, third and so on are due."""
    monkeypatch.setattr(saver, "PATIENCE_S", 0.0)
    released, writing = threading.Event(), LocalTier.write_parts

    def slow(self, key, *arguments):
        if "s1~1.1" in key:
            assert released.wait(60.0)
        writing(self, key, *arguments)

    monkeypatch.setattr(LocalTier, "write_parts", slow)
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

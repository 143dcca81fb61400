"""Sweep: it deletes what the run's own policy would, and no more than it was asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.snapshot.written import committed, written
from trainckpt.format.attempt_record import AttemptRecord
from trainckpt.format.names import SnapshotName
from trainckpt.snapshot.catalog import ABANDONED, NOT_COMMITTED, Candidate, read_catalog
from trainckpt.snapshot.prune import plan_prune, plan_sweep
from trainckpt.storage.local import LocalTier


@given(st.data())
def test_nothing_goes_that_must_stay_and_all_goes_that_the_runs_own_policy_deletes(data):
    names = data.draw(
        st.lists(st.builds(SnapshotName, *[st.integers(1, 4)] * 2, *[st.integers(0, 3)] * 2))
    )
    found = [
        Candidate(name, None, usable=not (why := data.draw(st.sampled_from(WHY))), reason=why)
        for name in sorted(set(names), reverse=True)
    ]
    live, keep = data.draw(st.sets(st.integers(1, 4))), data.draw(st.integers(1, 3))
    abandoned = data.draw(st.booleans())
    plan = plan_sweep(found, keep_last=keep, live=live, abandoned=abandoned)
    gone = {doomed.name for doomed in plan}
    usable = [c.name for c in found if c.usable]
    assert not gone & set(usable[:keep])
    for candidate in found:
        if candidate.reason == NOT_COMMITTED:
            assert (candidate.name in gone) == (candidate.name.attempt not in live)
        if candidate.reason == ABANDONED:
            assert (candidate.name in gone) == abandoned
        if candidate.reason == "damaged":
            assert candidate.name not in gone
    newest = max((n.attempt for n in names), default=1)
    if not live - {newest}:
        assert set(plan_prune(found, keep_last=keep, attempt=newest)) <= gone


WHY = ["", NOT_COMMITTED, ABANDONED, "damaged"]


def test_tags_and_names_that_are_given_are_kept(tmp_path):
    tier = LocalTier(tmp_path)
    for text in ("s1~1.1", "s2~1.2", "s3~1.3", "s4~1.4"):
        committed(tier, text, ("best",) if text == "s1~1.1" else ())
    written(tier, "s5~1.5")
    found = read_catalog(tier, "run", {1: AttemptRecord(1, None)})
    plan = plan_sweep(found, keep_last=1, keep=["s2~1.2"])
    assert [(str(d.name), d.reason.split(":")[0]) for d in plan] == [
        ("s5~1.5", "not committed"),
        ("s3~1.3", "older than the 1 kept"),
    ]

"""Where a proof interrupts a run, as a value: spread out, inside windows, each place once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainckpt.prove.proof import Stop, plan_stops


def cursors(micro_batches: int, accumulate: int, epoch: int = 10**9) -> list[dict]:
    """Boundaries of a run; the end of an epoch and the beginning of the next are two."""
    found = []
    for at in range(micro_batches + 1):
        cursor = {"micro_batches": at, "step": at // accumulate, "micro": at % accumulate}
        if at and at % epoch == 0:
            found.append({**cursor, "batches": epoch})
        found.append({**cursor, "batches": at % epoch})
    return found


runs = st.builds(
    cursors, st.integers(2, 60), st.integers(1, 8), st.integers(1, 12)
)  # with and without accumulation, epochs shorter and longer than a window


@given(runs, st.integers(1, 10), st.integers(1, 4))
def test_stops_fall_in_order_inside_the_run_and_inside_windows(run, stops, ranks):
    """Never before the first micro-batch nor after the last; a window's inside if there is one."""
    planned = plan_stops(run, stops, ranks)
    last = run[-1]["micro_batches"]
    places = {c["micro_batches"]: c for c in run if 0 < c["micro_batches"] < last}
    has_windows = any(c["micro"] for c in places.values())
    assert [stop.at for stop in planned] == sorted({stop.at for stop in planned})
    for stop in planned:
        assert (stop.step, stop.micro) == (places[stop.at]["step"], places[stop.at]["micro"])
        assert stop.micro > 0 or not has_windows
        assert 0 <= stop.rank < ranks


@given(runs, st.integers(1, 10), st.integers(1, 4))
def test_as_many_stops_as_there_is_room_for(run, stops, ranks):
    """No place is wasted: fewer stops than asked for only where there are no more places."""
    last = run[-1]["micro_batches"]
    places = {c["micro_batches"] for c in run if 0 < c["micro_batches"] < last}
    inside = {c["micro_batches"] for c in run if c["micro"]} & places
    assert len(plan_stops(run, stops, ranks)) == min(stops, len(inside or places))


@given(runs, st.integers(1, 10), st.integers(1, 4))
def test_the_last_of_several_is_a_kill(run, stops, ranks):
    """One stop is a SIGTERM, since a proof of nothing but a crash would show no orderly stop."""
    signals = [stop.signal for stop in plan_stops(run, stops, ranks)]
    expected = ["SIGTERM"] * len(signals)
    if len(signals) > 1:
        expected[-1] = "SIGKILL"
    assert signals == expected


def test_a_worked_example():
    """Twelve micro-batches in windows of three, three stops on two ranks."""
    assert plan_stops(cursors(12, 3), 3, 2) == [
        Stop(at=2, step=0, micro=2, signal="SIGTERM", rank=1),
        Stop(at=5, step=1, micro=2, signal="SIGTERM", rank=0),
        Stop(at=8, step=2, micro=2, signal="SIGKILL", rank=1),
    ]


@given(runs, st.integers(1, 10), st.integers(1, 4))
def test_stops_fall_on_an_end_of_a_pass_only_where_there_are_no_other_places(run, stops, ranks):
    ends = {c["micro_batches"] for c in run if not c["batches"]}
    planned = {stop.at for stop in plan_stops(run, stops, ranks)}
    last = run[-1]["micro_batches"]
    has_windows = any(c["micro"] for c in run if 0 < c["micro_batches"] < last)
    free = {c["micro_batches"] for c in run if c["micro"] or not has_windows} - ends - {0, last}
    assert not planned & ends or len(free) < len(planned)


@pytest.mark.parametrize("stops", [1, 2, 3, 5])
@pytest.mark.parametrize("passes", [2, 3, 4])
@pytest.mark.parametrize("accumulate", [1, 3, 4])
def test_a_stop_in_order_falls_into_a_pass_after_the_first(stops, passes, accumulate):
    """A script that counts its epochs from 0 again goes on rightly after one in the first."""
    planned = plan_stops(cursors(passes * 32, accumulate, 32), stops, 1)
    assert any(stop.at > 32 and stop.at % 32 for stop in planned if stop.signal == "SIGTERM")

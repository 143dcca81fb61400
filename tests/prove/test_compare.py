"""Two records, and the first difference between them: pure, so every case is a few lines."""

from __future__ import annotations

import json

import pytest

from trainckpt.prove.compare import (
    BATCH,
    Difference,
    boundaries,
    first_difference,
    num_lost,
    read_records,
    unrepeated,
    unseeded,
)

LAST = 6


def digest(text: str) -> str:
    return f"{text:x>32}"


def state(at: int, *, in_pass: bool = True, evaluation: int = 0, **changes: str | None) -> tuple:
    parts = {"rng/torch": f"uint8[5056] {digest(f'rng{at}')}", "scheduler.last_epoch": str(at)}
    parts.update({key.replace("__", "/"): value for key, value in changes.items()})
    cursor = {"step": at // 3, "micro": at % 3, "micro_batches": at, "evaluations": evaluation}
    entry = {
        "at": at,
        "in_pass": in_pass,
        "cursor": cursor,
        "parts": {name: value for name, value in parts.items() if value is not None},
    }
    return (at, in_pass, evaluation, "state"), entry


def batch(at: int, text: str = "") -> tuple:
    return (at, True, 0, "batch"), {"at": at, "batch": text or f"batch {at}"}


def record(*changed: tuple, start: int = 0, end: int = LAST) -> dict:
    """Boundaries and batches from `start` to `end`, some of them replaced."""
    lines = dict(pair for at in range(start, end + 1) for pair in (state(at), batch(at)))
    del lines[end, True, 0, "batch"]
    return {**lines, **dict(changed)}


STRAIGHT = {0: record(), 1: record()}


def compare(*attempts, **options) -> Difference | None:
    return first_difference(STRAIGHT, attempts, **options)


def test_attempts_that_repeat_and_cover_the_run_are_exact():
    """Micro-batches after the snapshot are trained again after a kill: that is no difference."""
    first, second = record(end=4), record(start=3)
    assert compare({0: first, 1: first}, {0: second, 1: second}) is None


def test_the_first_difference_is_the_earliest_over_ranks_and_attempts():
    """Rank 1 is wrong at 4, rank 0 at 5."""
    found = compare(
        {
            0: record(state(5, rng__torch="uint8[1] " + digest("a"))),
            1: record(state(4, rng__torch="uint8[5056] " + digest("b"))),
        }
    )
    assert found == Difference(rank=1, at=4, step=1, micro=1, parts=("torch RNG",))
    assert str(found) == "differs first at step 1 micro-batch 1 on rank 1: torch RNG"


def test_a_state_is_blamed_before_the_batch_of_the_same_place():
    """Whatever else is wrong with the batch follows from it."""
    wrong = state(4, scheduler="new")
    found = compare({0: record(wrong, batch(4, "other")), 1: record(batch(4, "other"))})
    assert found is not None
    assert (found.rank, found.parts) == (0, ("scheduler (new)",))


def test_another_batch_is_blamed_on_what_the_next_boundary_shows():
    """A worker's generator is known only when its batch has arrived."""
    wrong = {"loader.workers.1.numpy": digest("a"), "gradients/w": "float32[1] " + digest("b")}
    found = compare({0: record(batch(2, "other"), state(3, **wrong)), 1: record()})
    assert found is not None
    assert found.parts == (BATCH, "NumPy RNG of worker 1 (new)")
    assert str(found).endswith(f"on rank 0: {BATCH}; then NumPy RNG of worker 1 (new)")
    assert (found.at, found.step, found.micro) == (2, 0, 2)


def test_a_batch_of_another_place_is_named_by_its_micro_batch_of_the_uninterrupted_run():
    """A loader that begins a pass again, say."""
    found = compare({0: record(batch(4, "batch 1")), 1: record()})
    assert found is not None
    place = "step 0 micro-batch 1 of the uninterrupted run"
    assert found.parts == (f"{BATCH}, those of {place}",)


def test_the_generator_that_follows_from_another_batch_is_not_blamed():
    """Other samples draw otherwise, and with them the main generator goes another way."""
    found = compare({0: record(batch(2, "other"), state(3, rng__torch="other")), 1: record()})
    assert found is not None
    assert found.parts == (BATCH,)


def test_another_batch_without_a_cause_in_the_loader_is_said_to_be_that():
    """The data set depends on something nobody can see, such as the clock."""
    found = compare({0: record(batch(2, "other")), 1: record()})
    assert found is not None
    assert found.parts == (BATCH,)


def test_how_a_part_differs_is_said_where_it_is_short():
    """Types and small values; of digests, only that they differ."""
    straight = {
        0: record(
            state(
                3,
                **{
                    "optimizer/model/w/exp_avg": "float32[4] " + digest("a"),
                    "optimizer/model/w/mask": "bool[4] " + digest("a"),
                    "gradients/model/w": "float32[4] " + digest("a"),
                    "scheduler.last_epoch": "3",
                },
            )
        )
    }
    found = first_difference(
        straight,
        [
            {
                0: record(
                    state(
                        3,
                        **{
                            "optimizer/model/w/exp_avg": "bfloat16[4] " + digest("b"),
                            "optimizer/model/w/mask": "bool[8] " + digest("b"),
                            "scheduler.last_epoch": "0",
                        },
                    )
                )
            }
        ],
    )
    assert found is not None
    assert found.parts == (
        "scheduler: last_epoch (0 instead of 3)",
        "gradient of model/w (missing)",
        "optimizer exp_avg of model/w (bfloat16 instead of float32)",
        "optimizer mask of model/w (bool[8] instead of bool[4])",
    )
    assert str(found).endswith("scheduler: last_epoch (0 instead of 3) (and 3 other parts)")


def test_a_cursor_that_alone_differs_is_named():
    """Counting is state too."""
    key, entry = state(3)
    other = {**entry, "cursor": {**entry["cursor"], "step": 2}}
    found = compare({0: record((key, other)), 1: record()})
    assert found is not None
    assert found.parts[0].startswith("the cursor: {'step': 2")


def test_a_micro_batch_that_no_attempt_trained():
    """The attempts together must be the whole run."""
    found = compare({0: record(end=4), 1: record(end=4)}, {0: record(start=6), 1: record(start=6)})
    assert found is not None
    lost = "a micro-batch that no attempt trained: its samples are lost"
    assert (found.at, found.parts) == (4, (lost,))
    assert num_lost(STRAIGHT, [{0: record(end=4), 1: record(end=4)}]) == 2
    assert num_lost(STRAIGHT, [{0: record(end=3), 1: record()}, {0: record(start=3)}]) == 0


def test_a_pass_that_ends_early_is_named_as_lost_samples():
    """The next one begins where the straight run still was in this one."""
    straight = record(state(4, in_pass=False))  # two passes: of 4 and 2 micro-batches
    early = {**record(end=2), **dict([state(2, in_pass=False), batch(2, "first of the next")])}
    found = first_difference({0: straight}, [{0: early}])
    assert found is not None
    assert found.at == 2
    assert found.parts == (
        "the pass over the data ends 2 micro-batches early: their samples are lost",
    )


def test_a_place_that_the_straight_run_never_came_to():
    """The run went on for longer than it should."""
    found = compare({0: record(), 1: {**record(), **dict([batch(6), state(7)])}})
    assert found is not None
    assert (found.rank, found.at) == (1, 6)
    assert found.parts == ("a micro-batch the straight run does not have",)


def test_the_end_of_an_epoch_and_the_beginning_of_the_next_are_two_boundaries():
    """After equally many micro-batches, with other states; an attempt may stop at either."""
    between = state(3, in_pass=False, rng__torch="uint8[5056] " + digest("between"))
    straight = {0: record(between)}
    first, second = record(end=3), record(between, start=3)
    second = {key: entry for key, entry in second.items() if key != (3, True, 0, "state")}
    assert first_difference(straight, [{0: first}, {0: second}]) is None


def test_evaluations_after_equally_many_micro_batches_are_told_apart():
    """Each entry of an evaluation has a key of its own, and a state of its own."""
    first = state(3, evaluation=1, in_pass=False)
    second = state(3, evaluation=2, in_pass=False, rng__torch="uint8[5056] " + digest("second"))
    straight = {0: record(first, second)}
    assert first_difference(straight, [{0: record(first, second)}]) is None
    found = first_difference(straight, [{0: record(first)}])
    assert found is not None
    assert found.parts == ("a micro-batch that no attempt trained: its samples are lost",)
    assert len(boundaries(straight)) == LAST + 1  # nothing is stopped at an evaluation


def test_what_was_never_seeded_is_left_out_where_nothing_draws_from_it():
    """Main generators only, and their state before the epoch's iterator."""
    seeds = {"rng.python": digest("a"), "loader.rng_before.python": digest("b")}
    others = {"rng.python": digest("c"), "loader.rng_before.python": digest("d")}
    straight = {0: dict([state(0, in_pass=False, **seeds), batch(0), state(1, **seeds)])}
    attempt = {0: dict([state(0, in_pass=False, **others), batch(0), state(1, **others)])}
    left_out = unseeded(straight, attempt)
    assert left_out == {"rng.python"}
    assert first_difference(straight, [attempt], left_out) is None
    assert first_difference(straight, [attempt]) is not None


def test_leaving_out_the_main_generator_does_not_leave_out_the_workers():
    """Workers are seeded by torch; one of theirs that differs is a difference."""
    wrong = state(3, **{"loader.workers.0.python": digest("a")})
    found = compare({0: record(wrong), 1: record()}, leave_out=frozenset({"rng.python"}))
    assert found is not None
    assert found.parts == ("Python RNG of worker 0 (new)",)


SECONDS, PATH = "callback.log.0.seconds", "callback.best.last-v2.ckpt"


def test_values_that_two_straight_runs_do_not_repeat_are_not_compared():
    """A time in one entry of a list stands for the times in all: few digits may be alike."""
    straight = {0: record(state(3, **{SECONDS: "0.1", PATH: "1"}))}
    again = {0: record(state(3, **{SECONDS: "0.2"}))}
    left_out = unrepeated(straight, again)
    assert left_out == {"callback.log.*.seconds", "callback.best.last.ckpt"}
    assert first_difference(straight, [again], left_out) is None
    later = {"callback.log.7.seconds": "0.3", "callback.log.7.loss": "9"}
    found = first_difference(straight, [{0: record(state(3, **later))}], left_out)
    assert found is not None
    assert found.parts == ("callback: log.7.loss (new)",)


@pytest.mark.parametrize(
    "part",
    [
        "rng/torch",
        "parameter/model/w",
        "optimizer.groups.0.options.lr",
        "loader.batches",
        "averaged.w",
        "Adam, which is not tracked",
    ],
)
def test_what_decides_what_is_trained_is_never_left_out(part):
    """If that differs between two straight runs, the script is not deterministic."""
    tensor = "float32[4] " if part == "averaged.w" else ""
    straight = {0: record(state(3, **{part: tensor + digest("a")}))}
    again = {0: record(state(3, **{part: tensor + digest("b")}))}
    assert unrepeated(straight, again) == frozenset()


def test_times_and_rates_in_the_log_of_the_trainer_are_not_compared():
    log = "trainer.state.log_history.0."
    times = {f"{log}eval_runtime": "0.1", f"{log}eval_samples_per_second": "9"}
    assert first_difference({0: record()}, [{0: record(state(3, **times))}]) is None
    wrong = state(3, **times, **{f"{log}eval_loss": "9"})
    found = first_difference({0: record()}, [{0: record(wrong)}])
    assert found is not None
    assert found.parts == ("trainer: state.log_history.0.eval_loss (new)",)


def test_records_are_read_back_but_for_a_line_cut_short(tmp_path):
    """A kill may fall into a write."""
    lines = [entry for _, entry in (state(0, in_pass=False), batch(0), state(1))]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "rank0.jsonl").write_text(text + json.dumps(batch(1)[1])[:9])
    records = read_records(tmp_path)
    assert list(records) == [0]
    assert list(records[0]) == [
        (0, False, 0, "state"),
        (0, True, 0, "batch"),
        (1, True, 0, "state"),
    ]

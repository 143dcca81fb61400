"""Programs written from the README alone, stopped and resumed: exact, or the resume says why not.

Each runs in processes of its own. After a stop at a micro-batch, the log of all attempts together
is that of the uninterrupted run, line by line, and no message doubts it. Otherwise a line that the
uninterrupted run does not print says that the resume is not exact, or refuses it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SAVED, REFUSED = 75, 78
DOUBT = re.compile(r"not bitwise|not exact|[Ww]arning: |has not changed|; next: ")


class Run:
    """The attempts of one program in one folder, with the log that they share."""

    def __init__(self, folder, program):
        folder.mkdir()
        self._folder, self._program = folder, program
        self.codes, self.texts = [], []

    def attempt(self, stop="", command=()):
        """Run the program until line `stop` of its log, or to its end; return the exit code."""
        done = subprocess.run(
            [sys.executable, *command, str(PROGRAMS / f"{self._program}.py")],
            cwd=self._folder,
            env=self._environment(stop),
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        self.codes.append(done.returncode)
        self.texts.append(done.stdout + done.stderr)
        return done.returncode

    def _environment(self, stop):
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TRAINING_LOG": str(self._folder / "log"),
            "STOP_AFTER": str(stop),
            "ATTEMPT": str(len(self.codes)),
            "TRAINCKPT_EVERY": "4 steps",
            "TRAINCKPT_STOP_AT": "micro-batch",
        }

    @property
    def lines(self):
        log = self._folder / "log"
        return log.read_text(encoding="utf-8").splitlines() if log.exists() else []

    def doubts(self):
        """Return the lines that call a resume inexact, or refuse it."""
        lines = [line for text in self.texts for line in text.splitlines()]
        return [line for line in lines if DOUBT.search(line)]

    def hints(self):
        """Return the lines that help where a count of batches is used: no doubt of a resume."""
        lines = [line for text in self.texts for line in text.splitlines()]
        return [line for line in lines if "trainckpt: hint: " in line]


def must_end(run, codes, **attempt):
    """Run an attempt. Another end is a failure also of a test that is expected to fail."""
    if run.attempt(**attempt) not in codes:
        pytest.fail(f"ended with {run.codes[-1]}, not {codes}:\n{run.texts[-1]}")


def straight(folder, program):
    run = Run(folder / "straight", program)
    must_end(run, (0,))
    return run


def stopped(folder, program, stops):
    run = Run(folder / "stopped", program)
    for stop in stops:
        must_end(run, (SAVED, REFUSED) if run.codes[1:] else (SAVED,), stop=stop)
    must_end(run, (0, REFUSED))
    return run


def difference(whole, parts):
    """Return the number of the first line that differs, and what the attempts printed."""
    same = 0
    for one, other in zip(whole.lines, parts.lines, strict=False):
        if one != other:
            break
        same += 1
    counts = f"line {same + 1} of {len(whole.lines)} ({len(parts.lines)} with stops)"
    return "\n".join([counts, *parts.texts])


def case(program, *stops, cause="", still=""):
    """A program, the lines after which it stops, the cause that a resume names, the open miss."""
    marks = [pytest.mark.xfail(strict=True, reason=still, raises=AssertionError)] if still else []
    name = "-".join([program, *map(str, stops)])
    return pytest.param(program, stops, cause, marks=marks, id=name)


@pytest.mark.parametrize(
    ("program", "stops", "cause"),
    [
        case("generator_in_dataclass", 3, 9),
        case("generator_in_closure", 3, 9),
        case("generator_in_helper_of_module", 3, 9),
        case("generators_in_dict", 3, 9),
        case("generator_in_environment", 3, 9),
        case("generator_in_attributes", 3, 9),
        case("global_generator_of_dataset", 3, 9),
        case("transformers_callback_with_helper", 3, 9),
        case("draws_at_head_of_epoch", 3, 9),
        case("order_drawn_without_loader", 3, 9),
        case("weights_set_by_loop", 3, cause="sampler.weights"),
        case("weights_set_by_loop", 9, cause="sampler.weights"),
        case("indices_set_by_loop", 6, cause="sampler.indices"),
        case("sampler_that_counts_passes", 6, cause="sampler.rounds"),
        case("window_sampler_on_the_global_generator", 3, cause="Window"),
        case("window_sampler_on_the_global_generator", 6),
        case("batch_size_tracked_and_grown", 16, cause="Growing"),
        case("batch_size_tracked_and_grown", 1, 18),
        case("batch_size_tracked_and_grown", 19),
        case("two_optimizers_in_turn", 5),
        case("depth_set_at_head_of_epoch", 3, 9),
        case("shuffled_datapipe", 3, 9),
        case("draw_before_next", 3, 9, cause="random numbers"),
        case("untracked_loaders_with_boundary", 3, 9, cause="untracked loaders"),
        case("dataset_epoch_with_persistent_workers", 9),
        case("generator_made_in_worker", 3, 9, cause="dataset.rng cannot be put back"),
        case("plain_tensor_of_module", 3, 9),
        case("lightning_plain_tensor", 3, 9),
        case("random_features_without_seed", 3),
        case("split_without_seed", 3, cause="dataset.indices differs"),
        case("files_in_another_order", 3, cause="dataset.tensors differs"),
        case("labels_set_by_loop", 3),
        case("labels_set_by_loop", 9, cause="dataset.labels was replaced or written"),
        case("two_passes_an_epoch", 3, 9, 15),
        case("enumerate_to_accumulate", 3, cause="hint: enumerate counts the batches of epoch 0"),
        case("zip_with_a_range", 3, cause="hint: zip counts the batches of epoch 0"),
        case("prefetching_generator", 3, cause="not as when it was saved: before"),
        case(
            "prefetcher_of_a_class",
            3,
            still="documented: the batch inside a prefetcher of a class counts as trained",
        ),
        case(
            "learning_rate_by_plain_object",
            3,
            cause="hint: variables of the script are not restored, and these are not as when it "
            "was saved: schedule.count",
        ),
        case("teacher_not_passed", 3, cause="not as when it was saved: teacher"),
        case("carried_in_variables", 3, 9, cause="not as when it was saved: hidden"),
        case("printed_in_variables", 3, 9),
    ],
)
def test_a_resume_trains_the_same_or_says_that_it_does_not(tmp_path, program, stops, cause):
    whole = straight(tmp_path, program)
    parts = stopped(tmp_path, program, stops)
    said = [line for line in parts.doubts() if line not in whole.doubts()]
    if parts.lines == whole.lines:
        assert said == []
    else:
        named = parts.hints() if cause.startswith("hint: ") else said
        assert any(cause in line for line in named), difference(whole, parts)


def test_variables_that_are_only_printed_are_not_spoken_of(tmp_path):
    whole = straight(tmp_path, "matrix_printed_each_epoch")
    parts = stopped(tmp_path, "matrix_printed_each_epoch", [3])
    assert parts.lines == whole.lines
    assert "this resume is bitwise" in parts.texts[-1]
    assert parts.hints() == []


def test_a_chain_of_datapipes_that_is_exact_is_not_doubted(tmp_path):
    assert straight(tmp_path, "shuffled_datapipe").doubts() == []


def test_a_save_that_no_start_can_use_is_named_when_it_is_made(tmp_path):
    run = Run(tmp_path / "stopped", "model_replaced_in_training")
    must_end(run, (SAVED,), stop=9)
    assert run.doubts() != []


def test_a_thread_that_reads_batches_is_refused_by_name(tmp_path):
    run = Run(tmp_path / "straight", "batches_read_by_a_thread")
    assert run.attempt() == 0 or "ConfigurationError" in run.texts[-1]


def test_steps_of_an_optimizer_inside_another_one_count_for_periodic_saves(tmp_path):
    run = straight(tmp_path, "optimizer_without_step")
    assert run.texts[-1].count("trainckpt: saved") > 1 or run.doubts() != []


def test_a_proof_of_two_loaders_names_no_generator_that_the_program_never_uses(tmp_path):
    run = Run(tmp_path / "proof", "draw_before_next")
    must_end(run, (0, 1), command=["-m", "trainckpt", "prove", "--stops", "1", "--"])
    assert "not deterministic" not in run.texts[-1]

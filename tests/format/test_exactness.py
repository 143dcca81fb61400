"""One word for a whole resume: of its weakest part, naming it."""

from __future__ import annotations

import pytest

from trainckpt.format.exactness import How, Restored, decide

CHECKED = Restored("model", How.CHECKED)
THREADS = Restored("threads", How.NOT_KEPT, "threads was 1, is 2")
BETWEEN = Restored("loader", How.INFERRED, "where the next pass begins is inferred")
AGAIN = Restored("loader", How.REPLAYED, "12 batches are loaded again")
OWN = Restored("loader", How.OWN_STATE, "StatefulDataLoader's own state")
ANOTHER = Restored("loader.1", How.OWN_STATE, "Nodes's own state")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([], "bitwise"),
        ([CHECKED], "bitwise"),
        ([CHECKED, AGAIN], "replayed and compared (loader)"),
        ([AGAIN, OWN], "as exact as StatefulDataLoader's own state (loader)"),
        (
            [OWN, ANOTHER],
            "as exact as StatefulDataLoader's own state (loader) and Nodes's own state (loader.1)",
        ),
        ([BETWEEN, OWN], "same data, not bitwise: loader"),
        ([OWN, THREADS, CHECKED], "same data, not bitwise: threads"),
    ],
)
def test_the_weakest_part_gives_the_word_and_is_named(parts, line):
    assert decide(parts).line == line


def test_a_record_has_the_word_without_names_unless_they_are_part_of_it():
    assert decide([THREADS]).word == "same data, not bitwise"
    assert decide([OWN]).word == decide([OWN]).line


def test_each_reason_against_bitwise_is_given_once_the_weakest_first():
    found = decide([BETWEEN, OWN, THREADS, THREADS])
    assert found.reasons == [THREADS.reason, BETWEEN.reason]
    assert found.weaker == (THREADS, BETWEEN, OWN)


def test_a_word_names_three_parts_and_counts_the_others():
    parts = [Restored(name, How.NOT_KEPT, f"{name} was 1, is 2") for name in "abcde"]
    assert decide(parts).line == "same data, not bitwise: a, b, c and 2 more"


@pytest.mark.parametrize("part", [CHECKED, THREADS, BETWEEN, AGAIN, OWN], ids=lambda p: p.how.name)
def test_a_part_is_the_same_after_a_record(part):
    assert Restored.from_json(part.to_json()) == part

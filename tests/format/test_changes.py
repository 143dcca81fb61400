"""Changes of a script: choices by kind, and the table of differences."""

from __future__ import annotations

import pytest

from trainckpt.format.changes import KINDS, Change, choice_by_kind, parse_choices, table


def test_each_kind_has_its_default_until_another_is_chosen():
    assert choice_by_kind() == {kind: allowed[0] for kind, allowed in KINDS.items()}
    text = "learning rate: script, dropout:refuse"
    chosen = {"learning rate": "script", "dropout": "refuse"}
    assert parse_choices(text) == parse_choices(chosen) == tuple(chosen.items())
    assert choice_by_kind(parse_choices(text)) == choice_by_kind() | chosen


@pytest.mark.parametrize(
    "text",
    ["rate: script", "learning rate", "sampler: snapshot", "dropout: script, dropout: refuse", 3],
)
def test_a_choice_that_there_is_not_is_no_choice(text):
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_choices(text)


def test_the_table_is_aligned_and_a_change_survives_json():
    changes = [
        Change("learning rate", "optimizer lr", "0.1", "0.5", "snapshot"),
        Change("dropout", "model.p", "0.25", "0.3", "script"),
    ]
    assert table(changes).splitlines() == [
        "  kind           name          snapshot  script  used",
        "  learning rate  optimizer lr  0.1       0.5     snapshot",
        "  dropout        model.p       0.25      0.3     script",
    ]
    assert [Change.from_json(each.to_json()) for each in changes] == changes
    assert [each.trains_otherwise for each in changes] == [False, True]

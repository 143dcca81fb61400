"""`trainckpt config`: every option, its value, and where it came from."""

from __future__ import annotations

import json

import pytest

from trainckpt.attempt.options import TABLE
from trainckpt.cli.main import main


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A working directory without a file, an environment without options."""
    monkeypatch.chdir(tmp_path)
    for name in TABLE:
        monkeypatch.delenv(f"TRAINCKPT_{name.upper()}", raising=False)


def config(capsys) -> dict[str, dict]:
    """The options as JSON, by name."""
    assert main(["config", "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["options"]}


def test_a_misspelt_variable_is_named_beside_the_table(capsys, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_KEEPLAST", "3")
    assert main(["config"]) == 0
    assert "TRAINCKPT_KEEP_LAST is the option's name" in capsys.readouterr().err


def test_every_option_of_the_table_is_there_with_its_default(capsys):
    found = config(capsys)
    assert list(found) == list(TABLE)
    assert {row["origin"] for row in found.values()} == {"default"}
    assert {name: row["default"] for name, row in found.items()} == {
        name: entry[0] for name, entry in TABLE.items()
    }
    assert {name: row["value"] for name, row in found.items()} == {
        name: entry[0] for name, entry in TABLE.items()
    }


def test_the_origin_of_each_value_is_named(capsys, tmp_path, monkeypatch):
    (tmp_path / "trainckpt.toml").write_text('every = "7 steps"\nkeep_last = 5\n')
    monkeypatch.setenv("TRAINCKPT_KEEP_LAST", "9")
    found = config(capsys)
    assert (found["every"]["value"], found["every"]["origin"]) == ("7 steps", "trainckpt.toml")
    assert (found["keep_last"]["value"], found["keep_last"]["origin"]) == (9, "TRAINCKPT_KEEP_LAST")
    assert found["resume"]["origin"] == "default"
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if " keep_last " in line)
    assert row.split()[:3] == ["keep_last", "9", "TRAINCKPT_KEEP_LAST"]
    for name in TABLE:
        assert f"TRAINCKPT_{name.upper()}" in shown


def test_a_value_that_cannot_be_read_is_78_and_says_where_it_stands(capsys, monkeypatch):
    monkeypatch.setenv("TRAINCKPT_EVERY", "sometimes")
    assert main(["config", "--json"]) == 78
    told = json.loads(capsys.readouterr().out)
    assert "every='sometimes' (TRAINCKPT_EVERY)" in told["error"]

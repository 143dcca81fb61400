"""Options: argument, variable, file, default; what is unreadable is refused with its origin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainckpt.attempt.options import TABLE, Every, misspelled_variables, read_options
from trainckpt.errors import ConfigurationError


def test_the_defaults():
    options = read_options({}, {})
    assert options.every == Every(seconds=600, text="10 min")
    assert (options.keep_last, options.stop_at, options.on_stop) == (3, "auto", "exit")
    assert (options.exit_code, options.resume) == (75, "auto")
    assert set(options.origins.values()) == {"default"}
    assert options.origins.keys() == TABLE.keys()


def test_an_argument_goes_before_a_variable_before_the_file_before_the_default(tmp_path):
    (tmp_path / "trainckpt.toml").write_text('keep_last = 7\nexit_code = 85\nevery = "1 h"\n')
    environment = {"TRAINCKPT_KEEP_LAST": "8", "TRAINCKPT_EXIT_CODE": "86"}
    options = read_options({"keep_last": 9}, environment, tmp_path)
    assert (options.keep_last, options.exit_code, options.every.seconds) == (9, 86, 3600)
    assert options.origins["keep_last"] == "argument"
    assert options.origins["exit_code"] == "TRAINCKPT_EXIT_CODE"
    assert options.origins["every"] == "trainckpt.toml"
    assert options.origins["resume"] == "default"


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("100 steps", Every(steps=100, text="100 steps")),
        ("1step", Every(steps=1, text="1step")),
        ("30 s", Every(seconds=30, text="30 s")),
        ("1.5 min", Every(seconds=90, text="1.5 min")),
        ("2 h", Every(seconds=7200, text="2 h")),
        ("never", Every()),
    ],
)
def test_intervals(text, every):
    assert read_options({"every": text}, {}).every == every


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", "often"),
        ("every", "0 steps"),
        ("every", "1.5 steps"),
        ("every", "-1 min"),
        ("every", "0 s"),
        ("every", "10"),
        ("every", 10),
        ("keep_last", 0),
        ("keep_last", "many"),
        ("keep_last", True),
        ("stop_at", "boundary"),
        ("grace", "soon"),
        ("grace", 0),
        ("accumulate", 0),
        ("memory_budget", "much"),
        ("memory_budget", "0 %"),
        ("on_stop", "ignore"),
        ("exit_code", 0),
        ("exit_code", 256),
        ("resume", "maybe"),
        ("redundancy", "xor:1"),
        ("redundancy", "twice"),
        ("memory_every", "10 s"),
        ("memory_every", "auto"),
        ("survivors", "always"),
        ("survivors", "0 s"),
    ],
)
def test_what_is_unreadable_is_refused_with_what_to_type(name, value):
    with pytest.raises(ConfigurationError, match=rf"{name}=.*\(argument\) is not an option") as no:
        read_options({name: value}, {})
    assert no.value.hint.startswith("use ")
    with pytest.raises(ConfigurationError, match=rf"\(TRAINCKPT_{name.upper()}\)"):
        read_options({}, {f"TRAINCKPT_{name.upper()}": "?"})


@pytest.mark.parametrize("text", ["keep_lats = 3", "keep_last = ", "\0", "[trainckpt]\nx = 1"])
def test_a_file_with_a_misspelled_or_broken_line_is_refused(tmp_path, text):
    (tmp_path / "trainckpt.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=r"trainckpt\.toml"):
        read_options({}, {}, tmp_path)


@pytest.mark.parametrize("value", ["model/frozen.*, head.*", ["model/frozen.*", "head.*"]])
def test_tensors_to_leave_out_are_globs_with_commas_or_a_list(value, tmp_path):
    assert read_options({"exclude": value}, {}).exclude == ("model/frozen.*", "head.*")
    assert read_options({"exclude": "none"}, {}).exclude == ()
    (tmp_path / "trainckpt.toml").write_text('exclude = ["a.*"]\ninit_from = "none"\n')
    found = read_options({}, {}, tmp_path)
    assert (found.exclude, found.init_from) == (("a.*",), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("exclude", "a,,b"), ("exclude", 3), ("exclude", ["a", 3]), ("init_from", 3)],
)
def test_what_names_neither_tensors_nor_a_run_is_refused(name, value):
    with pytest.raises(ConfigurationError, match=rf"{name}=.*\(argument\) is not an option"):
        read_options({name: value}, {})


def test_a_variable_that_looks_like_an_option_and_is_none_is_named_with_the_one_meant():
    """Not those of somebody else, nor those that are read elsewhere."""
    environment = {
        "TRAINCKPT_KEEPLAST": "3",
        "TRAINCKPT_EVRY": "1 h",
        "TRAINCKPT_MEMORY": "none",
        "TRAINCKPT_MY_OWN": "1",
        "TRAINCKPT_EVERY": "1 h",
        "EVRY": "x",
    }
    assert misspelled_variables(environment) == [
        "TRAINCKPT_EVRY is not read: TRAINCKPT_EVERY is the option's name",
        "TRAINCKPT_KEEPLAST is not read: TRAINCKPT_KEEP_LAST is the option's name",
    ]


def test_no_variable_that_is_read_anywhere_passes_for_a_misspelt_one():
    """Every one that the sources name."""
    sources = Path(misspelled_variables.__code__.co_filename).parents[2].rglob("*.py")
    named = {n for s in sources for n in re.findall(r"\bTRAINCKPT_[A-Z_]+\b", s.read_text("utf-8"))}
    assert len(named) > 10
    assert misspelled_variables(dict.fromkeys(named, "x")) == []

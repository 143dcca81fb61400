"""Globs: with a slash the full name, without one the paths inside models."""

from __future__ import annotations

import pytest

from trainckpt.errors import ConfigurationError
from trainckpt.format.globs import parse_globs, parse_rename, renamed, select

NAMES = {
    "model/blocks.0.weight",
    "model/blocks.0.bias",
    "ema/blocks.0.weight",
    "rng/torch",
    "optimizer/model/blocks.0.weight/exp_avg",
}
MODELS = ["model", "ema"]


@pytest.mark.parametrize(
    ("globs", "found"),
    [
        ("blocks.*.weight", {"model/blocks.0.weight", "ema/blocks.0.weight"}),
        ("model/*", {"model/blocks.0.weight", "model/blocks.0.bias"}),
        ("*.bias,rng/*", {"model/blocks.0.bias", "rng/torch"}),
        ("*", {name for name in NAMES if name.startswith(("model/", "ema/"))}),
        ("*/*", NAMES),
        ("*/exp_avg", {"optimizer/model/blocks.0.weight/exp_avg"}),
    ],
)
def test_what_a_glob_means(globs, found):
    assert select(parse_globs(globs), NAMES, MODELS) == found


@pytest.mark.parametrize(
    ("glob", "near"),
    [("block.0.weight", "model/blocks.0.weight"), ("modle/blocks.0.bias", "model/blocks.0.bias")],
)
def test_one_that_means_nothing_is_refused_with_what_is_near(glob, near):
    with pytest.raises(ConfigurationError) as refused:
        select([glob], NAMES, MODELS)
    assert repr(glob) in refused.value.message
    assert near in refused.value.hint


@pytest.mark.parametrize("value", ["a,,b", "", 3, ["a", 3], {"a": 1}])
def test_what_is_no_glob_is_refused(value):
    with pytest.raises(ValueError):
        parse_globs(value)


@pytest.mark.parametrize(
    ("rename", "found"),
    [
        ("blocks: encoder, blocks.1: last", ["encoder.0.weight", "last.weight", "head.weight"]),
        ({"": "net"}, ["net.blocks.0.weight", "net.blocks.1.weight", "net.head.weight"]),
        ({"blocks.": "", "head.weight": "out"}, ["0.weight", "1.weight", "out"]),
        (lambda path: None if "blocks" in path else path, ["head.weight"]),
    ],
)
def test_paths_are_renamed_by_their_longest_beginning_or_a_function(rename, found):
    known = {f"model/{p}": p for p in ("blocks.0.weight", "blocks.1.weight", "head.weight")}
    assert list(renamed(known, parse_rename(rename))) == [f"model/{path}" for path in found]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"block": "x"}, "no tensor of the snapshot begins with 'block'"),
        ({"a": "b"}, "rename gives b and a the same name|rename gives a and b the same name"),
    ],
)
def test_a_renaming_that_fits_nothing_or_joins_two_tensors_is_refused(rename, message):
    with pytest.raises(ConfigurationError, match=message):
        renamed({"model/a": "a", "model/b": "b", "model/blocks": "c"}, rename)


@pytest.mark.parametrize("text", ["", "a", "a: b, c", 3, {}, {"a": 1}])
def test_other_values_are_no_renaming(text):
    with pytest.raises((ValueError, AttributeError)):
        parse_rename(text)

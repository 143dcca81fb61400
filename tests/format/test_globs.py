"""Globs: with a slash the full name, without one the paths inside models."""

from __future__ import annotations

import pytest

from trainckpt.errors import ConfigurationError
from trainckpt.format.globs import parse_globs, select

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

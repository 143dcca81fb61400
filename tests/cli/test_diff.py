"""`trainckpt diff`: equal runs show no difference, and every other kind of pair shows all."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import trainckpt
from tests.cli.resharded import train_sharded
from tests.end_to_end.training import attempt
from tests.ranks.processes import run_ranks
from trainckpt.cli.main import main


def diffed(capsys, *argv) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["diff", "--json", *map(str, argv)])
    return code, json.loads(capsys.readouterr().out)


def snapshot_of(place, **tracked):
    """A run with one snapshot of these objects."""
    with trainckpt.Checkpointer(place, **tracked):
        pass
    return place


def linear(change=lambda weight: None):
    """The same layer each time, changed."""
    torch.manual_seed(0)  # the generators are compared too
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        change(model.weight)
    return model


def test_two_equal_runs_show_no_difference(tmp_path, capsys):
    for name in ("a", "b"):
        attempt(tmp_path / name, epochs=1, every="3 steps")
    code, said = diffed(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, said["tensors"], said["values"], said["equal"]) == (0, [], [], True)
    assert said["compared"] > 10
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b@latest")]) == 0
    assert "no difference" in capsys.readouterr().out


def test_two_steps_of_a_run_show_what_moved_and_by_how_much(tmp_path, capsys):
    attempt(tmp_path / "run", epochs=2, every="1 steps", keep_last=9)
    code, said = diffed(capsys, f"{tmp_path / 'run'}@s1", f"{tmp_path / 'run'}@s3")
    assert code == 1
    found = {one["name"]: one for one in said["tensors"]}
    weight = found["model/0.weight"]
    assert (weight["kind"], weight["elements"]) == ("values", 16)
    assert 0 < weight["differing"] <= 16
    assert 0 < weight["max_abs"] < 1
    paths = {one["path"]: (one["a"], one["b"]) for one in said["values"]}
    assert paths["cursor.step"] == ("1", "3")
    assert any(path.startswith("scheduler.") for path in paths)
    assert main(["diff", f"{tmp_path / 'run'}@s1", f"{tmp_path / 'run'}@s3"]) == 1
    shown = capsys.readouterr().out
    for words in ("model/0.weight", "cursor.step", "tensors differ"):
        assert words in shown


def test_elements_are_counted_and_the_largest_difference_is_told(tmp_path, capsys):
    def change(weight):
        weight[0, 0] += 0.25
        weight[1, 2] -= 2.0

    a = snapshot_of(tmp_path / "a", model=linear())
    b = snapshot_of(tmp_path / "b", model=linear(change))
    (one,) = diffed(capsys, a, b)[1]["tensors"]
    assert (one["differing"], one["elements"], one["max_abs"]) == (2, 6, 2.0)
    (one,) = diffed(capsys, a, b, "--tolerance", "0.5")[1]["tensors"]
    assert (one["differing"], one["max_abs"]) == (1, 2.0)
    assert diffed(capsys, a, b, "--tolerance", "2")[0] == 0


def test_every_bit_counts_unless_a_tolerance_is_given(tmp_path, capsys):
    a = snapshot_of(tmp_path / "a", model=linear(lambda w: w.fill_(0.0)))
    b = snapshot_of(tmp_path / "b", model=linear(lambda w: w.fill_(-0.0)))
    (one,) = diffed(capsys, a, b)[1]["tensors"]
    assert (one["differing"], one["max_abs"]) == (6, 0.0)
    assert diffed(capsys, a, b, "--tolerance", "0")[0] == 0
    c = snapshot_of(tmp_path / "c", model=linear(lambda w: w.fill_(math.nan)))
    (one,) = diffed(capsys, a, c, "--tolerance", "9")[1]["tensors"]
    assert (one["differing"], one["max_abs"]) == (6, "nan")
    assert diffed(capsys, c, c, "--tolerance", "0")[0] == 0


@pytest.mark.parametrize(
    ("dtype", "a", "b", "most"),
    [
        (torch.int64, [2**60, 1], [2**60 + 7, 1], 7.0),
        (torch.int64, [-(2**63), 0], [2**63 - 1, -1], 2.0**64),
        (torch.uint64, [2**64 - 1, 3], [2**64 - 2, 3], 1.0),
        (torch.int32, [2**31 - 1, 0], [-(2**31), 0], 2.0**32 - 1),
        (torch.uint8, [255, 0], [0, 0], 255.0),
    ],
)
def test_integers_are_told_apart_whatever_their_size(tmp_path, capsys, dtype, a, b, most):
    """Two of 64 bits may be one in floating point, and would be equal within any tolerance."""
    places = []
    for name, values in (("a", a), ("b", b)):
        model = linear()
        model.register_buffer("n", torch.tensor(values, dtype=dtype))
        places.append(snapshot_of(tmp_path / name, model=model))
    for more in ([], ["--tolerance", "0.5"]):
        (one,) = diffed(capsys, *places, *more)[1]["tensors"]
        assert (one["name"], one["max_abs"]) == ("model/n", most)
    assert diffed(capsys, *places, "--tolerance", str(most))[0] == 0


def test_types_shapes_and_what_only_one_has(tmp_path, capsys):
    one = nn.ParameterDict({"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2)})
    two = nn.ParameterDict({"x": torch.ones(3), "y": torch.ones(2).half(), "w": torch.ones(2)})
    a, b = snapshot_of(tmp_path / "a", model=one), snapshot_of(tmp_path / "b", model=two)
    found = {t["name"]: (t["kind"], t["detail"]) for t in diffed(capsys, a, b)[1]["tensors"]}
    assert found == {
        "model/w": ("only in B", ""),
        "model/x": ("shape", "[2] and [3]"),
        "model/y": ("type", "float32 and float16"),
        "model/z": ("only in A", ""),
    }


def test_snapshots_of_different_layouts_are_compared_whole(tmp_path, capsys):
    for world in (1, 2):
        run_ranks(train_sharded, world, str(tmp_path / f"{world}"))
    _, said = diffed(capsys, tmp_path / "1", tmp_path / "2")
    apart = {one["name"]: one["max_abs"] for one in said["tensors"] if one["kind"] == "values"}
    assert all(most < 1e-5 for name, most in apart.items() if name.startswith("model/"))
    assert {"ddp", "fsdp"} >= set(said["not_compared"])
    assert {(o["kind"], o["rank"]) for o in said["tensors"] if o["kind"] == "only in B"} <= {
        ("only in B", 1)
    }
    assert diffed(capsys, tmp_path / "2", tmp_path / "2")[0] == 0


@pytest.mark.parametrize("text", ["-1", "much", "nan"])
def test_a_tolerance_is_a_number(tmp_path, text, capsys):
    assert main(["diff", str(tmp_path), str(tmp_path), "--tolerance", text]) == 78


def test_an_unknown_run_is_66(tmp_path, capsys):
    assert main(["diff", "--json", str(tmp_path / "none"), str(tmp_path / "none")]) == 66

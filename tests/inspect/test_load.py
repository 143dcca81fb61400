"""`trainckpt.load`: selective restore, from any layout, and nothing live touched in vain."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import trainckpt
from tests.cli import resharded
from tests.ranks.processes import preload, run_ranks
from trainckpt.errors import ConfigurationError, NothingToResume, StateMismatch, UnusableSnapshot

preload("tests.cli.resharded")


class Model(nn.Module):
    """Tied weights, and buffers of both kinds."""

    def __init__(self, seed=0, width=3):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(2), persistent=False)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def everything(model):
    """Parameters and all buffers, bit for bit comparable."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with the tag "best" after its first step; model and optimizer as they ended."""
    place = tmp_path_factory.mktemp("load") / "run"
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with trainckpt.Checkpointer(
        place, model=model, optimizer=optimizer, every="never", keep_last=9
    ) as ckpt:
        for step in range(3):
            if step == 1:
                ckpt.save(tag="best")
            ckpt.boundary()
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return place, model, optimizer


def test_without_a_target_it_returns_whole_tensors_by_full_name(trained):
    place, model, optimizer = trained
    found = trainckpt.load(place)
    assert torch.equal(found["model/embedding.weight"], model.embedding.weight)
    moment = optimizer.state[model.blocks[0].weight]["exp_avg"]
    assert torch.equal(found["optimizer/model/blocks.0.weight/exp_avg"], moment)
    assert "values.json" not in found


def test_a_module_gets_its_parameters_and_all_of_its_buffers(trained):
    place, model, _ = trained
    fresh = Model(seed=7)
    assert trainckpt.load(f"{place}@latest", into=fresh) is None
    assert equal(everything(fresh), everything(model))
    assert fresh.head.weight is fresh.embedding.weight
    compiled = torch.compile(Model(seed=8))
    trainckpt.load(place, into=compiled)
    assert equal(everything(compiled._orig_mod), everything(model))


def test_a_tag_or_an_id_names_an_older_one(trained):
    place, model, _ = trained
    best, by_id = Model(seed=7), Model(seed=8)
    trainckpt.load(f"{place}@best", into=best)
    trainckpt.load(f"{place}@s1", into=by_id)
    assert equal(everything(best), everything(by_id))
    assert not torch.equal(best.embedding.weight, model.embedding.weight)


def test_an_optimizer_is_loaded_whole_with_its_model_and_goes_on_the_same(trained):
    place, model, optimizer = trained
    fresh = Model(seed=7)
    other = torch.optim.AdamW(fresh.parameters(), 0.7)
    trainckpt.load(place, into={"model": fresh, "optimizer": other})
    assert other.param_groups[0]["lr"] == 0.1
    straight = copy.deepcopy(model)
    going_on = torch.optim.AdamW(straight.parameters(), 0.1)
    going_on.load_state_dict(optimizer.state_dict())
    for one, its in ((straight, going_on), (fresh, other)):
        one(torch.arange(5)).square().mean().backward()
        its.step()
    assert equal(everything(fresh), everything(straight))


@pytest.mark.parametrize("only", ["blocks.*.weight", "model/blocks.*.weight", ["blocks.?.weight"]])
def test_only_what_a_glob_means_is_loaded(trained, only):
    place, model, _ = trained
    assert set(trainckpt.load(place, only=only)) == {f"model/blocks.{i}.weight" for i in range(2)}
    fresh = Model(seed=7)
    before, trained_ones = everything(fresh), everything(model)
    trainckpt.load(place, into=fresh, only=only)
    for name, tensor in everything(fresh).items():
        meant = name in ("blocks.0.weight", "blocks.1.weight")
        assert torch.equal(tensor, (trained_ones if meant else before)[name]), name


def test_a_tied_tensor_is_found_under_each_of_its_names(trained):
    place, model, _ = trained
    assert set(trainckpt.load(place, only="head.weight")) == {"model/embedding.weight"}
    fresh = Model(seed=7)
    trainckpt.load(place, into=fresh, only="head.*")
    assert torch.equal(fresh.head.weight, model.head.weight)


def test_a_glob_without_a_slash_means_models_only(trained):
    place, _, _ = trained
    assert all(name.startswith("model/") for name in trainckpt.load(place, only="*"))
    found = trainckpt.load(place, only="optimizer/*/exp_avg")
    assert len(found) == 7
    assert all(name.endswith("/exp_avg") for name in found)


def test_a_glob_that_means_nothing_is_an_error_that_names_what_is_near(trained):
    place, _, _ = trained
    with pytest.raises(ConfigurationError, match=r"'blocks.0.wieght'") as refused:
        trainckpt.load(place, only=["norm.*", "blocks.0.wieght"])
    assert "model/blocks.0.weight" in refused.value.hint
    with pytest.raises(ConfigurationError, match="is no glob"):
        trainckpt.load(place, only=[])


def test_all_differences_are_listed_and_nothing_was_loaded(trained):
    place, _, _ = trained

    class Other(Model):
        def __init__(self):
            super().__init__(seed=7)
            self.norm = nn.Identity()
            self.blocks[0] = nn.Linear(3, 4)
            self.new = nn.Linear(2, 2)

    other = Other()
    before = everything(other)
    with pytest.raises(StateMismatch) as refused:
        trainckpt.load(place, into=other)
    said = "\n".join(refused.value.differences)
    shape = "model/blocks.0.weight has shape [3, 3] in the snapshot, [4, 3] now"
    for words in ("model/norm.weight is gone", "model/new.weight is new", shape):
        assert words in said
    assert equal(everything(other), before)
    trainckpt.load(place, into=other, only="blocks.1.*")
    with pytest.raises(StateMismatch, match=r"1 differences"):
        trainckpt.load(place, into=other, only="blocks.*.weight")


def test_nothing_is_loaded_if_a_byte_is_damaged(trained, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(trained[0], place)
    for file in place.glob("snapshots/*/*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    found = []
    fresh = Model(seed=7)
    before = everything(fresh)
    optimizer = torch.optim.AdamW(fresh.parameters())
    for into in (None, {"model": fresh, "optimizer": optimizer}):
        try:
            trainckpt.load(place, into=into)
        except UnusableSnapshot as error:
            found.append(error.message)
    assert found
    assert all("does not match its digest" in message for message in found)
    assert equal(everything(fresh), before)


def test_of_several_models_one_has_to_be_named(tmp_path):
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    with trainckpt.Checkpointer(tmp_path / "run", model=one, ema=two):
        pass
    with pytest.raises(ConfigurationError, match="2 models: ema, model") as refused:
        trainckpt.load(tmp_path / "run", into=nn.Linear(2, 2))
    assert "into={'ema': module}" in refused.value.hint
    fresh = nn.Linear(2, 2)
    trainckpt.load(tmp_path / "run", into={"ema": fresh})
    assert torch.equal(fresh.weight, two.weight)


def test_what_the_snapshot_does_not_have_or_is_of_another_kind_is_refused(trained):
    place, _, _ = trained
    with pytest.raises(StateMismatch, match="ema is not in the snapshot"):
        trainckpt.load(place, into={"ema": Model()})
    with pytest.raises(StateMismatch, match="optimizer was an optimizer, is a model"):
        trainckpt.load(place, into={"optimizer": Model()})
    model = Model()
    both = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with pytest.raises(ConfigurationError, match="optimizer can only be loaded whole"):
        trainckpt.load(place, into=both, only="blocks.*")
    with pytest.raises(ConfigurationError, match="into is a list"):
        trainckpt.load(place, into=[Model()])
    with pytest.raises(NothingToResume):
        trainckpt.load(f"{place}-none")


def test_whole_and_sharded_are_read_into_each_other(tmp_path):
    two = run_ranks(resharded.train_sharded, 2, str(tmp_path / "two"))
    assert two[0] == two[1]
    whole = trainckpt.load(tmp_path / "two", only="*.weight")
    assert {n.removeprefix("model/"): t.tolist() for n, t in whole.items()} == {
        name: value for name, value in two[0].items() if name.endswith("weight")
    }
    plain = resharded.plain(seed=9)
    trainckpt.load(tmp_path / "two", into=plain)
    assert {name: p.tolist() for name, p in plain.named_parameters()} == two[0]
    for sharded, read_all in run_ranks(resharded.load_sharded, 2, str(tmp_path / "two")):
        assert sharded == two[0]
        assert not read_all

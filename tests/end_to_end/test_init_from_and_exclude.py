"""Options `init_from` and `exclude`: what a new run begins with, and what is not saved."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import trainckpt
from tests.end_to_end.training import attempt, catalog, crashed, record
from trainckpt.errors import ConfigurationError, NothingToResume, StateMismatch
from trainckpt.inspect import contents
from trainckpt.run_directory import run_tiers


@pytest.fixture
def said(caplog):
    """What was logged, as one text."""
    logger = logging.getLogger("trainckpt")
    logger.addHandler(caplog.handler)
    level, _ = logger.level, logger.setLevel(logging.INFO)
    yield lambda: "\n".join(r.getMessage() for r in caplog.records)
    logger.setLevel(level)
    logger.removeHandler(caplog.handler)


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.norm(self.frozen(x)))


def train(place, seed=0, until=2, crash=False, **options):
    """Train until so many steps; the model, and the Checkpointer."""
    net = Net(seed)
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1, momentum=0.9)
    with trainckpt.Checkpointer(
        place, model=net, optimizer=optimizer, every="1 steps", **options
    ) as ckpt:
        first = {name: t.clone() for name, t in net.state_dict().items()}
        while ckpt.cursor.step < until:
            ckpt.boundary()
            net(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return net, first, ckpt


def equal(one, other):
    return all(torch.equal(one[n], other[n]) for n in {*one, *other})


# ---- init_from


def test_a_new_run_begins_with_the_weights_and_buffers_of_another(tmp_path, said):
    trained, _, _ = train(tmp_path / "old")
    _, first, ckpt = train(tmp_path / "new", seed=5, init_from=tmp_path / "old")
    assert equal(first, trained.state_dict())
    assert ckpt.resumed_from is None
    named = f"{tmp_path / 'old'}@s2~1.2"
    assert record(tmp_path / "new", 1)["init_from"] == named
    assert f"weights and buffers loaded from {named}" in said()


def test_on_a_resume_it_is_ignored(tmp_path, said):
    train(tmp_path / "old")
    trained, _, _ = train(tmp_path / "new", seed=5, init_from=f"{tmp_path / 'old'}@s1")
    place = str(tmp_path / "nowhere")
    _, first, ckpt = train(tmp_path / "new", seed=6, init_from=place, until=3)
    assert equal(first, trained.state_dict())
    assert ckpt.resumed_from.step == 2
    assert "init_from" not in record(tmp_path / "new", 2)


def test_a_name_that_differs_does_not_matter_where_there_is_one_model(tmp_path):
    trained, _, _ = train(tmp_path / "old")
    student = Net(seed=5)
    with trainckpt.Checkpointer(tmp_path / "new", student=student, init_from=tmp_path / "old"):
        assert equal(student.state_dict(), trained.state_dict())


def test_weights_that_do_not_fit_are_refused_with_all_differences_and_recorded(tmp_path):
    train(tmp_path / "old")
    other = nn.Linear(3, 3)
    with (
        pytest.raises(StateMismatch) as refused,
        trainckpt.Checkpointer(tmp_path / "new", model=other, init_from=tmp_path / "old"),
    ):
        pass
    assert len(refused.value.differences) > 5
    outcome = record(tmp_path / "new", 1)["outcome"]
    assert (outcome["outcome"], outcome["exit_code"]) == ("failed", 78)
    with pytest.raises(NothingToResume, match="there is no run at"):
        train(tmp_path / "another", init_from=str(tmp_path / "none"))
    train(tmp_path / "new", seed=5, init_from=tmp_path / "old")  # and once it fits
    assert record(tmp_path / "new", 2)["outcome"]["outcome"] == "finished"


class Other(nn.Module):
    """Another model: the first one's norm under another name, and a head of another shape."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "more": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 2)


def test_a_part_is_loaded_into_another_model_under_other_names(tmp_path):
    trained, _, _ = train(tmp_path / "old")
    other, how = Other(), {"only": "trunk.norm.*", "rename": {"norm": "trunk.norm"}}
    before = {name: t.clone() for name, t in other.state_dict().items()}
    with trainckpt.Checkpointer(tmp_path / "new", model=other, init_from=tmp_path / "old", **how):
        assert equal(other.trunk["norm"].state_dict(), trained.norm.state_dict())
        rest = {n: t for n, t in other.state_dict().items() if not n.startswith("trunk.norm")}
        assert equal(rest, {n: before[n] for n in rest})
    again = Other()
    trainckpt.load(tmp_path / "old", into=again, **how)
    assert equal(again.trunk["norm"].state_dict(), trained.norm.state_dict())


def test_a_part_that_does_not_fit_is_refused_by_name_and_nothing_is_loaded(tmp_path):
    train(tmp_path / "old")
    for how, error, message in [
        ({"only": "head.*"}, StateMismatch, r"head.weight has shape \[1, 3\] in the snapshot, "),
        (
            {"only": "trunk.*", "rename": {"norm": "trunk.norm"}},
            StateMismatch,
            "trunk.more.bias is",
        ),
        ({"rename": {"norm": "trunk.norm"}}, StateMismatch, "model/frozen.weight is gone"),
        ({"only": "nothing.*"}, ConfigurationError, "no tensor is called 'nothing.\\*'"),
        ({"rename": {"nrom": "trunk.norm"}}, ConfigurationError, "begins with 'nrom'"),
    ]:
        other = Other()
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(error, match=message):
            trainckpt.Checkpointer(
                tmp_path / "new", model=other, init_from=tmp_path / "old", **how
            ).resume("never")
        assert equal(other.state_dict(), before)
    with pytest.raises(ConfigurationError, match="init_from, which is not given"):
        trainckpt.Checkpointer(tmp_path / "new", model=Other(), only="head.*").resume("never")


# ---- exclude


def held(place):
    """The names of model tensors in the newest snapshot, and its model's values."""
    opened = contents.Contents(run_tiers.open_source(str(place)))
    names = {name for name in opened.names if name.startswith("model/")}
    return names, opened.values()["model"]


def test_what_is_excluded_is_not_in_the_snapshot_and_stays_as_the_script_makes_it(tmp_path, said):
    trained, _, _ = train(tmp_path / "run", exclude="model/frozen.*, norm.running_var")
    names, values = held(tmp_path / "run")
    assert not {name for name in names if "frozen" in name or "running_var" in name}
    assert values["excluded"] == [
        "model/frozen.bias",
        "model/frozen.weight",
        "model/norm.running_var",
    ]
    assert record(tmp_path / "run", 1)["exclude"] == ["model/frozen.*", "norm.running_var"]
    assert "exclude leaves 3 tensors out of snapshots" in said()

    other = Net(seed=9)
    _, first, ckpt = train(tmp_path / "run", seed=9, until=3, exclude=["frozen.*"])
    assert ckpt.resumed_from.step == 2
    assert torch.equal(first["frozen.weight"], other.frozen.weight)
    assert torch.equal(first["norm.running_var"], other.norm.running_var)
    for name in ("head.weight", "norm.running_mean"):
        assert torch.equal(first[name], trained.state_dict()[name])
    assert "same data, not bitwise" in said()
    assert "excluded, so left as the script made them: model/frozen.bias" in said()
    assert record(tmp_path / "run", 2)["outcome"]["exactness"] == "same data, not bitwise"
    assert "model/norm.running_var" in held(tmp_path / "run")[0]  # saved again from now on


def test_what_is_excluded_only_now_is_put_back_once_more(tmp_path, said):
    trained, _, _ = train(tmp_path / "run")
    _, first, _ = train(tmp_path / "run", seed=9, until=3, exclude="frozen.*")
    assert equal(first, trained.state_dict())
    assert "this resume is bitwise" in said()
    assert "model/frozen.weight" not in held(tmp_path / "run")[0]


def test_a_tensor_that_is_missing_and_was_never_excluded_is_still_a_difference(tmp_path):
    train(tmp_path / "run", exclude="frozen.*")

    class Larger(Net):
        def __init__(self):
            super().__init__(0)
            self.more = nn.Linear(2, 2)

    net = Larger()
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1, momentum=0.9)
    with (
        pytest.raises(StateMismatch) as refused,
        trainckpt.Checkpointer(tmp_path / "run", model=net, optimizer=optimizer),
    ):
        pass
    assert [line.split(" ")[0] for line in refused.value.differences] == [
        "model/more.bias",
        "model/more.weight",
    ]


def test_a_glob_that_means_no_tensor_is_refused_at_the_start(tmp_path):
    with pytest.raises(ConfigurationError, match="'model/forzen") as refused:
        train(tmp_path / "run", exclude="model/forzen.*")
    assert "model/frozen." in refused.value.hint


def test_gradients_and_moments_of_what_is_excluded_are_kept(tmp_path):
    crashed(tmp_path / "run", 3, exclude="0.weight", every="1 steps")
    (newest, *_) = [c for c in catalog(tmp_path / "run") if c.usable]
    assert "optimizer/model/0.weight/exp_avg" in newest.manifest.tensors
    assert "model/0.weight" not in newest.manifest.tensors
    _, ckpt = attempt(tmp_path / "run", exclude="0.weight")
    assert ckpt.resumed_from.step == 1
    assert trainckpt.load(tmp_path / "run", only="1.weight").keys() == {"model/1.weight"}

"""`trainckpt import`: what the real libraries wrote goes on here, bit for bit."""

from __future__ import annotations

import argparse
import json
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

import trainckpt
from tests.cli.test_export import Model, bits
from trainckpt.cli.main import main
from trainckpt.encryption import keys


@pytest.fixture(autouse=True)
def no_proof(monkeypatch):
    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)


def objects():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        out = model.low(model.norm(model.embedding(torch.arange(6))).bfloat16())
        loss = out.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def imported(capsys, *argv) -> dict:
    capsys.readouterr()
    assert main(["import", "--json", *map(str, argv)]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def state_of(model, optimizer, scheduler):
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }


def test_a_loop_that_saved_by_torch_goes_on_with_the_same_losses(tmp_path, capsys, caplog):
    mine = objects()
    train(*mine, 3)
    saved = {**state_of(*mine), "epoch": 2, "best": 0.5, "args": {"lr": 0.1}}
    torch.save(saved, tmp_path / "last.pt")
    options = ("--epoch", 2, "--without", "args")
    said = imported(capsys, tmp_path / "last.pt", tmp_path / "run", *options)
    assert said["came"].keys() == {"model", "optimizer", "scheduler"}
    assert (said["epoch"], said["step"]) == (2, 3)
    assert said["left"].keys() == {"args", "best", "position in the data", "random generators"}
    model, optimizer, scheduler = objects()
    named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    data = torch.utils.data.DataLoader(range(4), shuffle=True)
    caplog.set_level(logging.INFO, "trainckpt")
    with trainckpt.Checkpointer(tmp_path / "run", **named, loader=data) as ckpt:
        assert (ckpt.cursor.epoch, ckpt.cursor.step) == (2, 3)
        assert bits(state_of(*named.values())) == bits(state_of(*mine))
        losses = []
        for epoch in ckpt.epochs(3):
            assert epoch == 2
            for _ in ckpt.batches():
                losses += train(*named.values(), 1)
    assert losses == train(*mine, 4)
    assert "imported from" in caplog.text
    assert "not bitwise" in caplog.text
    with trainckpt.Checkpointer(tmp_path / "run", **named, loader=data) as ckpt:
        assert ckpt.cursor.step == 7


def test_every_format_gives_a_new_run_the_same_weights(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    model = Model()
    save_model(model, str(tmp_path / "tied.safetensors"))
    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(copies, tmp_path / "copies.safetensors")
    torch.save(nn.DataParallel(model).state_dict(), tmp_path / "wrapped.pth")
    torch.save(model.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    for name in ("tied.safetensors", "copies.safetensors", "wrapped.pth", "old.pth", "dcp"):
        imported(capsys, tmp_path / name, tmp_path / f"run-{name}")
        fresh = Model()
        start = f"{tmp_path}/run-{name}"
        with trainckpt.Checkpointer(tmp_path / f"new-{name}", model=fresh, init_from=start):
            assert bits(fresh.state_dict()) == bits(model.state_dict()), name
        trainckpt.load(start, into=(other := Model()))
        assert bits(other.state_dict()) == bits(model.state_dict()), name
        assert main(["verify", start]) == 0


@pytest.mark.long  # imports transformers
@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_transformers_gives_its_weights(safe, tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model, fresh = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    if safe:
        model.save_pretrained(tmp_path / "hf", max_shard_size="2KB")
        assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    else:
        (tmp_path / "hf").mkdir()
        torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")
    assert imported(capsys, tmp_path / "hf", tmp_path / "run")["format"] == "Hugging Face"
    with trainckpt.Checkpointer(tmp_path / "new", model=fresh, init_from=tmp_path / "run"):
        assert bits(fresh.state_dict()) == bits(model.state_dict())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # those of lightning itself
def test_a_checkpoint_of_lightning_gives_weights_optimizer_scheduler_and_position(tmp_path, capsys):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width):
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 2)

        def training_step(self, batch, _):
            return self.layer(batch).square().sum()

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, default_root_dir=tmp_path, enable_checkpointing=False, **quiet
    )
    module = Module(3)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    said = imported(capsys, tmp_path / "last.ckpt", tmp_path / "run")
    assert (said["format"], said["epoch"], said["step"]) == ("Lightning", 2, 4)
    assert {"loops", "hyper_parameters"} <= said["left"].keys()
    fresh = Module(3)
    (optimizer,), (scheduler,) = fresh.configure_optimizers()
    named = {"model": fresh, "optimizer": optimizer, "scheduler": scheduler}
    with trainckpt.Checkpointer(tmp_path / "run", **named) as ckpt:
        assert (ckpt.cursor.epoch, ckpt.cursor.step) == (2, 4)
        assert bits(fresh.state_dict()) == bits(module.state_dict())
        assert bits(optimizer.state_dict()) == bits(trainer.optimizers[0].state_dict())
        assert scheduler.state_dict() == trainer.lr_scheduler_configs[0].scheduler.state_dict()


SHARDED = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
import trainckpt
from tests.cli.test_import import sharded_objects

dist.init_process_group("gloo")
model, optimizer = sharded_objects(fully_shard)
weights = model.state_dict()
dcp.load(weights, checkpoint_id=sys.argv[1])
for _ in range(2):
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
names = ("model", "optimizer")
dcp.save(dict(zip(names, get_state_dict(model, optimizer))), checkpoint_id=sys.argv[2])
whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
moments = [state["exp_avg_sq"].full_tensor() for state in optimizer.state.values()]
if dist.get_rank() == 0:
    torch.save({"model": whole, "moments": moments}, sys.argv[3])
other, optimizer = sharded_objects(fully_shard)
with trainckpt.Checkpointer(sys.argv[4], model=other, optimizer=optimizer) as ckpt:
    assert ckpt.cursor.step == 1
    given = torch.load(sys.argv[5], weights_only=True)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor.full_tensor(), given["model"][name]), name
    for state, then in zip(optimizer.state.values(), given["optimizer"]["state"].values()):
        assert torch.equal(state["exp_avg"].full_tensor(), then["exp_avg"])
dist.destroy_process_group()
"""


def sharded_objects(shard=lambda module: module):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    for layer in (model[0], model):
        shard(layer)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_sharded_dcp_goes_in_and_out_bit_for_bit(tmp_path, capsys):
    model, optimizer = sharded_objects()
    with torch.no_grad():
        model[0].weight.mul_(3)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "given.pt")
    imported(capsys, tmp_path / "given.pt", tmp_path / "given")
    with trainckpt.Checkpointer(tmp_path / "first", model=model, optimizer=optimizer) as ckpt:
        ckpt.boundary()
    argv = ["export", str(tmp_path / "first"), str(tmp_path / "out"), "--format", "dcp"]
    assert main(argv) == 0
    (tmp_path / "sharded.py").write_text(SHARDED)
    places = [str(tmp_path / name) for name in ("out", "in", "whole.pt", "given", "given.pt")]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, str(tmp_path / "sharded.py"), *places],
        env={**__import__("os").environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "in").glob("*.distcp"))) == 2
    said = imported(capsys, tmp_path / "in", tmp_path / "run")
    assert (said["format"], said["step"]) == ("DCP", 2)
    whole = torch.load(places[2], weights_only=True)
    fresh, optimizer = sharded_objects()
    with trainckpt.Checkpointer(tmp_path / "run", model=fresh, optimizer=optimizer):
        assert bits(fresh.state_dict()) == bits(whole["model"])
        moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
        assert bits(moments) == bits(whole["moments"])
        assert [int(state["step"]) for state in optimizer.state.values()] == [2, 2, 2]


@pytest.mark.parametrize("form", ["by number", "flattened"])
def test_an_optimizer_of_dcp_comes_in_every_form(form, tmp_path, capsys):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, optimizer, scheduler = objects()
    train(model, optimizer, scheduler, 2)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    state = optimizer.state_dict() if form == "by number" else flat
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "dcp")
    imported(capsys, tmp_path / "dcp", tmp_path / "run")
    fresh, fresh_optimizer, _ = objects()
    named = {"model": fresh, "optimizer": fresh_optimizer}
    with trainckpt.Checkpointer(tmp_path / "run", **named) as ckpt:
        assert bits(fresh_optimizer.state_dict()) == bits(optimizer.state_dict())
        assert ckpt.cursor.step == 2


class Evil:
    def __reduce__(self):
        return (open, ("was-run", "w"))


@pytest.mark.parametrize("form", ["dcp", "torch"])
def test_nothing_in_a_source_is_executed(form, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    if form == "dcp":
        source.mkdir()
        (source / ".metadata").write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"model": {"w": torch.ones(2)}, "args": Evil()}, source)
    assert main(["import", str(source), str(tmp_path / "run")]) == 65
    err = capsys.readouterr().err
    assert "open" in err
    assert not (tmp_path / "was-run").exists()
    assert not (tmp_path / "run").exists()


def test_values_that_only_code_could_read_are_named_and_left(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    state = {"model": Model().state_dict(), "args": argparse.Namespace(lr=1), "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    said = imported(capsys, tmp_path / "dcp", tmp_path / "run")
    assert said["left"]["args"] == "only code could read it"
    assert said["step"] == 5


def test_an_optimizer_of_other_parameters_is_refused(tmp_path, capsys):
    model, optimizer, scheduler = objects()
    train(model, optimizer, scheduler, 1)
    torch.save({"net": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    imported(capsys, tmp_path / "a.pt", tmp_path / "run", "--rename", "net=model")
    backwards = torch.optim.AdamW(list(model.parameters())[::-1])
    with (
        pytest.raises(trainckpt.StateMismatch, match="init_from"),
        trainckpt.Checkpointer(tmp_path / "run", model=model, optimizer=backwards),
    ):
        pass


def test_an_optimizer_of_another_class_is_refused(tmp_path, capsys):
    model, optimizer, scheduler = objects()
    train(model, optimizer, scheduler, 1)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    imported(capsys, tmp_path / "a.pt", tmp_path / "run")
    other = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(trainckpt.StateMismatch, match="had betas, and has none now"),
        trainckpt.Checkpointer(tmp_path / "run", model=model, optimizer=other),
    ):
        pass


def test_parameters_that_had_other_options_are_not_put_in_one_group(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model, _, _ = objects()
    first, *others = (name for name, _ in model.named_parameters())
    named = dict(model.named_parameters())
    groups = [{"params": [named[first]], "lr": 0.5}, {"params": [named[n] for n in others]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    sum(p.float().sum() for p in model.parameters()).backward()
    optimizer.step()
    state = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=tmp_path / "dcp")
    imported(capsys, tmp_path / "dcp", tmp_path / "run")
    one_group = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        pytest.raises(trainckpt.StateMismatch, match="groups with other options"),
        trainckpt.Checkpointer(tmp_path / "run", model=model, optimizer=one_group),
    ):
        pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "no known format"),
        (lambda path: torch.save({"step": 3}, path), "no model"),
        (lambda path: torch.save([1], path), "not a dict"),
    ],
)
def test_what_cannot_be_imported_is_78(make, why, tmp_path, capsys):
    make(tmp_path / "source")
    assert main(["import", str(tmp_path / "source"), str(tmp_path / "run")]) == 78
    assert why in capsys.readouterr().err


def damaged(path, kind):
    import torch.distributed.checkpoint as dcp

    model = Model().state_dict()
    if kind in ("metadata", "no data"):
        dcp.save(model, checkpoint_id=path)
        if kind == "no data":
            next(path.glob("*.distcp")).unlink()
            return path
    elif kind == "safetensors":
        path = path.with_suffix(".safetensors")
        save_file({"a": torch.ones(3000)}, path)
    elif kind == "torch":
        torch.save(model, path)
    else:
        other = {"loops": [1]} if kind == "lightning" else {"global_step": "ten"}
        torch.save({"pytorch-lightning_version": "2", "state_dict": model, **other}, path)
        return path
    file = path / ".metadata" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-700])
    return path


@pytest.mark.parametrize(
    "kind", ["metadata", "no data", "safetensors", "torch", "lightning", "step of lightning"]
)
def test_a_damaged_source_is_65_and_leaves_no_run(kind, tmp_path, capsys):
    source = damaged(tmp_path / "source", kind)
    assert main(["import", str(source), str(tmp_path / "run")]) == 65
    assert str(source) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_an_imported_run_is_encrypted_on_request(tmp_path, capsys, monkeypatch):
    identity = keys.generate()
    keys.write_identity(tmp_path / "me.key", identity)
    model = Model()
    torch.save(model.state_dict(), tmp_path / "m.pt")
    run = tmp_path / "run"
    imported(capsys, tmp_path / "m.pt", run, "--encrypt-to", identity.recipient)
    with pytest.raises(trainckpt.TrainckptError):
        trainckpt.load(run)
    monkeypatch.setenv("TRAINCKPT_IDENTITY", str(tmp_path / "me.key"))
    trainckpt.load(run, into=(fresh := Model()))
    assert bits(fresh.state_dict()) == bits(model.state_dict())


def test_a_run_is_not_imported_over(tmp_path, capsys):
    torch.save(Model().state_dict(), tmp_path / "m.pt")
    imported(capsys, tmp_path / "m.pt", tmp_path / "run")
    assert main(["import", str(tmp_path / "m.pt"), str(tmp_path / "run")]) == 78
    assert "holds a run already" in capsys.readouterr().err

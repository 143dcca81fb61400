"""`trainckpt export`: what it writes is what other libraries load, and the model itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import trainckpt
from tests.cli.test_output import golden
from trainckpt.cli.main import main
from trainckpt.format import layout


class Model(nn.Module):
    """Tied weights, a buffer that is not persistent, integers, bfloat16."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run of one snapshot, and the model that it holds."""
    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    with trainckpt.Checkpointer(tmp_path / "run", model=model, optimizer=optimizer) as ckpt:
        ckpt.boundary()
        model.norm(model.embedding(torch.arange(6))).square().sum().backward()
        optimizer.step()
    return tmp_path / "run", model


def exported(capsys, *argv) -> dict:
    capsys.readouterr()
    assert main(["export", "--json", *map(str, argv)]) == 0
    return json.loads(capsys.readouterr().out)


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in found
    )


def test_a_file_holds_what_the_state_dict_holds_with_a_tied_tensor_once(trained, tmp_path, capsys):
    run, model = trained
    out = tmp_path / "model.safetensors"
    said = exported(capsys, run, out)
    expected = dict(model.state_dict())
    del expected["head.weight"]
    assert same(load_file(out), expected)
    assert said["tied"] == {"head.weight": "embedding.weight"}
    assert said["tensors"] == len(expected)
    assert "mask" not in expected
    with safe_open(out, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
        assert opened.metadata()["head.weight"] == "embedding.weight"
    fresh = Model()
    assert load_model(fresh, out) == (set(), [])
    assert same(fresh.state_dict(), model.state_dict())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


def test_copies_of_tied_tensors_load_strictly(trained, tmp_path, capsys):
    run, model = trained
    exported(capsys, f"{run}@latest", tmp_path / "m.safetensors", "--tied", "copy")
    fresh = Model()
    fresh.load_state_dict(load_file(tmp_path / "m.safetensors"), strict=True)
    assert same(fresh.state_dict(), model.state_dict())


def test_a_folder_has_the_files_and_the_index_that_transformers_reads(trained, tmp_path, capsys):
    run, model = trained
    out = tmp_path / "exported"
    out.mkdir()
    (out / "config.json").write_text("{}")
    said = exported(capsys, run, out, "--max-shard-size", "100B", "--tied", "copy")
    number = len(said["files"])
    assert number > 2
    names = [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
    there = {path.name for path in out.iterdir()}
    assert there == {*names, "model.safetensors.index.json", "config.json"}
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for n, t in model.state_dict().items())
    loaded = {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}
    assert set(index["weight_map"].values()) == set(names)
    Model().load_state_dict(loaded, strict=True)
    assert same(loaded, dict(model.state_dict()))

    assert main(["export", str(run), str(out)]) == 78
    assert "--force" in capsys.readouterr().err
    assert exported(capsys, run, out, "--force")["files"][0]["name"] == "model.safetensors"
    assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json"}


def test_floats_are_converted_and_the_rest_is_not(trained, tmp_path, capsys):
    run, model = trained
    exported(capsys, run, tmp_path / "m.safetensors", "--dtype", "bf16")
    found = load_file(tmp_path / "m.safetensors")
    assert found["embedding.weight"].dtype == torch.bfloat16
    assert torch.equal(found["embedding.weight"], model.embedding.weight.to(torch.bfloat16))
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    exported(capsys, run, tmp_path / "f.safetensors", "--dtype", "fp32")
    assert load_file(tmp_path / "f.safetensors")["low.weight"].dtype == torch.float32


def test_only_what_was_asked_for_is_exported(trained, tmp_path, capsys):
    run, _ = trained
    out = tmp_path / "m.safetensors"
    exported(capsys, run, out, "--tensors", "norm.*,head.weight")
    assert set(load_file(out)) == {
        "head.weight",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert (
        main(["export", "--json", "--force", str(run), str(out), "--tensors", "nrm.weight"]) == 78
    )
    said = json.loads(capsys.readouterr().out)
    assert "'nrm.weight'" in said["error"]
    assert "model/norm.weight" in said["hint"]


def test_everything_has_full_names(trained, tmp_path, capsys):
    run, _ = trained
    exported(capsys, run, tmp_path / "m.safetensors", "--all")
    found = load_file(tmp_path / "m.safetensors")
    assert {"model/mask", "optimizer/model/embedding.weight/exp_avg", "rng/torch"} <= found.keys()


def test_two_ranks_and_the_first_format_are_exported_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(layout, "UNCUT_BYTES", 64)  # as the golden files were written
    run = golden(tmp_path, "two")
    assert main(["export", str(run), str(tmp_path / "m.safetensors")]) == 78
    assert "complex128, a type that safetensors does not have" in capsys.readouterr().err
    tensors = json.loads((run / "snapshots/s2m1~1.1/manifest.json").read_text())["tensors"]
    models = {name.removeprefix("model/") for name in tensors if name.startswith("model/")}
    models.remove("as_complex128")
    said = exported(capsys, run, tmp_path / "m.safetensors", "--tensors", ",".join(models))
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == models
    shapes = {n: list(t.shape) for n, t in found.items() if not t.is_complex()}
    assert shapes == {n: tensors[f"model/{n}"][1] for n in shapes}
    assert found["as_complex64"].dtype == torch.complex64
    assert any("older snapshot" in note for note in said["notes"])
    exported(capsys, run, tmp_path / "all.safetensors", "--all")
    names = load_file(tmp_path / "all.safetensors").keys()
    own = {name for name, entry in tensors.items() if entry[2] == "rank"} - {"values.json"}
    assert {n.removesuffix("@rank1") for n in names} == tensors.keys() - {"values.json"}
    assert {f"{n}@rank1" for n in own} >= {n for n in names if n.endswith("@rank1")} != set()


def test_of_several_models_one_has_to_be_chosen(tmp_path, capsys):
    one, two = nn.Linear(2, 2), nn.Linear(2, 3)
    with trainckpt.Checkpointer(tmp_path / "run", model=one, ema=two):
        pass
    out = tmp_path / "m.safetensors"
    assert main(["export", str(tmp_path / "run"), str(out)]) == 78
    assert "2 models: ema, model" in capsys.readouterr().err
    exported(capsys, tmp_path / "run", out, "--tensors", "ema/*")
    assert same(load_file(out), dict(two.state_dict()))


def test_what_stands_there_is_replaced_only_whole(trained, tmp_path, capsys):
    run, _ = trained
    out = tmp_path / "m.safetensors"
    out.write_bytes(b"older")
    assert main(["export", str(run), str(out)]) == 78
    (file,) = run.glob("snapshots/*/rank00000.safetensors")
    data = bytearray(file.read_bytes())
    data[4096 + 8] ^= 1  # the larger items come first: the embedding or its moments
    data[-40] ^= 1
    file.write_bytes(data)
    code = main(["export", "--json", "--force", "--all", str(run), str(out)])
    assert code == 65
    assert "does not match its digest" in json.loads(capsys.readouterr().out)["error"]
    assert out.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.safetensors", "run"]


def test_force_replaces_what_an_export_wrote_and_leaves_other_files(trained, tmp_path, capsys):
    run, _ = trained
    others = {"model_ema.safetensors", "model-lora.safetensors", "model.fp16.safetensors", "x.json"}
    out = tmp_path / "out"
    out.mkdir()
    for name in others:
        (out / name).write_text("mine")
    exported(capsys, run, out, "--max-shard-size", "50B")  # those are in nobody's way
    assert {path.name for path in out.iterdir()} > {*others, "model.safetensors.index.json"}
    exported(capsys, run, out, "--force")
    assert {path.name for path in out.iterdir()} == {*others, "model.safetensors"}
    assert all((out / name).read_text() == "mine" for name in others)


def test_of_everything_what_safetensors_has_no_type_for_is_bytes_and_says_so(tmp_path, capsys):
    model = nn.Linear(2, 2)
    model.register_buffer("waves", torch.tensor([1 + 2j, 3j]))
    model.register_buffer("wide", torch.tensor([1 + 2j], dtype=torch.complex128))
    with trainckpt.Checkpointer(tmp_path / "run", model=model):
        pass
    out = tmp_path / "m.safetensors"
    said = exported(capsys, tmp_path / "run", out, "--all")
    assert torch.equal(load_file(out)["model/waves"], model.waves)
    assert torch.equal(load_file(out)["model/wide"].view(torch.complex128)[..., 0], model.wide)
    (note,) = [note for note in said["notes"] if "as bytes" in note]
    assert note.endswith("model/wide (complex128)")
    with safe_open(out, "pt") as file:
        assert file.metadata()["model/wide:type"] == "complex128"


def test_a_newer_snapshot_that_is_damaged_is_named_when_an_older_one_is_read(
    make_run, tmp_path, capsys
):
    run = make_run(steps=3)
    file = next(run.glob("snapshots/s3~*/rank00000.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    why = f"s3~1.3 is passed over: {file.name} has "
    said = exported(capsys, run, tmp_path / "m.safetensors")
    assert said["snapshot"] == "s2~1.2"
    assert said["notes"][0].startswith(why)
    assert main(["export", str(run), str(tmp_path / "m2.safetensors")]) == 0
    shown = capsys.readouterr()
    assert "tensors of s2~1.2, " in shown.out
    assert f"note: {why}" in shown.err
    assert main(["diff", f"{run}@s2", str(run)]) == 0
    assert f"note: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--max-shard-size", "5 apples"], "is not a size"),
        (["--max-shard-size", "1GB"], "is one file"),
        (["--tensors", "a,,b"], "is not a glob"),
        (["--dtype", "int8"], "invalid choice"),
    ],
)
def test_what_cannot_be_is_78(tmp_path, argv, why, capsys):
    assert main(["export", str(tmp_path), str(tmp_path / "m.safetensors"), *argv]) == 78
    assert why in capsys.readouterr().err


def test_a_torch_file_is_a_state_dict_with_tied_weights_in_one_storage(trained, tmp_path, capsys):
    run, model = trained
    said = exported(capsys, run, tmp_path / "m.pt", "--format", "torch")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert same(found, model.state_dict())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert [file["name"] for file in said["files"]] == ["m.pt"]
    Model().load_state_dict(found, strict=True)
    assert main(["export", str(run), str(tmp_path / "m.pt"), "--format", "torch"]) == 78
    only = ("--tensors", "norm.*", "--dtype", "fp64", "--force")
    exported(capsys, run, tmp_path / "m.pt", "--format", "torch", *only)
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found.keys() == {n for n in model.state_dict() if n.startswith("norm.")}
    assert found["norm.weight"].dtype == torch.float64
    assert found["norm.num_batches_tracked"].dtype == torch.int64


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A run with all kinds of state in its last snapshot, and the objects."""
    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)
    model = Model()
    groups = [{"params": model.embedding.parameters()}, {"params": model.low.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with trainckpt.Checkpointer(tmp_path / "run", **objects) as ckpt:
        for _ in range(3):
            ckpt.boundary()
            out = model.low(model.embedding(torch.arange(6)).bfloat16())
            out.square().sum().backward()
            optimizer.step()
            scheduler.step()
    return tmp_path / "run", objects


def fresh_objects():
    model = Model()
    groups = [{"params": model.embedding.parameters()}, {"params": model.low.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def bits(state):
    """Nested state with tensors by type and bytes, for a comparison of every bit."""
    if isinstance(state, torch.Tensor):
        return str(state.dtype), tuple(state.shape), bytes(state.flatten().view(torch.uint8))
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(each) for each in state] if isinstance(state, (list, tuple)) else state


def test_all_objects_of_a_torch_file_go_on_in_a_script_without_us(whole, tmp_path, capsys):
    run, objects = whole
    said = exported(capsys, run, tmp_path / "all.pt", "--format", "torch", "--all")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    fresh = fresh_objects()
    for name, value in fresh.items():
        value.load_state_dict(found[name])
        assert bits(value.state_dict()) == bits(objects[name].state_dict()), name
    assert said["notes"] == ["not in it: rng; only trainckpt restores them"]


def test_a_dcp_directory_is_loaded_by_the_real_library(whole, tmp_path, capsys):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    run, objects = whole
    exported(capsys, run, tmp_path / "weights", "--format", "dcp")
    model = Model()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "weights")
    assert bits(model.state_dict()) == bits(objects["model"].state_dict())
    exported(capsys, run, tmp_path / "all", "--format", "dcp", "--all")
    fresh = fresh_objects()
    model, optimizer = fresh["model"], fresh["optimizer"]
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "all")
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert bits(model.state_dict()) == bits(objects["model"].state_dict())
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert bits([s[name] for s in optimizer.state.values()]) == bits(
            [s[name] for s in objects["optimizer"].state.values()]
        )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.long  # imports transformers
def test_transformers_loads_a_folder_with_the_config_of_its_model(tmp_path, capsys, monkeypatch):
    from transformers import GPT2Config, GPT2LMHeadModel

    monkeypatch.delenv("TRAINCKPT_PROVE", raising=False)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, n_positions=8)
    model = GPT2LMHeadModel(config)
    with trainckpt.Checkpointer(tmp_path / "run", model=model) as ckpt:
        ckpt.boundary()
    out = tmp_path / "hf"
    said = exported(capsys, tmp_path / "run", out, "--format", "hf", "--max-shard-size", "2KB")
    assert "config.json" in said["notes"][-1]
    assert len(said["files"]) > 2
    config.save_pretrained(out)
    found = GPT2LMHeadModel.from_pretrained(out)
    assert bits(found.state_dict()) == bits(model.state_dict())
